"""The simulator over HTTP (Tornado). Waiting never blocks the loop."""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import logging
import signal
import socket
import struct
import time
from collections.abc import Sequence
from http.client import responses
from pathlib import Path

from tornado.http1connection import HTTP1Connection
from tornado.httpserver import HTTPServer
from tornado.httputil import HTTPHeaders, HTTPServerRequest, ResponseStartLine
from tornado.iostream import StreamClosedError

from sandbox.stripe_simulator.core import Simulator
from sandbox.stripe_simulator.messages import Pause, Reply, Request

LABEL = "chargebridge"
MAX_BODY_BYTES = 1 << 20
STOP_GRACE_S = 0.5

logger = logging.getLogger("sandbox.stripe_simulator")


class Server:
    """Serves one simulator; `drop_all` ends what is still waiting."""

    def __init__(self, simulator: Simulator) -> None:
        self._simulator = simulator
        simulator.on_release = self._release
        self._released = asyncio.Event()
        self._tasks: set[asyncio.Task[None]] = set()
        self.http = HTTPServer(self._received, max_body_size=MAX_BODY_BYTES)

    def _received(self, request: HTTPServerRequest) -> None:
        task = asyncio.ensure_future(self._serve(request))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _serve(self, received: HTTPServerRequest) -> None:
        connection = received.connection
        assert isinstance(connection, HTTP1Connection)
        left = asyncio.Event()
        connection.set_close_callback(left.set)
        if connection.stream.closed():
            # It left before anybody could be told.
            left.set()
        try:
            reply = await self._drive(_request(received), left)
        except Exception:
            logger.exception("stripe_simulator_error")
            reply = Reply(500, '{"error":{"type":"api_error","message":"simulator error"}}')
        finally:
            connection.set_close_callback(None)
        with contextlib.suppress(StreamClosedError):
            await _send(connection, reply)

    async def _drive(self, request: Request, left: asyncio.Event) -> Reply:
        """Runs an exchange. A client that leaves does not stop the work that it asked for."""
        steps = self._simulator.exchange(request)
        try:
            while True:
                await self._rest(next(steps), left)
        except StopIteration as done:
            reply: Reply = done.value
            return reply
        finally:
            steps.close()

    async def _rest(self, pause: Pause, left: asyncio.Event) -> None:
        """Until the time is over, it is let go or, where that matters, its client has left."""
        ends = [self._released, left] if pause.until_client_leaves else [self._released]
        waits = [asyncio.ensure_future(end.wait()) for end in ends]
        try:
            await asyncio.wait(waits, timeout=pause.seconds, return_when=asyncio.FIRST_COMPLETED)
        finally:
            for wait in waits:
                wait.cancel()

    def _release(self) -> None:
        """Ends every pause that has begun; one that begins later is another one."""
        self._released.set()
        self._released = asyncio.Event()

    async def drop_all(self) -> None:
        """Stops listening and ends every connection; what waits comes to nothing."""
        self.http.stop()
        for task in list(self._tasks):
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(self.http.close_all_connections(), STOP_GRACE_S)


def _request(received: HTTPServerRequest) -> Request:
    return Request(
        method=received.method or "GET",
        path=received.path,
        query=received.query,
        headers={name.lower(): value for name, value in received.headers.get_all()},
        body=received.body,
    )


async def _send(connection: HTTP1Connection, reply: Reply) -> None:
    if reply.delivery == "reset":
        _reset(connection)
        return
    if reply.delivery == "close":
        connection.stream.close()
        return
    body = reply.body.encode()
    headers = HTTPHeaders({"X-Stripe-Simulator": LABEL, "Content-Type": reply.content_type})
    for name, value in reply.headers.items():
        headers[name] = value
    start = ResponseStartLine("HTTP/1.1", reply.status, responses.get(reply.status, "Unknown"))
    if reply.chunks is not None:
        headers["Transfer-Encoding"] = "chunked"
        await connection.write_headers(start, headers)
        for chunk in reply.chunks:
            await connection.write(chunk.encode())
            await asyncio.sleep(0)
        connection.finish()
        return
    headers["Content-Length"] = str(len(body))
    if reply.delivery == "truncate":
        await connection.write_headers(start, headers, body[: len(body) // 2])
        connection.stream.close()
        return
    await connection.write_headers(start, headers, body)
    connection.finish()


def _reset(connection: HTTP1Connection) -> None:
    """Ends the connection with RST: no time to linger."""
    found = getattr(connection.stream, "socket", None)
    if isinstance(found, socket.socket):
        found.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    connection.stream.close()


async def serve(simulator: Simulator, host: str, port: int) -> None:
    """Serves until SIGTERM or SIGINT."""
    server = Server(simulator)
    server.http.listen(port, host)
    stop = asyncio.Event()
    for name in (signal.SIGTERM, signal.SIGINT):
        asyncio.get_running_loop().add_signal_handler(name, stop.set)
    logger.info(
        "stripe_simulator_started: this is a simulator, not Stripe; no money moves (%s:%d)",
        host,
        port,
    )
    await stop.wait()
    await server.drop_all()
    logger.info("stripe_simulator_stopped")


def main(arguments: Sequence[str] | None = None) -> int:
    """The command line. Returns the exit code."""
    parser = argparse.ArgumentParser(
        prog="python -m sandbox.stripe_simulator",
        description="A simulator of Stripe for tests and the sandbox. No money moves.",
    )
    parser.add_argument("--host", default="127.0.0.1")
    parser.add_argument("--port", type=int, required=True)
    parser.add_argument("--state", type=Path, required=True, help="the file that holds the state")
    parser.add_argument("--account-id", default="acct_simulator")
    options = parser.parse_args(arguments)
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(levelname)s %(message)s")
    logging.Formatter.converter = time.gmtime
    simulator = Simulator(options.state, account_id=options.account_id)
    try:
        asyncio.run(serve(simulator, options.host, options.port))
    finally:
        simulator.close()
    return 0
