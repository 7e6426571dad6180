"""One request on its way: hold → sent → Stripe → outcome, each committed before the next.

Runs in a thread of its own and to its end, whether or not the client still waits: a request that
may have reached Stripe is not given up because nobody listens.
"""

from __future__ import annotations

import json
import logging
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any, Final, TypeVar

from models.errors import LedgerUnavailable
from models.faults import fault_point
from models.ledger import boot_clock_s
from models.outcomes import Reply, ReplyKind
from models.replies import BROKEN, OBJECT_NAMES, read_reply, status_of, text_of
from vault.answers import Answer, Refused, error_answer
from vault.holds import START_WITHIN_S, TRIES, Forward, Holds, Moved, Seen
from vault.metrics import Metrics
from vault.rules import ForwardCall, Money
from vault.upstream import Broken, NotConnected, NotSent, Upstream, UpstreamReply
from vault.verdicts import Verdict

COMMIT_WITHIN_S: Final = 10.0
"""How long an outcome is tried to be committed before the client is told that it is not."""
COMMIT_PAUSE_S: Final = 0.2

_SEEN_STATUS: Final = {
    "succeeded": Verdict.SETTLED,
    "canceled": Verdict.CANCELED,
    "requires_payment_method": Verdict.FAILED,
    "failed": Verdict.FAILED,
}
"""What an object that passes by can show; anything else leaves its hold as it is."""

logger = logging.getLogger(__name__)
T = TypeVar("T")


class OutcomeLost(Exception):  # noqa: N818 - says what happened
    """Stripe answered, and PostgreSQL did not take the outcome in time."""


class Forwarder:
    """Forwards understood calls. One object serves all threads of a process."""

    def __init__(self, holds: Holds, upstream: Upstream, metrics: Metrics) -> None:
        self.holds = holds
        self.upstream = upstream
        self.metrics = metrics
        self._pause = threading.Event()

    def forward(self, call: ForwardCall, key_hash: str) -> Answer:
        """The answer to a call; never raises for what can go wrong on the way."""
        try:
            with self._database_before_sending():
                if call.money is None:
                    self.holds.check_key(key_hash, call.rule)
            if call.money is None:
                return self._pass(call)
            return self._create(call, call.money, key_hash)
        except Refused as refused:
            return refused.answer()
        except OutcomeLost:
            self._alarm("uncommitted_outcome", call)
            return error_answer(
                500, "outcome_not_committed", "the outcome could not be stored", forwarded=True
            )

    # -- creates -------------------------------------------------------------------------

    def _create(self, call: ForwardCall, money: Money, key_hash: str) -> Answer:
        fault_point("vault.before_hold")
        began_s = time.perf_counter()
        forward, sent_at_s = self._hold(call, money, key_hash)
        self.metrics.hold_s.observe(time.perf_counter() - began_s)
        fault_point("vault.before_send")
        reply, answer = self._exchange(call, sent_at_s)
        fault_point("vault.after_answer")
        moved = self._commit(lambda: self.holds.end(forward, reply))
        fault_point("vault.after_outcome")
        self._note(moved, call)
        return answer

    def _hold(self, call: ForwardCall, money: Money, key_hash: str) -> tuple[Forward, float]:
        """A hold that is committed as `sent`, and when that was begun on the boot-time clock."""
        asked_at_s = boot_clock_s()
        with self._database_before_sending():
            for _ in range(TRIES):
                hold_id = self.holds.take(key_hash, call.rule, money)
                fault_point("vault.after_hold")
                sent_at_s = boot_clock_s()
                if sent_at_s - asked_at_s > START_WITHIN_S:
                    # Nothing is open yet: absence may have been proved, and believed, meanwhile.
                    raise Refused("busy", "too late to send")
                forward = self.holds.begin(hold_id, money)
                if forward is not None:
                    return forward, sent_at_s
        raise Refused("busy", "the hold is being changed by other requests")

    # -- everything else -----------------------------------------------------------------

    def _pass(self, call: ForwardCall) -> Answer:
        """A read or a cancel: it takes no money, but may show what became of some."""
        reply, answer = self._exchange(call, boot_clock_s())
        seen = seen_object(call, answer) if reply.kind is ReplyKind.ANSWER else None
        if seen is not None:
            for moved in self._commit(lambda: self.holds.observe(seen)):
                self._note(moved, call)
        return answer

    def _exchange(self, call: ForwardCall, sent_at_s: float) -> tuple[Reply, Answer]:
        """What Stripe said, judged as the workers would, and as it goes to the client."""

        def before_write() -> None:
            # The vault may have slept since the commit, and the claim have passed to another.
            if boot_clock_s() - sent_at_s > START_WITHIN_S:
                raise NotSent

        began_s = time.perf_counter()
        try:
            reply = self.upstream.exchange(call, before_write)
        except NotConnected:
            return Reply(ReplyKind.NOT_CONNECTED), Refused("upstream_unreachable").answer()
        except NotSent:
            return Reply(ReplyKind.NOT_SENT), Refused("busy", "too late to send").answer()
        except Broken:
            unknown = "Stripe's answer did not come, or did not come whole"
            return BROKEN, error_answer(504, "upstream_unknown", unknown, forwarded=True)
        finally:
            self.metrics.upstream_s.observe(time.perf_counter() - began_s)
        return self._read(call, reply)

    def _read(self, call: ForwardCall, reply: UpstreamReply) -> tuple[Reply, Answer]:
        judged = BROKEN
        if call.method == "POST":
            judged = read_reply(
                call.endpoint,
                reply.status,
                reply.headers,
                _json(reply.body),
                charge_key=call.money.charge_key if call.money else None,
            )
        elif 200 <= reply.status < 300:
            judged = Reply(ReplyKind.ANSWER)
        return judged, self._passed_on(reply)

    def _passed_on(self, reply: UpstreamReply) -> Answer:
        if reply.status == 401:
            # Its text quotes a part of the account key.
            logger.error("vault_upstream_key_refused")
            refused = "Stripe refused the vault's own key"
            return error_answer(401, "upstream_key_refused", refused, forwarded=True)
        body = self.upstream.redact(reply.body)
        return Answer(reply.status, body, forwarded=True, headers=reply.headers)

    # -- the database --------------------------------------------------------------------

    @contextmanager
    def _database_before_sending(self) -> Iterator[None]:
        """No database, no charge: nothing has been sent yet, and nothing is."""
        try:
            yield
        except LedgerUnavailable:
            raise Refused("busy", "the vault cannot reach its database") from None

    def _commit(self, write: Callable[[], T]) -> T:
        """Write what happened, for as long as there is a chance; the reply waits for it."""
        deadline_s = time.monotonic() + COMMIT_WITHIN_S
        while True:
            try:
                return write()
            except LedgerUnavailable:
                if time.monotonic() > deadline_s:
                    raise OutcomeLost from None
                fault_point("vault.not_committed")
            self._pause.wait(COMMIT_PAUSE_S)

    # -- what is said about it -----------------------------------------------------------

    def _note(self, moved: Moved, call: ForwardCall) -> None:
        self.metrics.holds.labels(moved.next).inc()
        if moved.is_late:
            self._alarm("late_success", call, moved.hold_id)
        if moved.other_object:
            self._alarm("double_charge", call, moved.hold_id)

    def _alarm(self, alarm: str, call: ForwardCall, hold_id: int | None = None) -> None:
        self.metrics.alarms.labels(alarm).inc()
        logger.error(
            f"vault_{alarm}",
            extra={
                "call": call.rule,
                "hold_id": hold_id,
                "charge_key": call.money.charge_key if call.money else None,
            },
        )


def seen_object(call: ForwardCall, answer: Answer) -> Seen | None:
    """The single intent or charge in a passing answer, if it is ours and shows an end."""
    if call.endpoint not in OBJECT_NAMES or "?" in call.target or call.rule.endswith(call.endpoint):
        return None
    data = _json(answer.body)
    if isinstance(data, Mapping) and isinstance(data.get("error"), Mapping):
        # A cancel that comes too late says so with the intent inside the error.
        data = data["error"].get("payment_intent")
    if not isinstance(data, Mapping) or data.get("object") != OBJECT_NAMES[call.endpoint]:
        return None
    metadata = data.get("metadata")
    charge_key = text_of(metadata.get("charge_key")) if isinstance(metadata, Mapping) else None
    status = status_of(data)
    verdict = _SEEN_STATUS.get(status or "")
    if charge_key is None or verdict is None or status is None:
        return None
    is_charge = call.endpoint == "charges"
    intent_id = text_of(data.get("payment_intent" if is_charge else "id"))
    if is_charge and intent_id is not None and verdict is Verdict.FAILED:
        return None  # one failed try of an intent that may still succeed
    return Seen(
        charge_key=charge_key,
        attempt_epoch=_epoch(metadata),
        payment_intent_id=intent_id,
        charge_id=text_of(data.get("id" if is_charge else "latest_charge")),
        verdict=verdict,
        status=status,
    )


def _epoch(metadata: object) -> int | None:
    text = metadata.get("attempt_epoch") if isinstance(metadata, Mapping) else None
    return int(text) if isinstance(text, str) and text.isascii() and text.isdecimal() else None


def _json(body: bytes) -> Any:
    try:
        return json.loads(body)
    except (ValueError, RecursionError):
        return None
