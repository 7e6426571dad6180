"""Settings and arguments that nothing can be done with: one line, exit code 1, no secret in it."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import psycopg
import pytest
from sqlalchemy.engine import make_url

from sandbox import binaries
from tests.support.commands import WITHIN_S, Commands

SECRET = "S3CRET"
NO_TEXT = "\udcff"
"""How Python hands on the byte 0xFF of a command line."""
OFF = {"VAULT_MODE": "off", "STRIPE_API_KEY": "sk_test_1"}
SELF = {
    "VAULT_MODE": "self",
    "VAULT_ADMIN_KEY": "admin-key-of-the-tests",
    "VAULT_ENCRYPTION_KEYS": "A" * 43 + "=",
}


@pytest.fixture
def celery(environment: dict[str, str], tmp_path: Path) -> Commands:
    return Commands(environment, tmp_path)


# -- URLs --------------------------------------------------------------------------------------

LEDGER = ("ledger", "list")
RECONCILE = ("reconcile", "R")
BROKER = f"redis://:{SECRET}/y@127.0.0.1:6379/0"


@pytest.mark.parametrize(
    ("name", "value", "command", "changes"),
    [
        ("DATABASE_URL", f"postgresql://u:p@ss:{SECRET}@127.0.0.1/x", LEDGER, {}),
        ("DATABASE_URL", f"postgresql://u:{SECRET}@127.0.0.1/x?foo=bar", LEDGER, {}),
        ("DATABASE_URL", f"postgresql://u:{SECRET}@/x?port=bar", LEDGER, {}),
        ("DATABASE_URL", f"postgresql://u:{SECRET}@127.0.0.1:abc/x", ("bridge", "redis"), {}),
        ("DATABASE_URL", f"postgresql://u:{SECRET}@[::1/x", ("worker",), OFF),
        ("CELERY_BROKER_URL", BROKER, ("worker",), OFF),
        ("CELERY_BROKER_URL", BROKER, ("beat",), {}),
        ("CELERY_BROKER_URL", BROKER, RECONCILE, OFF),
        ("CELERY_BROKER_URL", BROKER, LEDGER, {}),
        ("CELERY_BROKER_URL", BROKER, ("flower",), {}),
        ("CELERY_BROKER_URL", f"redis://:{SECRET}@127.0.0.1?foo=bar", ("worker",), OFF),
        ("CELERY_BROKER_URL", f"rediss://:{SECRET}@h?ssl_cert_reqs={SECRET}", ("beat",), {}),
        ("CELERY_BROKER_URL", f"memory://;carrier://:{SECRET}@pigeon", ("beat",), {}),
        ("RATE_LIMIT_REDIS_URL", "redis://127.0.0.1:abc/0", RECONCILE, OFF),
        ("RATE_LIMIT_REDIS_URL", f"redis://:{SECRET}/y@h/0", ("worker",), OFF),
        ("RATE_LIMIT_REDIS_URL", f"redis://:{SECRET}@h/0?foo=bar", ("worker",), OFF),
        ("REDIS_URL", f"redis://:{SECRET}/y@h/0", ("bridge", "redis"), {}),
        ("REDIS_URL", f"redis://:{SECRET}@127.0.0.1/0?foo=bar", ("bridge", "redis"), {}),
        ("REDIS_URL", f"redis://:{SECRET}@127.0.0.1/0?port=bar", ("bridge", "redis"), {}),
        ("STRIPE_API_BASE", "http://127.0.0.1:abc", ("vault", "serve"), SELF),
        ("STRIPE_API_BASE", "http://[::1", ("vault", "serve"), SELF),
        ("STRIPE_API_BASE", "https://h:abc", RECONCILE, OFF),
        ("VAULT_URL", "http://[::1", RECONCILE, SELF),
        ("VAULT_URL", "http://127.0.0.1:abc", ("worker",), SELF),
        ("FLOWER_URL", "http://127.0.0.1:abc", ("flower",), {}),
        ("NSQD_TCP_ADDRESS", "[::1", ("bridge", "nsq"), {}),
        ("NSQ_LOOKUPD_HTTP_ADDRESS", "http://[::1", ("bridge", "nsq"), {}),
        ("OPERATOR", NO_TEXT, LEDGER, {}),
    ],
)
def test_a_malformed_setting_is_named_in_one_line_without_its_value(
    celery: Commands, name: str, value: str, command: tuple[str, ...], changes: dict[str, str]
) -> None:
    line = celery.refused(*command, **{**changes, name: value})
    assert line.startswith(name)
    assert SECRET not in line


def test_the_migrations_name_a_malformed_setting_too(celery: Commands) -> None:
    url = f"postgresql://u:p@ss:{SECRET}@127.0.0.1/x"
    line = _migrate({**celery.environment, "DATABASE_URL": url})
    assert line.startswith("chargebridge: DATABASE_URL")
    assert SECRET not in line


def _migrate(env: dict[str, str]) -> str:
    done = subprocess.run(
        [sys.executable, "-m", "alembic", "upgrade", "head"],
        check=False,
        capture_output=True,
        text=True,
        timeout=WITHIN_S,
        env=env,
        cwd=binaries.CHECKOUT,
    )
    assert done.returncode == 1, done
    (line,) = done.stderr.strip().splitlines()
    return line


# -- a user of the database who may do too little -----------------------------------------------


@pytest.fixture
def powerless(environment: dict[str, str]) -> Iterator[str]:
    """The database's URL for one who may read the schema's version and nothing else."""
    url = make_url(environment["DATABASE_URL"])
    name = f"powerless_in_{url.database}"
    with psycopg.connect(environment["DATABASE_URL"], autocommit=True) as link:
        link.execute(f"CREATE ROLE {name} LOGIN PASSWORD 'x'".encode())
        link.execute(f"GRANT SELECT ON alembic_version TO {name}".encode())
        yield url.set(username=name, password="x").render_as_string(hide_password=False)
        link.execute(f"DROP OWNED BY {name}".encode())
        link.execute(f"DROP ROLE {name}".encode())


@pytest.mark.parametrize(
    "command",
    [
        ("ledger", "list"),
        ("ledger", "show", "c", "p"),
        ("dead-letters", "list"),
        ("run", "show", "R"),
        ("recharge", "c", "p"),
        ("reconcile", "R"),
        ("vault", "holds", "list"),
        ("bridge", "redis"),
        ("worker",),
    ],
)
def test_a_missing_privilege_is_one_line(
    celery: Commands, powerless: str, command: tuple[str, ...]
) -> None:
    line = celery.refused(*command, DATABASE_URL=powerless, **OFF)
    assert line.startswith("DATABASE_URL: permission denied for table ")


def test_migrating_without_the_privilege_is_one_line(celery: Commands, powerless: str) -> None:
    with psycopg.connect(celery.environment["DATABASE_URL"]) as link:
        link.execute("UPDATE alembic_version SET version_num = '0001'")
    line = _migrate({**celery.environment, "DATABASE_URL": powerless})
    assert line.startswith("chargebridge: DATABASE_URL: ")


# -- arguments ---------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "arguments",
    [
        ("ledger", "show", NO_TEXT, "p"),
        ("ledger", "show", "c", NO_TEXT),
        ("ledger", "list", "--period", NO_TEXT),
        ("ledger", "list", "--run", NO_TEXT),
        ("ledger", "list", "--customer", NO_TEXT),
        ("ledger", "list", "--after", NO_TEXT),
        ("ledger", "void", NO_TEXT, "p", "--reason", "x"),
        ("ledger", "void", "c", "p", "--reason", NO_TEXT),
        ("ledger", "resolve", "c", "p", "--charged", NO_TEXT, "--reason", "x"),
        ("recharge", NO_TEXT, "p"),
        ("recharge", "--period", NO_TEXT, "--state", "rejected", "--dry-run"),
        ("recharge", "c", "p", "--reason", NO_TEXT),
        ("recharge", "c", "p", "--payment-method", NO_TEXT),
        ("reconcile", NO_TEXT),
        ("dead-letters", "replay", "1", "--reason", NO_TEXT),
        ("dead-letters", "discard", "1", "--reason", NO_TEXT),
        ("run", "open", NO_TEXT, "--expected-total-cents", "1"),
        ("run", "open", "R", "--expected-total-cents", "1", "--currency", NO_TEXT),
        ("run", "show", NO_TEXT),
        ("run", "raise", "R", "--expected-total-cents", "1", "--reason", NO_TEXT),
        ("run", "renew", NO_TEXT),
        ("run", "close", NO_TEXT),
        ("run", "reopen", NO_TEXT, "--reason", "x"),
        ("vault", "keys", "list", "--run", NO_TEXT),
        ("vault", "holds", "list", "--run", NO_TEXT),
        ("vault", "holds", "resolve", NO_TEXT, "absent"),
    ],
)
def test_an_argument_that_is_no_utf_8_is_named_in_one_line(
    celery: Commands, arguments: tuple[str, ...]
) -> None:
    at = arguments.index(NO_TEXT) - 1
    option = arguments[at] if arguments[at].startswith("--") else "'"
    line = celery.refused(*arguments, **OFF)
    assert line.endswith(" is not UTF-8")
    assert option in line
    assert line.isascii()


def test_a_files_name_may_be_no_utf_8(celery: Commands, tmp_path: Path) -> None:
    file = tmp_path / f"{NO_TEXT}.jsonl"
    file.write_bytes(b"")
    assert "imported" in celery.done("ledger", "import", str(file))
    assert celery.run("reconcile", "R", "--expected", str(file), **OFF).returncode in (0, 1)
    assert NO_TEXT not in celery.refused("ledger", "import", f"{file}.missing")
