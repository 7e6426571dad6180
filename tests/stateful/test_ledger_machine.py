"""Random sequences of deliveries, faults, crashes, clock jumps and decisions of people.

After each of them: at most one charge per event (invariant 1), every record settles once the
faults stop (4), and the ledger's total is Stripe's (5). STATEFUL_EXAMPLES=2000 digs deeper, with
other seeds each time; what fails is printed as its shortest sequence.
"""

from __future__ import annotations

import os
from collections.abc import Iterator

import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    rule,
    run_state_machine_as_test,
)
from sqlalchemy.engine import Engine

from models.database import make_engine
from models.errors import ChargebridgeError
from models.settings import load_settings
from models.states import State, is_settled
from tasks.recharge_flow import Approval
from tests.stateful.world import APIS, KEYS, Trick, World, event_of
from tests.support.services import Services

EXAMPLES = int(os.environ.get("STATEFUL_EXAMPLES", "100"))
STEPS = 30
ROUNDS = 60
"""Sweeps after the faults have stopped, each after the longest pause there is."""
PERIOD = "2026-Q3"
CUSTOMERS = (
    "cus_good",
    "cus_decline_insufficient_funds",
    "cus_auth",
    "cus_processing",
    "cus_missing",
)
FRESH = tuple(f"cus_good_{number}" for number in range(10))
"""So that late in a sequence there is still something that nobody has charged."""
METHODS = ("pm_card_visa", None, "pm_decline_generic_decline", "pm_auth_2", "pm_processing_2")
CALLS = (
    "crash_before",
    "crash_after",
    "lost_before",
    "lost_after",
    "hang",
    "hang_crash",
    "overtaken_before",
    "overtaken_after",
    "reply_http_500",
    "reply_http_429",
    "reply_html_502",
    "reply_truncate",
    "reply_lock_timeout",
)
SHORT_JUMPS_S = (1.0, 6.0, 10.0)
JUMPS_S = (1.0, 6.0, 10.0, 35.0, 3600.0, 20.5 * 3600, 25 * 3600.0)

customers = st.sampled_from(CUSTOMERS)
tricks = st.one_of(
    st.just(Trick()),
    st.builds(
        Trick,
        statement=st.integers(1, 8),
        at_statement=st.sampled_from(["crash_before", "crash_after", "refused", "lost"]),
    ),
    st.builds(
        Trick,
        call=st.sampled_from(CALLS),
        stage=st.sampled_from(["before", "after_claim", "after_commit"]),
    ),
)


class LedgerMachine(RuleBasedStateMachine):
    """Every rule is something that can happen to the product."""

    engine: Engine

    @initialize()
    def begin(self) -> None:
        self.world = World(self.engine)

    # -- workers ---------------------------------------------------------------------------

    @rule(
        customer=customers,
        trick=tricks,
        key=st.sampled_from(KEYS),
        api=st.sampled_from(APIS),
    )
    def deliver(self, customer: str, trick: Trick, key: str, api: str) -> None:
        self.world.work(*event_of(customer), Trick(**vars(trick)), key, api)

    @rule(customer=customers, trick=tricks)
    def deliver_again_plainly(self, customer: str, trick: Trick) -> None:
        self.world.work(*event_of(customer), Trick(**vars(trick)))

    @rule(
        customer=st.one_of(st.sampled_from(FRESH), customers),
        tries=st.lists(
            st.tuples(tricks, st.sampled_from(KEYS), st.sampled_from(SHORT_JUMPS_S)),
            min_size=2,
            max_size=4,
        ),
    )
    def deliver_several_times(self, customer: str, tries: list[tuple[Trick, str, float]]) -> None:
        for trick, key, pause_s in tries:
            self.world.work(*event_of(customer), Trick(**vars(trick)), key)
            self.world.pass_time(pause_s)

    @rule(trick=tricks)
    def sweep(self, trick: Trick) -> None:
        self.world.sweep(Trick(**vars(trick)))

    @rule(trick=tricks)
    def poll(self, trick: Trick) -> None:
        self.world.poll(Trick(**vars(trick)))

    # -- people ----------------------------------------------------------------------------

    @rule(customer=customers, method=st.sampled_from(METHODS), trick=tricks)
    def recharge(self, customer: str, method: str | None, trick: Trick) -> None:
        approval = Approval("test", method, force=True)
        self.world.step(
            Trick(**vars(trick)), lambda: self.world.recharges.start(customer, PERIOD, approval)
        )

    @rule(
        customer=st.sampled_from(["cus_auth", "cus_auth_2", "cus_decline_insufficient_funds"]),
        trick=tricks,
        at=st.sampled_from(["before it is sent", "after it is sent"]),
    )
    def the_customer_pays_while_a_recharge_runs(self, customer: str, trick: Trick, at: str) -> None:
        key, billing_event = event_of(customer)
        if key not in self.world.records():
            self.world.work(key, billing_event, Trick())
        open_intents = self._intents_of(key)
        self.recharge_plainly(customer)
        if at == "after it is sent":
            self.world.work(key, None, Trick(**vars(trick)))
        for intent in open_intents[:1]:
            self._pay(intent)
        self.world.work(key, None, Trick(**vars(trick)))

    def recharge_plainly(self, customer: str) -> None:
        approval = Approval("test", "pm_card_visa", force=True)
        self.world.step(Trick(), lambda: self.world.recharges.start(customer, PERIOD, approval))

    @rule(customer=customers, trick=tricks)
    def void(self, customer: str, trick: Trick) -> None:
        self.world.step(
            Trick(**vars(trick)), lambda: self.world.manual.void(customer, PERIOD, "test")
        )

    @rule(customer=customers, trick=tricks)
    def resolve(self, customer: str, trick: Trick) -> None:
        self.world.step(
            Trick(**vars(trick)),
            lambda: self.world.manual.resolve_not_charged(customer, PERIOD, "test"),
        )

    @rule(number=st.integers(0, 5))
    def the_customer_pays_an_open_intent(self, number: int) -> None:
        intents = [intent for key in self.world.records() for intent in self._intents_of(key)]
        if intents:
            self._pay(intents[number % len(intents)])

    def _intents_of(self, key: str) -> list[str]:
        attempts = self.world.reads.attempts(key)
        return [str(row["payment_intent_id"]) for row in attempts if row["payment_intent_id"]]

    def _pay(self, intent: str) -> None:
        paid = self.world.admin("POST", "complete", {"id": intent})
        key = paid.get("metadata", {}).get("charge_key")
        if key is not None:
            self.world.paid_by_hand.add(key)

    @rule(outcome=st.sampled_from(["succeeded", "failed"]))
    def the_bank_answers(self, outcome: str) -> None:
        for record in self.world.records().values():
            if record.state is State.PROCESSING:
                object_id = record.payment_intent_id or record.charge_id
                self.world.admin("POST", "settle", {"id": object_id, "outcome": outcome})

    # -- the world -------------------------------------------------------------------------

    @rule(seconds=st.sampled_from(JUMPS_S))
    def time_passes(self, seconds: float) -> None:
        self.world.pass_time(seconds)

    @rule(finish=st.booleans())
    def hanging_requests_end(self, finish: bool) -> None:
        self.world.end_hanging(finish=finish)

    # -- what must hold --------------------------------------------------------------------

    @invariant()
    def no_event_is_charged_twice(self) -> None:
        for key, charges in self.world.successes().items():
            assert len(charges) == 1, (key, charges)

    def teardown(self) -> None:
        if not hasattr(self, "world"):
            return
        try:
            self._faults_stop()
            self._totals_agree()
        finally:
            self.world.close()

    def _faults_stop(self) -> None:
        world = self.world
        world.end_hanging(finish=True)
        world.admin("DELETE", "faults")
        for _ in range(ROUNDS):
            world.pass_time(35.0)
            world.sweep(Trick())
            world.poll(Trick())
            if all(is_settled(record.state) for record in world.records().values()):
                break
        states = {record.customer_id: record.state for record in world.records().values()}
        assert all(is_settled(state) for state in states.values()), states
        # What was paid while it was open is found by the next poll.
        world.pass_time(world.settings.limits.poll_processing_cap_s + 61)
        world.poll(Trick())

    def _totals_agree(self) -> None:
        world = self.world
        self.no_event_is_charged_twice()
        for record in world.records().values():
            if record.state is State.REVIEW:
                self._a_person_decides(record.customer_id, record.charge_key)
        successes = world.successes()
        taken = {key for key in successes if key not in world.paid_by_hand}
        charged = {
            key: record for key, record in world.records().items() if record.state is State.CHARGED
        }
        assert taken <= set(charged), "money that the ledger does not know of"
        assert set(charged) <= set(successes), "charged, and no money was taken"
        for key, record in charged.items():
            (charge,) = successes[key]
            assert charge["amount"] == record.amount_cents
            assert charge["id"] == record.charge_id or (
                charge["payment_intent"] == record.payment_intent_id
            )

    def _a_person_decides(self, customer: str, key: str) -> None:
        found = self.world.successes().get(key)
        if found:
            self.world.manual.resolve_charged(customer, PERIOD, found[0]["id"], "test")
            return
        try:
            self.world.manual.resolve_not_charged(customer, PERIOD, "test")
        except ChargebridgeError as refused:
            assert "processing" in str(refused), refused  # noqa: PT017 - the one good reason


@pytest.fixture
def machine(services: Services, database_url: str) -> Iterator[type[LedgerMachine]]:
    engine = make_engine(load_settings({"DATABASE_URL": database_url}), pool_size=4, name="test")
    yield type("Machine", (LedgerMachine,), {"engine": engine})
    engine.dispose()


@pytest.mark.timeout(60 + 10 * EXAMPLES)
def test_whatever_happens_every_event_is_charged_once_at_most_and_settles(
    machine: type[LedgerMachine],
) -> None:
    run_state_machine_as_test(
        machine,
        settings=settings(
            max_examples=EXAMPLES,
            stateful_step_count=STEPS,
            deadline=None,
            database=None,
            derandomize="STATEFUL_EXAMPLES" not in os.environ,
            suppress_health_check=list(HealthCheck),
            print_blob=False,
        ),
    )
