"""URLs of a Redis that is more than one server."""

from __future__ import annotations

import pytest

from models.errors import ConfigurationError
from models.redis_urls import CLUSTER, SENTINEL, read_redis_url


@pytest.mark.parametrize("url", ["redis://h:1/0", "rediss://h:1/0", "unix:///run/redis", "no url"])
def test_a_url_of_one_server_is_left_to_the_library(url: str) -> None:
    assert read_redis_url("REDIS_URL", url) is None


def test_sentinels_are_read_with_service_database_and_both_logins() -> None:
    place = read_redis_url(
        "REDIS_URL",
        "rediss+sentinel://us%40er:p%3Aw@one:26379,[::1]:26380/billing/3"
        "?sentinel_username=s&sentinel_password=t",
    )
    assert place is not None
    assert (place.kind, place.service, place.db, place.tls) == (SENTINEL, "billing", 3, True)
    assert list(place.addresses) == [("one", 26379), ("::1", 26380)]
    assert (place.username, place.password) == ("us@er", "p:w")
    assert (place.sentinel_username, place.sentinel_password) == ("s", "t")
    assert "p:w" not in repr(place)


def test_nodes_of_a_cluster_are_read() -> None:
    place = read_redis_url("REDIS_URL", "redis+cluster://one:1,two:2")
    assert place is not None
    assert (place.kind, place.db, place.tls) == (CLUSTER, 0, False)
    assert list(place.addresses) == [("one", 1), ("two", 2)]


@pytest.mark.parametrize(
    "url",
    [
        "redis+sentinel://secret@h:1",
        "redis+sentinel://:secret@h/billing",
        "redis+sentinel://:secret@h:1/billing/x",
        "redis+sentinel://:secret@h:1/billing/-1",
        "redis+sentinel://:secret@h:1/billing/0/more",
        "redis+cluster://:secret@h:1/1",
        "redis+cluster://:secret@h:99999",
        "redis+carrier://:secret@h:1",
        "http+cluster://:secret@h:1",
    ],
)
def test_what_cannot_be_read_is_refused_without_being_repeated(url: str) -> None:
    with pytest.raises(ConfigurationError, match="REDIS_URL: must be") as refused:
        read_redis_url("REDIS_URL", url)
    assert "secret" not in str(refused.value)
