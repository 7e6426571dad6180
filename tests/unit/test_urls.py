"""URLs among the settings: every form that works is taken, every other named without its value."""

from __future__ import annotations

import time

import pytest

from models.errors import ConfigurationError
from models.settings import load_settings

SECRET = "S3CRET"
LONGEST_S = 1.0

POSTGRESQL = [
    "postgresql://u:p@h:5432/x",
    "postgres://h/x",
    "postgresql+psycopg://u@h/x?sslmode=require",
    "postgresql:///x?host=/run/postgresql",
    "postgresql://h1,h2/x",
    "postgresql:///x?host=h1:1&host=h2:2",
    "postgresql://u:p@[::1]:5432/x",
    # As they are in a password: SQLAlchemy reads them, and always did.
    "postgresql://u:p/?#&=q@h/x",
    "postgresql://u:p%40q@h/x",
    "postgresql://u:p q@h/x",
]
REDIS = [
    "redis://h",
    "redis://h/",
    "redis://h:6379/0",
    "rediss://u:p%2Fq@h:6379/3?ssl_cert_reqs=none&ssl_ca_certs=/etc/ca.pem",
    "redis://:p@q@h/0",
    "redis://[::1]:6379/0",
    "redis://my_redis:6379/0",
]
REDIS_PLACES = [
    *REDIS,
    "unix:///run/redis.sock",
    "unix://u:p@/run/redis.sock?db=1",
]
BROKERS = [
    *REDIS,
    "redis://h1/0;redis://h2/0",
    "sentinel://h1:26379;sentinel://:p@h2:26379/0",
    "redis+socket:///run/redis.sock?virtual_host=0",
    "amqp://",
    "amqps://u:p@h:5671/v/w",
    "memory://",
    "filesystem://",
    "sqs://id:key@",
    "azureservicebus://policy:a/b+c=@space",
]
HTTP = [
    "http://h",
    "https://h:8410/",
    "https://h/a/path",
    "HTTPS://h",
    "http://[::1]:8410",
    "http://127.0.0.1:1",
    "https://bücher.example",
]
FITTING = [
    *(("DATABASE_URL", url) for url in POSTGRESQL),
    *(("CELERY_BROKER_URL", url) for url in BROKERS),
    *(("RATE_LIMIT_REDIS_URL", url) for url in REDIS_PLACES),
    *(("REDIS_URL", url) for url in REDIS_PLACES),
    ("REDIS_URL", "redis+sentinel://u:p@h1:26379,[::1]:26380/billing/0?sentinel_password=a@b"),
    ("REDIS_URL", "rediss+cluster://n1:6379,n2:6379"),
    *((name, url) for name in ("STRIPE_API_BASE", "VAULT_URL", "FLOWER_URL") for url in HTTP),
    ("NSQD_TCP_ADDRESS", "h:4150, [::1]:4150,::1:4150"),
    ("NSQD_HTTP_ADDRESS", "h:4151,http://h2:4151"),
    ("NSQ_LOOKUPD_HTTP_ADDRESS", "http://h:4161"),
    ("VAULT_LISTEN", "[::]:0"),
    ("BRIDGE_HEALTH_LISTEN", ":::8080"),
]

NO_AUTHORITY = [
    "//[::1",
    "//[x]",
    "//[::1]x",
    "//h:x",
    "//h:0",
    "//h:65536",
    "//h:" + "9" * 5000,
    f"//:{SECRET}/y@h:1",
    f"//u:{SECRET}#y@h:1",
    f"//u:{SECRET}?y@h:1",
    f"//u:1/{SECRET}@h",
    f"//u:1?{SECRET}@h",
    f"//u:1#{SECRET}@h",
    "//a..b",
    "//a b",
    "//" + "a" * 64,
    "//h\tx",
    "",
    "//",
    "//:1",
    "//h:",
]
REFUSED = [
    *(
        ("DATABASE_URL", url)
        for url in (
            SECRET,
            f"mysql://u:{SECRET}@h/x",
            f"postgresql://u:p@ss:{SECRET}@h/x",
            f"postgresql://u:p@{SECRET}@h/x",
            f"postgresql://u:p@ss/{SECRET}@h/x",
            "postgresql://h:x/x",
            "postgresql://h:0/x",
            "postgresql://h:65536/x",
            "postgresql://h:1,h:2/x",
            "postgresql://[::1/x",
            "postgresql://h\t/x",
        )
    ),
    *(
        (name, f"{scheme}:{behind}")
        for name, scheme in (
            ("CELERY_BROKER_URL", "redis"),
            ("CELERY_BROKER_URL", "sentinel"),
            ("REDIS_URL", "redis"),
            ("RATE_LIMIT_REDIS_URL", "rediss"),
            ("STRIPE_API_BASE", "https"),
            ("VAULT_URL", "http"),
            ("FLOWER_URL", "http"),
        )
        for behind in NO_AUTHORITY
    ),
    *(
        (name, f"redis://h/{path}")
        for name in ("CELERY_BROKER_URL", "REDIS_URL", "RATE_LIMIT_REDIS_URL")
        for path in (SECRET, "-1", "0/1", f"0?{SECRET}", "0?a=b#c", "0?" + "a=" * 5000 + "#")
    ),
    ("CELERY_BROKER_URL", SECRET),
    ("CELERY_BROKER_URL", f"redis://h/0;redis://:{SECRET}/y@h/0"),
    ("CELERY_BROKER_URL", f"redis://:{SECRET};y@h/0"),
    ("CELERY_BROKER_URL", f"amqp://u:{SECRET}/y@h"),
    ("REDIS_URL", f"unix://u:{SECRET}/y@/run/redis"),
    ("REDIS_URL", "unix://"),
    ("REDIS_URL", "unix://host/run/redis"),
    ("REDIS_URL", f"http://u:{SECRET}@h"),
    ("REDIS_URL", f"redis+sentinel://:{SECRET}/y@h:1/billing"),
    ("REDIS_URL", f"redis+sentinel://u:1/{SECRET}@h:1"),
    ("REDIS_URL", "redis+cluster://[::1:6379"),
    ("REDIS_URL", "redis+cluster://a..b:6379"),
    ("RATE_LIMIT_REDIS_URL", f"redis+sentinel://:{SECRET}@h:1/billing"),
    ("VAULT_URL", f"ftp://u:{SECRET}@h"),
    ("VAULT_URL", f"http://h?{SECRET}"),
    ("FLOWER_URL", "localhost:5555"),
    *(
        (name, address)
        for name in ("NSQD_TCP_ADDRESS", "NSQD_HTTP_ADDRESS", "NSQ_LOOKUPD_HTTP_ADDRESS")
        for address in (SECRET, "h:x", "[::1", "h:1,https://h:1", "u:p@h:1", "a..b:1")
    ),
    ("NSQD_TCP_ADDRESS", "http://h:4150"),
    ("NSQ_LOOKUPD_HTTP_ADDRESS", "http://[::1"),
    ("VAULT_LISTEN", "a..b:1"),
    ("VAULT_LISTEN", "h:" + "9" * 5000),
    ("BRIDGE_HEALTH_LISTEN", "[::1"),
    ("BRIDGE_HEALTH_LISTEN", "h:0"),
]


@pytest.mark.parametrize(("name", "value"), FITTING)
def test_every_form_that_works_is_taken_as_it_is(name: str, value: str) -> None:
    assert getattr(load_settings({name: value}), name.lower()) == value


@pytest.mark.parametrize(("name", "value"), REFUSED)
def test_any_other_is_named_in_one_line_without_its_value(name: str, value: str) -> None:
    begun = time.monotonic()
    with pytest.raises(ConfigurationError, match=rf"^{name}\b") as refused:
        load_settings({name: value})
    assert time.monotonic() - begun < LONGEST_S
    said = str(refused.value)
    assert "\n" not in said
    assert SECRET not in said
    assert refused.value.__cause__ is None
    assert refused.value.__context__ is None or refused.value.__suppress_context__


@pytest.mark.parametrize("name", ["DATABASE_URL", "OPERATOR", "REDIS_STREAM", "LEASE_S"])
def test_a_value_that_is_no_utf_8_is_refused(name: str) -> None:
    with pytest.raises(ConfigurationError, match=rf"^{name} is not UTF-8$"):
        load_settings({name: "postgresql://\udcff"})
