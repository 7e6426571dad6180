"""The core of a bridge: takes deliveries, has them charged, acks what the ledger has settled.

It knows no broker. It holds nothing that a restart could lose: the broker keeps what was not
acked, the ledger keeps the rest.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Executor
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final, assert_never

from bridges.answers import Answers
from bridges.commit_watcher import TICK_S, CommitWatcher, ParkedDeliveries, ParkedDelivery
from bridges.counters import DEAD_LETTER_REASON
from bridges.delivery import Delivery, Source
from bridges.dispatcher import Dispatcher, Publication
from bridges.endings import end_all
from bridges.held import Held, HeldDeliveries
from bridges.lease_keeper import LeaseKeeper
from bridges.repeats import compare, wording
from models.dead_letters import NewDeadLetter
from models.decisions import DeliveryView, Disposition, RecordStatus, dispose
from models.errors import DeadLetterReason, EventRefused
from models.events import decode_event
from models.keys import charge_key
from models.states import is_settled

if TYPE_CHECKING:
    from bridges.counters import Counters
    from bridges.dead_letter_writer import DeadLetterWriter
    from bridges.sweep_watch import SweepWatch
    from bridges.unsettled_age import UnsettledAge
    from models.settings import Settings

logger = logging.getLogger(__name__)

SHUTDOWN_GRACE_S: Final = 1.0
"""After intake has stopped, commits that come this late are still acked; the rest is handed
back, so that another bridge need not wait for its lease to run out."""
GATHER_S: Final = 0.005
"""Deliveries that come this close together share one question to the ledger."""
GATHERED_ENOUGH: Final = 50
"""So many need not wait for more."""
DECODED_PER_TURN: Final = 20
"""Bodies decoded before the event loop may turn to others: a body may be long."""
PRUNE_EVERY_S: Final = 5.0


@dataclass(frozen=True, slots=True)
class Parts:
    """What the core works with, made by whoever starts it."""

    watcher: CommitWatcher
    dispatcher: Dispatcher
    unsettled_age: UnsettledAge
    sweep_watch: SweepWatch
    dead_letters: DeadLetterWriter
    executor: Executor
    counters: Counters


class Bridge:
    """One source, one ledger, one task queue. `run` is `run_once` again and again."""

    def __init__(
        self,
        source: Source,
        parts: Parts,
        settings: Settings,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.source = source
        self.held = HeldDeliveries(settings.bridge_max_in_flight)
        self.parked = ParkedDeliveries()
        self.counters = parts.counters
        self.keeper = LeaseKeeper(source, self.held, settings.limits, parts.counters)
        self.dispatcher = parts.dispatcher
        self._watcher = parts.watcher
        self._unsettled_age = parts.unsettled_age
        self.sweep_watch = parts.sweep_watch
        self._dead_letters = parts.dead_letters
        self._settings = settings
        self._clock = clock
        self._answers = Answers(
            source,
            self.held,
            self.parked,
            executor=parts.executor,
            limits=settings.limits,
            counters=parts.counters,
        )
        self._fresh: list[Held] = []
        self._wake = asyncio.Event()
        self._stopping = False
        self._next_tick = 0.0
        self._next_prune = 0.0

    # -- what an adapter sees --------------------------------------------------------------

    def take(self, delivery: Delivery) -> None:
        """Own this delivery from now on; one that is held already is not taken twice."""
        if self.knows(delivery.hold_id):
            self.counters.add("taken_again")
            return
        held = Held(delivery, self._clock(), refused=delivery.refused)
        self.held.add(held)
        self._fresh.append(held)
        self.counters.add("taken")
        self.counters.add("redelivered", int(delivery.later_round))
        self._wake.set()

    def knows(self, hold_id: str) -> bool:
        """Whether the delivery is held or parked here."""
        return hold_id in self.held or hold_id in self.parked

    def free_slots(self) -> int:
        """How many more deliveries may be taken now."""
        return self.held.free

    async def slot_free(self) -> None:
        """Return when there is room for another delivery."""
        await self.held.room()

    # -- what a probe sees -----------------------------------------------------------------

    @property
    def stopping(self) -> bool:
        return self._stopping

    @property
    def ledger_away(self) -> bool:
        """Whether the last question to the ledger had no answer."""
        return self._watcher.backoff.failing

    # -- the loop --------------------------------------------------------------------------

    async def run(self, stop: asyncio.Event) -> None:
        """Work until `stop` is set, then shut down in order."""
        await self.source.start(self)
        try:
            async with asyncio.TaskGroup() as tasks:
                loops = [
                    tasks.create_task(self.keeper.run(), name="lease_keeper"),
                    tasks.create_task(self.dispatcher.run(), name="dispatcher"),
                    tasks.create_task(self._unsettled_age.run(), name="unsettled_age"),
                    tasks.create_task(self.sweep_watch.run(), name="sweep_watch"),
                    tasks.create_task(self.source.run(), name="source"),
                ]
                try:
                    await self._work(stop)
                    await self.shut_down()
                finally:
                    await end_all(loops)
        finally:
            await self.source.close()

    async def _work(self, stop: asyncio.Event) -> None:
        stopped = asyncio.create_task(_until(stop))
        stopped.add_done_callback(self._hurry)
        try:
            while not stop.is_set():
                await self._wait_for_work(stopped)
                await self.run_once()
        finally:
            stopped.cancel()

    async def _wait_for_work(self, stopped: asyncio.Task[None]) -> None:
        """Return soon for new deliveries, at the next tick for those that are held."""
        if self._fresh and self._watcher.backoff.ready:
            await self._gather()
            return
        self._wake.clear()
        nothing = not len(self.held) and not len(self.parked)
        pause_s = None if nothing else max(TICK_S, self._watcher.backoff.wait_s)
        wake = asyncio.create_task(_until(self._wake))
        try:
            await asyncio.wait(
                {wake, stopped}, timeout=pause_s, return_when=asyncio.FIRST_COMPLETED
            )
        finally:
            wake.cancel()
        if self._fresh:
            await self._gather()

    async def _gather(self) -> None:
        """Let deliveries that come close together be asked for together, if any still can."""
        if self.held.free and len(self._fresh) < GATHERED_ENOUGH:
            await asyncio.sleep(GATHER_S)

    async def run_once(self) -> None:
        """One pass: decode what came, read the ledger once, and do what follows from it."""
        fresh, self._fresh = self._fresh, []
        await self._decode(fresh)
        await self._bury()
        checked, parked = self._due(fresh)
        keys = {h.charge_key for h in checked if h.charge_key} | {p.charge_key for p in parked}
        statuses = await self._watcher.read(sorted(keys)) if keys else {}
        if statuses is None:
            # Unknown is not "no record": nothing is concluded, and these are asked for again.
            self._fresh = [h for h in fresh if self.held.still(h)] + self._fresh
            await self._answers.give([], [])
        else:
            self._let_go(parked, statuses)
            parking = self._dispose(checked, statuses)
            await self._bury()
            await self._answers.give(parking, _settled(parked, statuses))
        self._prune()

    async def _decode(self, fresh: Sequence[Held]) -> None:
        for number, held in enumerate(fresh, start=1):
            if held.refused is None and held.charge_key is None:
                self._decode_one(held)
            if number % DECODED_PER_TURN == 0:
                await asyncio.sleep(0)

    def _decode_one(self, held: Held) -> None:
        try:
            event = decode_event(
                held.delivery.body, max_amount_cents=self._settings.max_amount_cents
            )
        except EventRefused as refused:
            held.refused = refused
            return
        held.fingerprint = event.fingerprint
        held.wording = wording(event)
        held.charge_key = charge_key(
            event.customer_id, event.billing_period, self._settings.charge_namespace
        )

    def _due(self, fresh: Sequence[Held]) -> tuple[list[Held], list[ParkedDelivery]]:
        """What this pass asks the ledger about: all of it at a tick, else what is new."""
        if self._clock() < self._next_tick:
            return [h for h in fresh if self.held.still(h) and not h.refused], []
        self._next_tick = self._clock() + TICK_S
        waiting = [h for h in self.held if h.charge_key and not (h.committed or h.refused)]
        return waiting, self.parked.next_in_turn()

    def _dispose(self, checked: Sequence[Held], statuses: Mapping[str, RecordStatus]) -> list[Held]:
        """Do at once what can be; returns the deliveries to park."""
        parking: list[Held] = []
        now = self._clock()
        for held in checked:
            if not self.held.still(held):
                continue
            assert held.charge_key is not None, "only decoded deliveries are disposed of"
            view = DeliveryView(
                fingerprint=held.fingerprint,
                age_s=now - held.taken_at,
                published_ago_s=self.dispatcher.published_ago_s(held.charge_key),
                later_round=held.delivery.later_round,
            )
            disposition = dispose(view, statuses.get(held.charge_key), self._settings.limits)
            if held.charge_key in statuses:
                self.dispatcher.forget(held.charge_key)
            match disposition:
                case Disposition.ACK:
                    compare(held, statuses[held.charge_key], self.counters)
                    self._committed(held)
                case Disposition.PUBLISH:
                    self._publish(held)
                case Disposition.PARK:
                    parking.append(held)
                case Disposition.DEAD_LETTER:
                    held.refused = EventRefused(
                        DeadLetterReason.PAYLOAD_CONFLICT,
                        "the money fields differ from the recorded event's",
                    )
                case Disposition.WAIT:
                    pass
                case _:
                    assert_never(disposition)
        return parking

    def _let_go(
        self, parked: Sequence[ParkedDelivery], statuses: Mapping[str, RecordStatus]
    ) -> None:
        """Watch no more what the ledger has lost (it was restored): it is to come round whole."""
        lost = [p for p in parked if p.charge_key not in statuses]
        self.parked.remove(lost)
        self.counters.add("parked_record_lost", len(lost))

    def _publish(self, held: Held) -> None:
        if self._stopping or held.charge_key is None:
            return
        publication = Publication(held.charge_key, held.delivery.body, held.delivery.source)
        self.dispatcher.want(publication)

    async def _bury(self) -> None:
        """Commit refused deliveries as dead letters; only then may they be acked."""
        refused = [h for h in self.held if h.refused is not None and not h.committed]
        written = await self._dead_letters.write([_dead_letter(h) for h in refused])
        for held in refused[:written]:
            self._committed(held)
            assert held.refused is not None, "only refused deliveries are buried"
            self.counters.add(f"{DEAD_LETTER_REASON}{held.refused.reason}")
        self.counters.add("dead_letters", written)

    def _committed(self, held: Held) -> None:
        held.committed = True
        self.counters.time_to_commit.observe(self._clock() - held.taken_at)

    def _prune(self) -> None:
        if self._clock() < self._next_prune:
            return
        self._next_prune = self._clock() + PRUNE_EVERY_S
        self.dispatcher.prune({h.charge_key for h in self.held if h.charge_key})

    # -- the end ---------------------------------------------------------------------------

    async def shut_down(self) -> None:
        """Take nothing more, ack what settles in time, hand the rest back."""
        self._hurry()
        logger.info("bridge_stopping", extra={"held": len(self.held), "parked": len(self.parked)})
        await self.source.stop_intake()
        deadline = self._clock() + SHUTDOWN_GRACE_S
        while len(self.held) and self._clock() < deadline:
            self._next_tick = 0.0
            await self.run_once()
            await asyncio.sleep(TICK_S)
        await self._answers.hand_back()
        logger.info("bridge_stopped", extra=dict(self.counters.snapshot()))

    def _hurry(self, _stopped: object = None) -> None:
        """Publish nothing more, and let nothing that hangs keep the bridge from ending."""
        self._stopping = True
        self._watcher.hurry()
        self._dead_letters.hurry()


async def _until(event: asyncio.Event) -> None:
    await event.wait()


def _settled(
    parked: Sequence[ParkedDelivery], statuses: Mapping[str, RecordStatus]
) -> list[ParkedDelivery]:
    return [
        p
        for p in parked
        if (status := statuses.get(p.charge_key)) is not None and is_settled(status.state)
    ]


def _dead_letter(held: Held) -> NewDeadLetter:
    assert held.refused is not None, "only refused deliveries become dead letters"
    return NewDeadLetter(
        source=held.delivery.source,
        place=held.delivery.place,
        delivery_id=held.delivery.delivery_id,
        body=held.delivery.body,
        reason=DeadLetterReason(held.refused.reason),
        detail=held.refused.detail,
        charge_key=held.charge_key,
    )
