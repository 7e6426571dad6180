"""The vault over HTTP (Tornado): reads requests, hands them to threads, writes the answers.

Everything that waits for PostgreSQL or Stripe runs in a thread and to its end. The event loop
only reads and writes, so that one slow call holds up no other.
"""

from __future__ import annotations

import asyncio
import logging
import ssl
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from http.client import responses
from typing import TYPE_CHECKING, Any, Final, cast

from tornado.httpserver import HTTPServer
from tornado.httputil import (
    HTTPConnection,
    HTTPHeaders,
    HTTPMessageDelegate,
    HTTPServerConnectionDelegate,
    RequestStartLine,
    ResponseStartLine,
)
from tornado.netutil import bind_sockets

from models.vault_keys import key_hash
from vault.answers import FORWARDED, AdminRefused, Answer, Refused, error_answer, json_answer
from vault.limiter import FailureLimiter, KnownKeys
from vault.metrics import CONTENT_TYPE
from vault.rules import (
    MAX_BODY_BYTES,
    PREFIX,
    Received,
    bearer,
    refuse_by_headers,
    understand,
)

if TYPE_CHECKING:
    from tornado.iostream import IOStream

    from vault.forwarder import Forwarder
    from vault.keys import Admin
    from vault.metrics import Metrics

MAX_HEADER_BYTES: Final = 16 * 1024
MAX_CONNECTIONS: Final = 2048
HEADER_TIMEOUT_S: Final = 120.0
"""Also how long a kept connection may rest."""
BODY_TIMEOUT_S: Final = 15.0
ADMIN_THREADS: Final = 4
STOP_MARGIN_S: Final = 15.0
"""Beyond the longest forward there can be."""
LOCKED_RETRY_S: Final = 60

_MALFORMED: Final = b"HTTP/1.1 400 Bad Request\r\n\r\n"
_MALFORMED_MARKED: Final = (
    b"HTTP/1.1 400 Bad Request\r\n"
    b"Vault-Forwarded: no\r\nConnection: close\r\nContent-Length: 0\r\n\r\n"
)

logger = logging.getLogger(__name__)


class Vault(HTTPServerConnectionDelegate):
    """One vault process: routes requests, bounds how many are under way, stops in order."""

    def __init__(
        self,
        forwarder: Forwarder,
        admin: Admin,
        metrics: Metrics,
        *,
        concurrency: int,
        is_ready: Callable[[], bool],
    ) -> None:
        self._forwarder = forwarder
        self._admin = admin
        self._metrics = metrics
        self._concurrency = concurrency
        self._is_ready = is_ready
        self._threads = ThreadPoolExecutor(concurrency, "vault")
        self._admin_threads = ThreadPoolExecutor(ADMIN_THREADS, "vault-admin")
        self._limiter = FailureLimiter()
        self._known = KnownKeys()
        self._in_flight = 0
        self._tasks: set[asyncio.Task[None]] = set()
        self._stopping = False
        self._server: _Server | None = None

    # -- life ----------------------------------------------------------------------------

    def listen(self, host: str, port: int, tls: ssl.SSLContext | None) -> int:
        """Begin to listen; returns the port (which the system chooses for 0)."""
        self._server = _Server(
            self,
            ssl_options=tls,
            max_header_size=MAX_HEADER_BYTES,
            max_body_size=MAX_BODY_BYTES,
            idle_connection_timeout=HEADER_TIMEOUT_S,
            body_timeout=BODY_TIMEOUT_S,
        )
        sockets = bind_sockets(port, host)
        self._server.add_sockets(sockets)
        return int(sockets[0].getsockname()[1])

    async def stop(self, within_s: float) -> None:
        """Take nothing new, let what is under way end, close."""
        self._stopping = True
        assert self._server is not None
        self._server.stop()
        if self._tasks:
            await asyncio.wait(set(self._tasks), timeout=within_s)
        if self._tasks:
            logger.error("vault_stopped_with_open_forwards", extra={"count": len(self._tasks)})
        await asyncio.wait_for(self._server.close_all_connections(), STOP_MARGIN_S)
        self._threads.shutdown(wait=False)
        self._admin_threads.shutdown(wait=False)

    # -- requests ------------------------------------------------------------------------

    def start_request(self, server_conn: object, request_conn: HTTPConnection) -> _Message:
        return _Message(self, request_conn)

    def take(self, request: Received, address: str, write: Callable[[Answer], None]) -> None:
        """Answer a request, in time; the task lives on when its client has gone."""
        task = asyncio.ensure_future(self._serve(request, address, write))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _serve(
        self, request: Received, address: str, write: Callable[[Answer], None]
    ) -> None:
        call = "other"
        try:
            if request.target.startswith(f"{PREFIX}/"):
                call, answer = await self._forward(request, address)
            elif request.target.startswith("/vault/"):
                call, answer = "admin", await self._administer(request, address)
            else:
                answer = await self._probe(request)
        except Refused as refused:
            answer = refused.answer()
        except AdminRefused as refused_admin:
            answer = refused_admin.answer()
        except Exception:
            # Whether it was sent is not known here: the header must not say that it was not.
            logger.exception("vault_request_failed")
            answer = error_answer(500, "internal_error", "something broke", forwarded=True)
        self._count(call, answer)
        write(answer)

    async def _forward(self, request: Received, address: str) -> tuple[str, Answer]:
        token = bearer(request.headers)
        if token is None:
            self._failed(address)
            raise Refused("key_unknown", "a vault key is needed as the one bearer")
        hashed = key_hash(token)
        if hashed not in self._known and not self._limiter.may_try(address):
            return "other", _locked()
        call = understand(request)
        if self._stopping or self._in_flight >= self._concurrency:
            raise Refused("busy")
        self._in_flight += 1
        self._metrics.in_flight.set(self._in_flight)
        try:
            answer = await self._run(self._threads, self._forwarder.forward, call, hashed)
        finally:
            self._in_flight -= 1
            self._metrics.in_flight.set(self._in_flight)
        if answer.code == "key_unknown":
            self._failed(address)
        elif answer.forwarded:
            self._known.add(hashed)
        return call.rule, answer

    async def _administer(self, request: Received, address: str) -> Answer:
        if not self._limiter.may_try(address):
            return _locked()
        if not self._admin.is_admin(bearer(request.headers)):
            self._failed(address)
            raise AdminRefused(401, "unauthorized", "the admin bearer is needed")
        answer: Answer = await self._run(
            self._admin_threads, self._admin.answer, request.method, request.target, request.body
        )
        return answer

    async def _probe(self, request: Received) -> Answer:
        if request.method == "GET" and request.target == "/healthz":
            return json_answer(200, {"status": "ok"})
        if request.method == "GET" and request.target == "/readyz":
            ready = not self._stopping and await self._run(self._admin_threads, self._is_ready)
            return json_answer(200 if ready else 503, {"ready": ready})
        if request.method == "GET" and request.target == "/metrics":
            page = self._metrics.page()
            return Answer(200, page, forwarded=False, headers={"Content-Type": CONTENT_TYPE})
        raise AdminRefused(404, "not_found", "there is no such endpoint")

    @staticmethod
    async def _run(threads: ThreadPoolExecutor, work: Callable[..., Any], *args: object) -> Any:
        return await asyncio.get_running_loop().run_in_executor(threads, work, *args)

    def _failed(self, address: str) -> None:
        self._metrics.failed_logins.inc()
        self._limiter.failed(address)

    def _count(self, call: str, answer: Answer) -> None:
        forwarded = "yes" if answer.forwarded else "no"
        self._metrics.requests.labels(call, forwarded, answer.status).inc()
        if answer.code is not None and not answer.forwarded:
            self._metrics.refusals.labels(answer.code).inc()
            logger.warning("vault_refused", extra={"code": answer.code, "call": call})


def _locked() -> Answer:
    return error_answer(
        429,
        "busy",
        "too many wrong keys from this address",
        headers={"Retry-After": str(LOCKED_RETRY_S)},
    )


class _Message(HTTPMessageDelegate):
    """Collects one request, and writes its answer."""

    def __init__(self, vault: Vault, connection: HTTPConnection) -> None:
        self._vault = vault
        self._connection = connection
        self._line: RequestStartLine | None = None
        self._headers: Sequence[tuple[str, str]] = ()
        self._chunks: list[bytes] = []
        self._answered = False

    def headers_received(
        self, start_line: RequestStartLine | ResponseStartLine, headers: HTTPHeaders
    ) -> None:
        self._line = cast("RequestStartLine", start_line)
        self._headers = tuple(headers.get_all())
        try:
            refuse_by_headers(self._headers)
        except Refused as refused:
            # Answered before the body is read; what comes of it is thrown away.
            self._write(refused.answer())

    def data_received(self, chunk: bytes) -> None:
        self._chunks.append(chunk)

    def finish(self) -> None:
        line = self._line
        if line is None or self._answered:
            return
        request = Received(line.method, line.path, self._headers, b"".join(self._chunks))
        context = getattr(self._connection, "context", None)
        address = str(getattr(context, "remote_ip", ""))
        self._vault.take(request, address, self._write)

    def on_connection_close(self) -> None:
        """The client left while sending; what was understood of it goes nowhere."""

    def _write(self, answer: Answer) -> None:
        self._answered = True
        headers = HTTPHeaders(dict(answer.headers))
        headers[FORWARDED] = "yes" if answer.forwarded else "no"
        headers["Content-Length"] = str(len(answer.body))
        line = ResponseStartLine("HTTP/1.1", answer.status, responses.get(answer.status, "-"))
        is_head = self._line is not None and self._line.method == "HEAD"
        written = self._connection.write_headers(line, headers, None if is_head else answer.body)
        written.add_done_callback(lambda done: done.exception())
        self._connection.finish()


class _Server(HTTPServer):
    """Tornado's server with two additions at the connection."""

    def handle_stream(self, stream: IOStream, address: object) -> None:
        if len(self._connections) >= MAX_CONNECTIONS:
            stream.close()
            return
        # What is not HTTP is answered inside Tornado: that answer, too, must say that nothing
        # was forwarded.
        write = stream.write

        def marked(data: bytes | memoryview) -> Any:
            return write(_MALFORMED_MARKED if data == _MALFORMED else data)

        stream.write = marked  # type: ignore[method-assign]
        super().handle_stream(stream, cast("Any", address))
