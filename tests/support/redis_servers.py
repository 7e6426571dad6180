"""More Redis servers than the one of the stack: a Cluster of three, and one under Sentinels."""

from __future__ import annotations

import contextlib
import signal
import socket
import subprocess
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest
import redis

from sandbox import binaries
from sandbox.ports import free_port
from tests.support.brokers import answers
from tests.support.waiting import wait_until

BUS = 10_000
"""A node of a Cluster also listens on its port and this."""
SLOTS = 16_384
SERVICE = "billing"
DOWN_AFTER_MS = 500


def port_with_a_bus() -> int:
    """A free port whose bus port is free as well."""
    while True:
        port = free_port()
        with contextlib.suppress(OSError), socket.create_server(("127.0.0.1", port + BUS)):
            return port


class Server:
    """One `redis-server` in a folder of its own."""

    def __init__(self, folder: Path, *options: str, config: str | None = None) -> None:
        self.folder = folder
        self.port = port_with_a_bus()
        self.options = options
        self.config = config
        folder.mkdir(parents=True)
        self.process = self._start()

    def _start(self) -> subprocess.Popen[bytes]:
        arguments = [binaries.redis_server()]
        if self.config is not None:
            path = self.folder / "server.conf"
            path.write_text(self.config, encoding="utf-8")
            arguments.append(str(path))
        arguments += ["--port", str(self.port), "--bind", "127.0.0.1"]
        process = subprocess.Popen(
            [*arguments, *self.options], cwd=self.folder, stdout=(self.folder / "log").open("ab")
        )
        with self.client() as client:
            wait_until(lambda: answers(client), 10, "a Redis answers")
        return process

    def client(self) -> redis.Redis:
        return redis.Redis(port=self.port, protocol=2)

    def kill(self) -> None:
        self.process.kill()
        self.process.wait()

    def freeze(self) -> None:
        self.process.send_signal(signal.SIGSTOP)

    def thaw(self) -> None:
        self.process.send_signal(signal.SIGCONT)

    def start_again(self) -> None:
        self.process = self._start()


class Cluster:
    """Three nodes, each with a third of the slots, none with a replica."""

    def __init__(self, folder: Path) -> None:
        flags = ("--cluster-enabled", "yes", "--save", "", "--appendonly", "yes")
        more = ("--cluster-node-timeout", "2000", "--cluster-require-full-coverage", "no")
        self.nodes = [Server(folder / f"node-{n}", *flags, *more) for n in range(3)]
        first, *others = self.nodes
        for number, node in enumerate(self.nodes):
            with node.client() as client:
                mine = range(SLOTS * number // 3, SLOTS * (number + 1) // 3)
                client.execute_command("CLUSTER ADDSLOTS", *mine)
        with first.client() as client:
            for node in others:
                client.execute_command("CLUSTER MEET", "127.0.0.1", node.port)
        wait_until(self.is_whole, 20, "the Cluster is whole")

    @property
    def url(self) -> str:
        return "redis+cluster://" + ",".join(f"127.0.0.1:{n.port}" for n in self.nodes[:2])

    def is_whole(self) -> bool:
        return all(self._ask(node, "CLUSTER INFO")["cluster_state"] == "ok" for node in self.nodes)

    def owner(self, key: str) -> Server:
        """The node that the key's slot belongs to."""
        slot = self.slot(key)
        for node in self.nodes:
            with node.client() as client:
                slots: Any = client.execute_command("CLUSTER SLOTS")
            for first, last, (_, port, *_rest), *_replicas in slots:
                if first <= slot <= last:
                    return next(n for n in self.nodes if n.port == port)
        raise AssertionError("nobody owns the slot")

    def slot(self, key: str) -> int:
        return int(self._ask(self.nodes[0], "CLUSTER KEYSLOT", key))

    def begin_move(self, key: str) -> tuple[Server, Server]:
        """Move the key, but not yet its slot: its old node answers ASK from now on."""
        old = self.owner(key)
        new = next(n for n in self.nodes if n is not old)
        slot = self.slot(key)
        self._ask(new, "CLUSTER SETSLOT", slot, "IMPORTING", self._id(old))
        self._ask(old, "CLUSTER SETSLOT", slot, "MIGRATING", self._id(new))
        self._ask(old, "MIGRATE", "127.0.0.1", new.port, key, 0, 5000)
        return old, new

    def end_move(self, key: str, new: Server) -> None:
        """The slot is the new node's: the others answer MOVED."""
        slot, owner = self.slot(key), self._id(new)
        for node in (new, *(n for n in self.nodes if n is not new)):
            self._ask(node, "CLUSTER SETSLOT", slot, "NODE", owner)

    def replace(self, dead: Server, heir: Server) -> None:
        """All slots of a dead node are another's, as after a fail-over."""
        number, owner = self.nodes.index(dead), self._id(heir)
        mine = range(SLOTS * number // 3, SLOTS * (number + 1) // 3)
        for node in (n for n in self.nodes if n is not dead):
            with node.client() as client, client.pipeline(transaction=False) as pipeline:
                for slot in mine:
                    pipeline.execute_command("CLUSTER SETSLOT", slot, "NODE", owner)
                pipeline.execute()

    def _id(self, node: Server) -> str:
        return str(self._ask(node, "CLUSTER MYID").decode())

    @staticmethod
    def _ask(node: Server, *command: Any) -> Any:
        with node.client() as client:
            return client.execute_command(*command)

    def kill_all(self) -> None:
        for node in self.nodes:
            node.kill()


def lone_node(folder: Path) -> Server:
    """A Cluster of one node, which does not know the address that it is asked at."""
    flags = ("--cluster-enabled", "yes", "--save", "")
    node = Server(folder, *flags)
    with node.client() as client:
        client.execute_command("CLUSTER ADDSLOTS", *range(SLOTS))
        wait_until(
            lambda: client.execute_command("CLUSTER INFO")["cluster_state"] == "ok", 20, "ok"
        )
    return node


class Watched:
    """A server, its replica, and three Sentinels that agree by two."""

    def __init__(self, folder: Path) -> None:
        flags = ("--save", "", "--repl-diskless-sync-delay", "0")
        self.first = Server(folder / "first", *flags)
        self.second = Server(
            folder / "second", *flags, "--replicaof", "127.0.0.1", str(self.first.port)
        )
        with self.second.client() as client:
            wait_until(lambda: self._info(client)["master_link_status"] == "up", 20, "a replica")
        config = (
            f"sentinel monitor {SERVICE} 127.0.0.1 {self.first.port} 2\n"
            f"sentinel down-after-milliseconds {SERVICE} {DOWN_AFTER_MS}\n"
            f"sentinel failover-timeout {SERVICE} 3000\n"
        )
        self.sentinels = [
            Server(folder / f"sentinel-{n}", "--sentinel", config=config) for n in range(3)
        ]
        wait_until(self._agree, 20, "the Sentinels know each other and the replica")

    @property
    def url(self) -> str:
        hosts = ",".join(f"127.0.0.1:{s.port}" for s in self.sentinels)
        return f"redis+sentinel://{hosts}/{SERVICE}/0"

    def master(self) -> Server:
        """Who the first Sentinel says it is now."""
        with self.sentinels[0].client() as client:
            _, port = client.execute_command("SENTINEL GET-MASTER-ADDR-BY-NAME", SERVICE)
        return self.first if int(port) == self.first.port else self.second

    def _agree(self) -> bool:
        for sentinel in self.sentinels:
            with sentinel.client() as client:
                state: Mapping[str, Any] = client.execute_command("SENTINEL MASTER", SERVICE)
            if state["num-other-sentinels"] != 2 or state["num-slaves"] != 1:
                return False
        return True

    @staticmethod
    def _info(client: redis.Redis) -> Mapping[str, Any]:
        found: Mapping[str, Any] = client.info("replication")
        return found

    def kill_all(self) -> None:
        for server in (*self.sentinels, self.first, self.second):
            server.kill()


@pytest.fixture
def redis_cluster(tmp_path: Path) -> Iterator[Cluster]:
    """Three nodes of a Redis Cluster."""
    cluster = Cluster(tmp_path / "cluster")
    yield cluster
    cluster.kill_all()


@pytest.fixture
def lone_nodes(tmp_path: Path) -> Iterator[tuple[Server, Server]]:
    """Two Clusters of one node each; as one is after it has come back at another address."""
    nodes = (lone_node(tmp_path / "before"), lone_node(tmp_path / "after"))
    yield nodes
    for node in nodes:
        node.kill()


@pytest.fixture
def watched_redis(tmp_path: Path) -> Iterator[Watched]:
    """A Redis with a replica and three Sentinels."""
    watched = Watched(tmp_path / "watched")
    yield watched
    watched.kill_all()
