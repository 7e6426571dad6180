"""A TCP proxy that cuts, delays, swallows and truncates what passes through it."""

from __future__ import annotations

import contextlib
import socket
import threading
from typing import Self

CHUNK = 65_536


class Proxy:
    """Listens on a free port of 127.0.0.1 and joins each connection to the target.

    The faults can be changed while connections are open.
    """

    def __init__(self, host: str, port: int) -> None:
        self.lose_reply_to = b""
        """The next request with these bytes is passed on; its reply is lost, the link cut."""
        self.lost = 0
        self.delay_s = 0.0
        self.swallow = False
        """Nothing comes back any more, and nobody hangs up."""
        self.swallow_from = b""
        """The next request with these bytes is the first to get no answer (see `swallow`)."""
        self.truncate_after: int | None = None
        """Bytes of the next reply that still pass before the link is cut."""
        self.target = (host, port)
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.port = int(self._listener.getsockname()[1])
        self._open: set[socket.socket] = set()
        threading.Thread(target=self._accept, daemon=True).start()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        # A close alone would let the accept that is under way take one more connection.
        with contextlib.suppress(OSError):
            self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()
        self.cut()

    def cut(self) -> None:
        """End every open connection, both ways; new ones still pass."""
        self._hang_up(*list(self._open))

    def _accept(self) -> None:
        with contextlib.suppress(OSError):
            while True:
                client, _ = self._listener.accept()
                self._join(client)

    def _join(self, client: socket.socket) -> None:
        """Without a target there is nobody to talk to; the next connection may find one."""
        try:
            server = socket.create_connection(self.target)
        except OSError:
            client.close()
            return
        self._open |= {client, server}
        lose = threading.Event()
        for pump in (self._requests, self._replies):
            threading.Thread(target=pump, args=(client, server, lose), daemon=True).start()

    def _requests(
        self, client: socket.socket, server: socket.socket, lose: threading.Event
    ) -> None:
        with contextlib.suppress(OSError):
            while data := client.recv(CHUNK):
                if self.lose_reply_to and self.lose_reply_to in data:
                    self.lose_reply_to = b""
                    lose.set()
                if self.swallow_from and self.swallow_from in data:
                    self.swallow = True
                server.sendall(data)
        self._hang_up(client, server)

    def _replies(self, client: socket.socket, server: socket.socket, lose: threading.Event) -> None:
        with contextlib.suppress(OSError):
            while (data := server.recv(CHUNK)) and not lose.is_set():
                threading.Event().wait(self.delay_s)
                # Read once: it may be set meanwhile, for the next reply.
                truncate_after = self.truncate_after
                if not self.swallow:
                    client.sendall(data[:truncate_after])
                if truncate_after is not None:
                    break
        self.lost += lose.is_set()
        if not self.swallow:
            self._hang_up(client, server)

    def _hang_up(self, *ends: socket.socket) -> None:
        for end in ends:
            with contextlib.suppress(OSError):
                end.shutdown(socket.SHUT_RDWR)
            self._open.discard(end)
