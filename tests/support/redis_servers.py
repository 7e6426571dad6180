"""More Redis servers than the one of the stack: a Cluster of three, and one under Sentinels."""

from __future__ import annotations

import contextlib
import signal
import socket
import subprocess
from collections.abc import Iterator, Mapping
from itertools import permutations
from pathlib import Path
from typing import Any

import pytest
import redis

from sandbox import binaries
from sandbox.ports import LAST, free_port
from tests.support.brokers import answers
from tests.support.waiting import wait_until

BUS = 10_000
"""A node of a Cluster also listens on its port and this."""
BUSES = range(LAST + 1, 32_768)
"""Above the ports that are reserved, below those that the kernel takes for outgoing connections."""
SLOTS = 16_384
SERVICE = "billing"
SOON_S = 60.0
"""Bound of what is to come at all: the machine may be busy."""
NODE_TIMEOUT_MS = 60_000
DOWN_AFTER_MS = 60_000
"""How long a master may be silent: it must not be replaced but when a test wants it."""
FAILED_OVER_S = 120.0
"""Sentinels that were not scheduled for some seconds do nothing for half a minute."""


def port_with_a_bus() -> int:
    """A free port whose bus port is free as well, and nobody else's before it is taken."""
    while True:
        port = free_port(BUSES.start - BUS, BUSES.stop - 1 - BUS)
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
            wait_until(lambda: answers(client), SOON_S, "a Redis answers")
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
        flags = ["--cluster-enabled", "yes", "--save", "", "--appendonly", "yes"]
        # With `everysec` a write may wait for the disk after its reply, and go with a SIGKILL.
        flags += ["--appendfsync", "no", "--cluster-require-full-coverage", "no"]
        more = ["--cluster-node-timeout", str(NODE_TIMEOUT_MS)]
        self.nodes = [Server(folder / f"node-{n}", *flags, *more) for n in range(3)]
        for number, node in enumerate(self.nodes):
            with node.client() as client:
                mine = range(SLOTS * number // 3, SLOTS * (number + 1) // 3)
                client.execute_command("CLUSTER ADDSLOTS", *mine)
        # Each meets each: by hearsay it would take a good part of the node timeout.
        for one, other in permutations(self.nodes, 2):
            self._ask(one, "CLUSTER MEET", "127.0.0.1", other.port)
        wait_until(self.is_whole, SOON_S, "the Cluster is whole")

    @property
    def url(self) -> str:
        return "redis+cluster://" + ",".join(f"127.0.0.1:{n.port}" for n in self.nodes[:2])

    def is_whole(self) -> bool:
        """Every node works, and knows the others and whose each slot is."""
        told = [self._ask(node, "CLUSTER INFO") for node in self.nodes]
        return all(
            (info["cluster_state"], int(info["cluster_slots_ok"])) == ("ok", SLOTS)
            and int(info["cluster_known_nodes"]) == len(self.nodes)
            for info in told
        )

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
            lambda: client.execute_command("CLUSTER INFO")["cluster_state"] == "ok", SOON_S, "ok"
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
            wait_until(
                lambda: self._info(client)["master_link_status"] == "up", SOON_S, "a replica"
            )
        config = (
            f"sentinel monitor {SERVICE} 127.0.0.1 {self.first.port} 2\n"
            f"sentinel down-after-milliseconds {SERVICE} {DOWN_AFTER_MS}\n"
            f"sentinel failover-timeout {SERVICE} 3000\n"
        )
        self.sentinels = [
            Server(folder / f"sentinel-{n}", "--sentinel", config=config) for n in range(3)
        ]
        wait_until(self._agree, SOON_S, "the Sentinels know each other and the replica")

    @property
    def url(self) -> str:
        hosts = ",".join(f"127.0.0.1:{s.port}" for s in self.sentinels)
        return f"redis+sentinel://{hosts}/{SERVICE}/0"

    def master(self) -> Server:
        """Who the first Sentinel says it is now."""
        with self.sentinels[0].client() as client:
            _, port = client.execute_command("SENTINEL GET-MASTER-ADDR-BY-NAME", SERVICE)
        return self.first if int(port) == self.first.port else self.second

    def wait_replicated(self) -> None:
        """Returns when the replica has all that the first server has written by now."""
        with self.first.client() as client:
            written = int(self._info(client)["master_repl_offset"])
        with self.second.client() as client:
            wait_until(
                lambda: int(self._info(client)["slave_repl_offset"]) >= written,
                SOON_S,
                "the replica has it",
            )

    def fail_over(self) -> None:
        """The first server is silent: have the Sentinels make the second one the master."""
        wait_until(self._has_failed_over, FAILED_OVER_S, "failed over")

    def _has_failed_over(self) -> bool:
        if self.master() is self.second:
            return True
        # It is refused while one is going on, and as long as the replica looks unfit.
        with self.sentinels[0].client() as client, contextlib.suppress(redis.ResponseError):
            client.execute_command("SENTINEL FAILOVER", SERVICE)
        return False

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
