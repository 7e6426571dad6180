"""Health checks: each returns nothing when its role is healthy, else one line saying what is not.

They look from outside, with the settings that any client has.
"""

from __future__ import annotations

import json
import socket
from collections.abc import Mapping
from pathlib import Path
from typing import Any
from urllib.parse import quote, urlsplit

import psycopg
import redis
import urllib3

TIMEOUT_S = 2.0
"""For a look at one role's health: who is silent for longer is asked again."""
PATIENCE_S = 30.0
"""For all that is asked once: a busy machine may let a server wait."""

http = urllib3.PoolManager(retries=False, timeout=PATIENCE_S)


def get_json(url: str, timeout_s: float = PATIENCE_S) -> Any:
    """Raises OSError when there is no answer of 200."""
    return json.loads(request("GET", url, timeout_s=timeout_s))


def request(method: str, url: str, body: Any = None, timeout_s: float = PATIENCE_S) -> bytes:
    """One HTTP request with a JSON body; raises OSError for anything but a 2xx answer."""
    text = None if body is None else json.dumps(body)
    try:
        reply = http.request(method, url, body=text, timeout=timeout_s)
    except urllib3.exceptions.HTTPError as error:
        raise OSError(f"{method} {url}: no answer") from error
    if not 200 <= reply.status < 300:
        raise OSError(f"{method} {url}: status {reply.status}")
    return reply.data


def postgres(settings: Mapping[str, str]) -> str | None:
    try:
        with psycopg.connect(settings["DATABASE_URL"], connect_timeout=int(TIMEOUT_S)) as link:
            link.execute("SELECT 1")
    except psycopg.Error as error:
        return f"PostgreSQL does not answer: {error.sqlstate or type(error).__name__}"
    return None


def redis_server(url: str) -> str | None:
    try:
        with redis.Redis.from_url(url, socket_timeout=TIMEOUT_S) as client:
            client.ping()
    except redis.RedisError as error:
        return f"Redis does not answer: {type(error).__name__}"
    return None


def answers(url: str) -> str | None:
    try:
        request("GET", url, timeout_s=TIMEOUT_S)
    except OSError as error:
        return str(error)
    return None


def celery_worker(broker_url: str, name: str) -> str | None:
    """Whether the worker of this name on this host answers a ping."""
    # Here, not above: Celery takes long to import, and most callers never ask.
    from celery import Celery  # noqa: PLC0415

    app = Celery("sandbox", set_as_current=False)
    # Not `broker`: the environment's CELERY_BROKER_URL would go before it, and a shell may have
    # another stack's settings loaded.
    app.conf.update(broker_read_url=broker_url, broker_write_url=broker_url)
    node = f"{name}@{socket.gethostname()}"
    try:
        replies = app.control.ping(destination=[node], timeout=1.0, limit=1)
    except Exception as error:  # whatever a transport raises: it is not healthy
        return f"{node} cannot be asked: {type(error).__name__}"
    finally:
        app.close()
    return None if replies else f"{node} does not answer"


def beat(schedule: Path, started: float) -> str | None:
    """Whether beat has written its schedule since it started."""
    files = schedule.parent.glob(f"{schedule.name}*")
    written = any(_changed_at(file) >= started - 1 for file in files)
    return None if written else "beat has not written its schedule yet"


def _changed_at(file: Path) -> float:
    """Long ago for a file that was there for a moment only, as those that beat replaces."""
    try:
        return file.stat().st_mtime
    except FileNotFoundError:
        return 0.0


def channel_stats(
    settings: Mapping[str, str], *, clients: bool = False, timeout_s: float = PATIENCE_S
) -> dict[str, Any]:
    """nsqd's figures for our channel; empty while there is no such channel."""
    topic, channel = settings["NSQ_TOPIC"], settings["NSQ_CHANNEL"]
    address = settings["NSQD_HTTP_ADDRESS"]
    query = f"format=json&topic={quote(topic)}&channel={quote(channel)}&include_mem=false"
    query += f"&include_clients={str(clients).lower()}"
    stats = get_json(f"http://{address}/stats?{query}", timeout_s)
    for found in stats["topics"]:
        for entry in found["channels"]:
            if (found["topic_name"], entry["channel_name"]) == (topic, channel):
                return dict(entry)
    return {}


def bridge_nsq(settings: Mapping[str, str], wanted: int = 1) -> str | None:
    """Whether at least `wanted` bridges stand on the channel."""
    try:
        clients = channel_stats(settings, timeout_s=TIMEOUT_S).get("client_count", 0)
    except OSError as error:
        return str(error)
    return None if clients >= wanted else f"{clients} bridges on the NSQ channel"


def bridge_redis(settings: Mapping[str, str], wanted: int = 1) -> str | None:
    """A reader that stands on the stream shows as a client whose last command reads it."""
    database = urlsplit(settings["REDIS_URL"]).path.strip("/") or "0"
    try:
        with redis.Redis.from_url(settings["REDIS_URL"], socket_timeout=TIMEOUT_S) as client:
            clients = client.client_list()
    except redis.RedisError as error:
        return f"Redis does not answer: {type(error).__name__}"
    reading = ("xreadgroup", "xautoclaim")
    found = sum(c["db"] == database and c["cmd"].startswith(reading) for c in clients)
    return None if found >= wanted else f"{found} bridges on the stream"


def listens(url: str) -> str | None:
    """For those that ask for a password (vault, Flower): any answer will do."""
    try:
        http.request("GET", f"{url}/healthcheck", timeout=TIMEOUT_S)
    except urllib3.exceptions.HTTPError:
        return f"{url} does not answer"
    return None
