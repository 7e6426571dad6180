"""`ledger` and `dead-letters` on Celery's command line: what they print and how they fail."""

from __future__ import annotations

import base64
import json
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
from sqlalchemy.engine import Engine

from models.dead_letters import DeadLetters, NewDeadLetter
from models.errors import DeadLetterReason
from models.ledger import Ledger, Retry
from models.outcomes import OutcomeKind
from sandbox import binaries, roles
from tests.support.ledgers import claimed, event, new_record, outcome

WITHIN_S = 60.0
MARKER = "MARKER-of-an-event"


@dataclass(frozen=True)
class Done:
    code: int
    out: str
    errors: str

    @property
    def json(self) -> Any:
        assert self.code == 0, self.errors
        return json.loads(self.out)


Command = Callable[..., Done]


@pytest.fixture
def command(database_url: str) -> Command:
    """Runs `celery -A tasks …` with no more settings than the commands need."""

    def run(*arguments: str, app: bool = True, **changes: str) -> Done:
        settings = {"DATABASE_URL": database_url, "CELERY_BROKER_URL": "redis://127.0.0.1:1/0"}
        done = subprocess.run(
            [sys.executable, "-m", "celery", *(["-A", "tasks"] if app else []), *arguments],
            check=False,
            capture_output=True,
            text=True,
            timeout=WITHIN_S,
            env={**roles.base_environment(binaries.CHECKOUT), **settings, **changes},
            cwd=binaries.CHECKOUT,
        )
        return Done(done.returncode, done.stdout, done.stderr)

    return run


@pytest.fixture
def charged(ledger: Ledger) -> str:
    """One charged record whose event has texts; its charge key."""
    new = new_record(event(description=MARKER, metadata={"note": MARKER}))
    claim = claimed(ledger, new)
    ledger.record_outcome(claim, outcome(), Retry(0))
    return new.charge_key


def test_show_tells_the_record_its_calls_and_its_history(command: Command, charged: str) -> None:
    done = command("ledger", "show", "cust_1", "2026-Q3")
    assert done.code == 0
    for expected in (charged, "charged", "pi_1", "ch_1", "2500", "calls", "history", "outcome"):
        assert expected in done.out
    assert MARKER not in done.out


def test_show_as_json_has_the_records_fields_its_calls_and_its_history(
    command: Command, charged: str
) -> None:
    told = command("ledger", "show", "cust_1", "2026-Q3", "--json").json
    assert told["charge_key"] == charged
    assert (told["state"], told["amount_cents"], told["currency"]) == ("charged", 2500, "usd")
    assert [one["outcome"] for one in told["calls"]] == ["charged"]
    assert [one["to_state"] for one in told["history"]] == ["sent", "charged"]
    assert MARKER not in json.dumps(told)


def test_an_unknown_record_is_one_line_and_exit_code_1(command: Command) -> None:
    done = command("ledger", "show", "nobody", "never")
    assert (done.code, done.out) == (1, "")
    assert done.errors.strip() == "chargebridge: no such billing record"


def test_list_filters_and_pages(command: Command, ledger: Ledger) -> None:
    for number in range(3):
        new = new_record(event(customer_id=f"cust_{number}", billing_run="run-1"))
        kind = OutcomeKind.CARD_DECLINED if number == 2 else OutcomeKind.CHARGED
        ledger.record_outcome(claimed(ledger, new), outcome(kind), Retry(0))
    ledger.reserve(new_record(event(customer_id="other", billing_period="2026-Q4")), "x", 0)

    def customers(*options: str) -> list[str]:
        return sorted(r["customer_id"] for r in command("ledger", "list", *options, "--json").json)

    assert customers() == ["cust_0", "cust_1", "cust_2", "other"]
    assert customers("--state", "card_declined") == ["cust_2"]
    assert customers("--period", "2026-Q4") == ["other"]
    assert customers("--run", "run-1") == ["cust_0", "cust_1", "cust_2"]
    assert customers("--customer", "cust_1") == ["cust_1"]
    first = command("ledger", "list", "--limit", "3", "--json").json
    rest = command("ledger", "list", "--after", first[-1]["charge_key"], "--json").json
    assert len(first) == 3
    assert len(rest) == 1


def test_list_as_a_table_has_headings_and_no_texts_of_events(
    command: Command, charged: str
) -> None:
    done = command("ledger", "list")
    heading, row = done.out.splitlines()
    assert heading.split()[:3] == ["customer_id", "billing_period", "state"]
    assert row.split()[:3] == ["cust_1", "2026-Q3", "charged"]
    assert MARKER not in done.out
    assert charged not in done.errors


@pytest.mark.parametrize(
    "arguments",
    [
        ("ledger", "list", "--state", "unheard_of"),
        ("ledger", "list", "--limit", "0"),
        ("ledger", "show", "only_one"),
        ("ledger", "unheard_of"),
        ("dead-letters", "show", "no_number"),
        ("dead-letters", "list", "--reason", "unheard_of"),
    ],
)
def test_a_wrong_call_is_exit_code_2(command: Command, arguments: tuple[str, ...]) -> None:
    done = command(*arguments)
    assert (done.code, done.out) == (2, "")
    assert "Traceback" not in done.errors


def test_without_our_app_the_commands_refuse(command: Command) -> None:
    done = command("ledger", "list", app=False)
    assert done.code == 2
    assert "celery -A tasks ledger list" in done.errors


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"DATABASE_URL": ""}, "DATABASE_URL is not set"),
        ({"DATABASE_URL": "mysql://x/y"}, "DATABASE_URL must name a PostgreSQL database"),
        ({"DATABASE_URL": "postgresql://x@127.0.0.1:1/x"}, "DATABASE_URL: connection"),
        ({"LEASE_S": "nonsense"}, "LEASE_S is not a valid float"),
    ],
)
def test_what_prevents_an_answer_is_one_line(
    command: Command, changes: dict[str, str], says: str
) -> None:
    done = command("ledger", "list", **changes)
    assert (done.code, done.out) == (1, "")
    (line,) = done.errors.strip().splitlines()
    assert line.startswith(f"chargebridge: {says}")


# --- dead letters ------------------------------------------------------------------------------


def bury(engine: Engine, body: bytes, reason: DeadLetterReason, delivery_id: str) -> int:
    letter = NewDeadLetter(
        source="nsq",
        place="billing-events/stripe-processor",
        delivery_id=delivery_id,
        body=body,
        reason=reason,
        detail="the body must be a JSON object",
    )
    return DeadLetters(engine).bury(letter)


def test_a_list_of_dead_letters_shows_reasons_and_never_a_body(
    command: Command, engine: Engine
) -> None:
    bury(engine, MARKER.encode(), DeadLetterReason.INVALID_JSON, "one")
    bury(engine, MARKER.encode(), DeadLetterReason.TOO_LARGE, "two")
    table = command("dead-letters", "list")
    assert table.code == 0
    assert "invalid_json" in table.out
    assert "too_large" in table.out
    told = command("dead-letters", "list", "--reason", "too_large", "--json").json
    assert [one["delivery_id"] for one in told] == ["two"]
    assert "body" not in told[0]
    assert MARKER not in table.out + json.dumps(told)


@pytest.mark.parametrize("body", [b'{"a": 1}', b"\xff\xfe\x00"])
def test_show_gives_the_body_back_whole(command: Command, engine: Engine, body: bytes) -> None:
    letter = bury(engine, body, DeadLetterReason.INVALID_EVENT, "one")
    told = command("dead-letters", "show", str(letter), "--json").json
    if told["body"] is not None:
        assert told["body"].encode() == body
    else:
        assert base64.b64decode(told["body_base64"]) == body
    assert told["reason"] == "invalid_event"
    assert command("dead-letters", "show", str(letter)).code == 0


def test_control_characters_of_a_body_do_not_reach_the_terminal(
    command: Command, engine: Engine
) -> None:
    letter = bury(engine, b"\x1b[2Jgone", DeadLetterReason.INVALID_JSON, "one")
    assert "\x1b" not in command("dead-letters", "show", str(letter)).out


def test_an_unknown_dead_letter_is_exit_code_1(command: Command) -> None:
    done = command("dead-letters", "show", "12345")
    assert (done.code, done.out) == (1, "")
    assert done.errors.strip() == "chargebridge: no such dead letter"
