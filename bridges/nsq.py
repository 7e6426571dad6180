"""pynsq's reader, made to fit: quick to reconnect, silent about bodies, able to stop.

The only module that imports nsq.
"""

from __future__ import annotations

import asyncio
import logging
import random
import socket
import ssl
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final

import nsq
from tornado.iostream import StreamClosedError

from bridges.host_names import HostNames
from models.addresses import addresses

if TYPE_CHECKING:
    from bridges.counters import Counters
    from models.settings import Settings

logger = logging.getLogger(__name__)

RECONNECT_S: Final = 1.0
CONNECT_LIMIT_S: Final = 10.0
"""A connection that is not ready by then is closed and made anew: a frozen nsqd accepts one."""
LOOKUPD_POLL_S: Final = 2
OUTPUT_BUFFER_TIMEOUT_MS: Final = 25
"""How long nsqd may keep a message to fill its buffer: the least it advises."""


@dataclass(frozen=True, slots=True)
class Timeouts:
    """What one connection agreed on, in seconds."""

    msg_timeout_s: float
    max_msg_timeout_s: float


def quieten_libraries() -> None:
    """What pynsq says beside errors is said by our own records, without its raw replies."""
    logging.getLogger("nsq").setLevel(logging.ERROR)
    for name, filtered in _NOISE.items():
        logger = logging.getLogger(name)
        if filtered not in logger.filters:
            logger.addFilter(filtered)


def _not_a_refused_connection(record: logging.LogRecord) -> bool:
    """Each leaves an exception in a callback of its own."""
    return "_connect_callback" not in record.getMessage()


def _not_a_lost_connection(record: logging.LogRecord) -> bool:
    """An answer to a connection that is gone: `nsqd_connection_lost` says so once."""
    error = record.exc_info[1] if record.exc_info else None
    return not isinstance(error, StreamClosedError)


_NOISE: Final = {
    "tornado.application": _not_a_refused_connection,
    "nsq.conn": _not_a_lost_connection,
}


class Reader(nsq.Reader):
    """Messages of one topic and channel, from every nsqd that was named or looked up."""

    def __init__(
        self, settings: Settings, arrived: Callable[[Any, Any], None], counters: Counters
    ) -> None:
        direct = addresses("NSQD_TCP_ADDRESS", settings.nsqd_tcp_address)
        lookup = addresses("NSQ_LOOKUPD_HTTP_ADDRESS", settings.nsq_lookupd_http_address)
        self.timeouts: dict[str, Timeouts] = {}
        self._arrived = arrived
        self._counters = counters
        self._wanted_ms = int(settings.limits.msg_timeout_s * 1000)
        self._refused_timeout: set[str] = set()
        self._host_names = HostNames()
        self._looking_up: dict[str, asyncio.Task[None]] = {}
        self._connecting: dict[str, Any] = {}
        self._pausing: set[str] = set()
        """Addresses that are tried again when their pause is over, and by nobody else before."""
        self._stopped = False
        self._tls = bool(settings.nsq_tls_ca)
        self._without_tls: set[Any] = set()
        self._handshakes: dict[Any, socket.socket] = {}
        """A second handle on each connection that changes to TLS: pynsq has none meanwhile."""
        super().__init__(
            message_handler=_never_called,
            topic=settings.nsq_topic,
            channel=settings.nsq_channel,
            nsqd_tcp_addresses=direct,
            lookupd_http_addresses=lookup,
            # No limit: pynsq would FIN a message that came too often, unseen by us.
            max_tries=0,
            max_in_flight=settings.bridge_max_in_flight,
            lookupd_poll_interval=LOOKUPD_POLL_S,
            output_buffer_timeout=OUTPUT_BUFFER_TIMEOUT_MS,
            msg_timeout=settings.limits.msg_timeout_s,
            user_agent="chargebridge",
            tls_v1=self._tls,
            tls_options=_tls_options(settings) if self._tls else None,
            auth_secret=settings.nsq_auth_secret or None,
        )

    def stop(self) -> None:
        """Ask for no more messages, and connect to nobody from now on."""
        self._stopped = True
        self.set_max_in_flight(0)

    def wake_idle_connections(self) -> int:
        """Ask every nsqd that was told RDY 0 for messages again; how many there were.

        pynsq sets RDY anew when a message arrives, which none does at RDY 0. With more
        connections than messages that may be held it takes turns by itself.
        """
        if self._stopped or len(self.conns) > self.max_in_flight:
            return 0
        idle = [conn for conn in self.conns.values() if not conn.rdy and not conn.closed()]
        for conn in idle:
            self._send_rdy(conn, self._connection_max_in_flight())
            self._counters.add("rdy_restored")
            logger.warning("nsqd_was_asked_for_nothing", extra={"nsqd": conn.id})
        return len(idle)

    def is_writing(self) -> bool:
        return any(c.stream is not None and c.stream.writing() for c in self.conns.values())

    # -- messages --------------------------------------------------------------------------

    def _on_message(self, conn: Any, message: Any, **_kwargs: Any) -> None:
        # In place of pynsq's own handling, which answers by itself for a handler that
        # returns or raises, and logs whole bodies.
        message.enable_async()
        self._maybe_update_rdy(conn)
        self._arrived(conn, message)

    # -- connections -----------------------------------------------------------------------

    def connect_to_nsqd(self, host: str, port: int) -> None:
        """Begin to connect, unless it is connected, on its way, or to be left in peace."""
        address = f"{host}:{port}"
        current = self._connecting.get(address)
        if self._stopped or address in self.conns or (current and not current.closed()):
            return
        # pynsq comes here too, 15 s after each close: then every failure would make two tries.
        if address in self._pausing or address in self._looking_up:
            return
        self._looking_up[address] = asyncio.ensure_future(self._look_up_and_connect(host, port))

    async def _look_up_and_connect(self, host: str, port: int) -> None:
        address = f"{host}:{port}"
        try:
            found = await self._host_names.address_of(host)
            if self._stopped:
                return
            connecting = self._connect(host, port, found)
        except OSError:
            self._away(address)
            connecting = False
        finally:
            del self._looking_up[address]
        if not connecting:
            self._connect_later(host, port)

    def _connect(self, host: str, port: int, found: str) -> bool:
        """Begin with the address that was found; false if it is connected by another name."""
        # pynsq lets ten seconds pass between two tries.
        self.connection_attempts.pop(f"{found}:{port}", None)
        conn = super().connect_to_nsqd(found, port)
        if conn is None:
            return False
        # The connection goes by the name that was given, and so does its certificate.
        conn.host = host
        self._connecting[conn.id] = conn
        self.io_loop.call_later(CONNECT_LIMIT_S, self._close_unless_ready, conn)
        return True

    def _connect_later(self, host: str, port: int) -> None:
        """After a pause, if the address was given to us; lookupd names the others again."""
        address = f"{host}:{port}"
        if address in self.nsqd_tcp_addresses:
            pause_s = random.uniform(0.5, 1.5) * RECONNECT_S  # noqa: S311 - jitter
            self._pausing.add(address)
            self.io_loop.call_later(pause_s, self._connect_after_pause, host, port)

    def _connect_after_pause(self, host: str, port: int) -> None:
        self._pausing.discard(f"{host}:{port}")
        self.connect_to_nsqd(host, port)

    def _away(self, address: str) -> None:
        self._counters.add("connect_failed")
        logger.warning("nsqd_away", extra={"nsqd": address})

    def close(self) -> None:
        super().close()
        self._host_names.close()

    def _close_unless_ready(self, conn: Any) -> None:
        if self.conns.get(conn.id) is not conn and not conn.closed():
            logger.warning("nsqd_not_ready", extra={"nsqd": conn.id})
            self._close(conn)

    def _close(self, conn: Any) -> None:
        if conn.stream is not None:
            conn.close()
        elif conn in self._handshakes:
            with suppress(OSError):  # it has just ended by itself
                self._handshakes[conn].shutdown(socket.SHUT_RDWR)

    def _handshake_over(self, conn: Any) -> None:
        # As long as the second handle is open, closing the first one ends nothing.
        if (handle := self._handshakes.pop(conn, None)) is not None:
            handle.close()

    def _on_connection_ready(self, conn: Any, **kwargs: Any) -> None:
        self._handshake_over(conn)
        if conn in self._without_tls:
            return
        super()._on_connection_ready(conn, **kwargs)
        self._counters.add("connected")
        logger.info("nsqd_connected", extra={"nsqd": conn.id})

    def _on_connection_close(self, conn: Any, **kwargs: Any) -> None:
        was_ready = conn.id in self.conns
        # The one that is ready or on its way was closed: there is never a second one.
        self._connecting.pop(conn.id, None)
        self._without_tls.discard(conn)
        self._handshake_over(conn)
        super()._on_connection_close(conn, **kwargs)
        if self._stopped:
            return
        if was_ready:
            self._counters.add("connection_lost")
            logger.warning("nsqd_connection_lost", extra={"nsqd": conn.id})
        else:
            self._host_names.failed(conn.host)
            self._away(conn.id)
        self._connect_later(conn.host, conn.port)

    def _on_connection_identify(self, conn: Any, data: dict[str, Any], **_kwargs: Any) -> None:
        # A timeout above the server's own maximum would close the connection, again and again.
        if conn.id in self._refused_timeout:
            data.pop("msg_timeout", None)

    def _on_connection_identify_response(
        self, conn: Any, data: dict[str, Any], **_kwargs: Any
    ) -> None:
        if self._tls and not data.get("tls_v1"):
            # pynsq would go on in the clear.
            self._without_tls.add(conn)
            self._counters.add("tls_refused")
            logger.error("nsqd_without_tls", extra={"nsqd": conn.id})
            conn.close()
            return
        if self._tls:
            self._handshakes[conn] = conn.socket.dup()
        agreed = Timeouts(data["msg_timeout"] / 1000, data["max_msg_timeout"] / 1000)
        self.timeouts[conn.id] = agreed
        if data["msg_timeout"] < self._wanted_ms:
            extra = {"nsqd": conn.id, "msg_timeout_s": agreed.msg_timeout_s}
            logger.warning("nsqd_shorter_msg_timeout", extra=extra)

    def _on_connection_auth_response(self, conn: Any, **_kwargs: Any) -> None:
        logger.info("nsqd_auth_accepted", extra={"nsqd": conn.id})

    def _on_connection_error(self, conn: Any, error: BaseException, **_kwargs: Any) -> None:
        text = str(error)
        code = _error_code(text)
        if code == "E_BAD_BODY" and "msg timeout" in text:
            self._refused_timeout.add(conn.id)
        if text == "failed to unpack size":
            return  # what pynsq makes of every close
        self._counters.add(code)
        # Not fatal: a message that timed out comes again, and the ledger knows it.
        logger.warning("nsqd_error", extra={"nsqd": conn.id, "code": code})

    def _on_heartbeat(self, conn: Any) -> None:
        self._counters.add("heartbeat")


def _tls_options(settings: Settings) -> dict[str, Any]:
    # The protocol constant is what makes Python check the host's name as well.
    options: dict[str, Any] = {
        "ssl_version": ssl.PROTOCOL_TLS_CLIENT,
        "ca_certs": settings.nsq_tls_ca,
    }
    if settings.nsq_tls_cert:
        options["certfile"] = settings.nsq_tls_cert
        options["keyfile"] = settings.nsq_tls_key or None
    return options


def _never_called(_message: Any) -> None:
    raise AssertionError("messages go to the bridge")


def _error_code(text: str) -> str:
    """`E_FIN_FAILED` and its like, without ids or names; `connection` for what has no code."""
    word = text.removeprefix("b'").split(" ", 1)[0].strip("'\"")
    return word if word.startswith("E_") and word.replace("_", "").isalpha() else "connection"
