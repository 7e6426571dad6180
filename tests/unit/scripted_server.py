"""A server whose every answer is written by the test, byte by byte if need be."""

from __future__ import annotations

import json
import socket
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress

Answer = Callable[[socket.socket, threading.Event], None]
"""Writes to the connection; gives up when the event is set."""
TLS_HANDSHAKE = b"\x16\x03"
"""What a client says first that wants TLS: it waits for an answer before its request."""


class ScriptedServer:
    """Answers the n-th request with the n-th answer, the last one from there on."""

    def __init__(self, *answers: Answer) -> None:
        self._answers = answers
        self._listener = socket.create_server(("127.0.0.1", 0))
        self._stopped = threading.Event()
        self._threads: list[threading.Thread] = []
        self._accepted: list[socket.socket] = []
        self._lock = threading.Lock()
        self.connections = 0
        self.ended = 0
        """Connections that are over on this side."""
        self.requests: list[bytes] = []

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self._listener.getsockname()[1]}"

    def start(self) -> None:
        self._spawn(self._accept)

    def stop(self) -> None:
        self._stopped.set()
        self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()
        self._threads[0].join(30)
        for connection in self._accepted:
            # Nobody waits for the next request on a connection that its client has kept.
            with suppress(OSError):
                connection.shutdown(socket.SHUT_RD)
        for thread in self._threads:
            thread.join(30)

    def _spawn(self, work: Callable[..., None], *given: object) -> None:
        thread = threading.Thread(target=work, args=given, daemon=True)
        self._threads.append(thread)
        thread.start()

    def _accept(self) -> None:
        while True:
            try:
                connection, _ = self._listener.accept()
            except OSError:
                return
            self.connections += 1
            self._accepted.append(connection)
            self._spawn(self._serve, connection)

    def _serve(self, connection: socket.socket) -> None:
        self._converse(connection)
        with self._lock:
            self.ended += 1

    def _converse(self, connection: socket.socket) -> None:
        with connection:
            while (request := self._read(connection)) is not None:
                with self._lock:
                    self.requests.append(request)
                    answer = self._answers[min(len(self.requests), len(self._answers)) - 1]
                try:
                    answer(connection, self._stopped)
                except OSError:
                    return

    def _read(self, connection: socket.socket) -> bytes | None:
        data = b""
        try:
            connection.settimeout(30)
            while b"\r\n\r\n" not in data:
                part = connection.recv(65536)
                if not part:
                    return None
                data += part
                if data.startswith(TLS_HANDSHAKE):
                    return data
            head, _, body = data.partition(b"\r\n\r\n")
            length = int(dict(self.headers(head)).get("content-length", "0"))
            while len(body) < length:
                body += connection.recv(65536)
        except OSError:
            return None
        return head + b"\r\n\r\n" + body

    @staticmethod
    def headers(request: bytes) -> list[tuple[str, str]]:
        lines = request.partition(b"\r\n\r\n")[0].decode().split("\r\n")[1:]
        return [
            (name.strip().lower(), value.strip())
            for name, _, value in (line.partition(":") for line in lines)
        ]


def raw(data: bytes, *, close: bool = False) -> Answer:
    """Sends these bytes; `close` ends the connection after them."""

    def answer(connection: socket.socket, _: threading.Event) -> None:
        connection.sendall(data)
        if close:
            connection.shutdown(socket.SHUT_RDWR)

    return answer


def reply(status: int, body: object, **headers: str) -> Answer:
    """A whole reply; a body that is not text is sent as JSON."""
    text = body if isinstance(body, str) else json.dumps(body)
    lines = [f"HTTP/1.1 {status} X", f"Content-Length: {len(text.encode())}"]
    lines += [f"{name.replace('_', '-')}: {value}" for name, value in headers.items()]
    return raw(("\r\n".join(lines) + "\r\n\r\n" + text).encode())


def dripping(data: bytes, pause_s: float = 0.05) -> Answer:
    """One byte at a time, each well within any timeout of a single read."""

    def answer(connection: socket.socket, stopped: threading.Event) -> None:
        for at in range(len(data)):
            connection.sendall(data[at : at + 1])
            if stopped.wait(pause_s):
                return

    return answer


def silence(_: socket.socket, stopped: threading.Event) -> None:
    """Says nothing."""
    stopped.wait(60)


def reset(connection: socket.socket, _: threading.Event) -> None:
    """Cuts the connection with RST."""
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, b"\x01\0\0\0\0\0\0\0")
    connection.close()


@contextmanager
def serving(*answers: Answer) -> Iterator[ScriptedServer]:
    server = ScriptedServer(*answers)
    server.start()
    try:
        yield server
    finally:
        server.stop()
