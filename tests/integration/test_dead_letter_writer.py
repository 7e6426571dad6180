"""Refused deliveries are committed however many there are and however slow the disk is."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from hashlib import sha256

import pytest
from sqlalchemy import text
from sqlalchemy.engine import Engine

from bridges import threads
from bridges.dead_letter_writer import DeadLetterWriter
from models.dead_letters import MAX_KEPT_BYTES, DeadLetters, NewDeadLetter
from models.errors import DeadLetterReason
from models.limits import FAST_LIMITS

LETTERS = 100
CALL_LIMIT_S = 2.8
SLOW = (
    "CREATE FUNCTION slow() RETURNS trigger LANGUAGE plpgsql AS "
    "$$ BEGIN PERFORM pg_sleep(0.03); RETURN NEW; END $$",
    "CREATE TRIGGER slow BEFORE INSERT ON dead_letters FOR EACH ROW EXECUTE FUNCTION slow()",
)


def letter(number: int) -> NewDeadLetter:
    return NewDeadLetter(
        source="nsq",
        place="topic/channel",
        delivery_id=str(number),
        body=b"not json",
        reason=DeadLetterReason.INVALID_JSON,
        detail="the body is not JSON",
    )


def test_a_body_beyond_all_measure_is_kept_in_part_and_holds_up_nothing(engine: Engine) -> None:
    letters = DeadLetters(engine)
    body = b"x" * (MAX_KEPT_BYTES + 1)
    shown = letters.show(letters.bury(replace(letter(1), body=body)))
    assert shown is not None
    assert shown.body == body[:-1]
    assert (shown.body_size, shown.body_sha256) == (len(body), sha256(body).hexdigest())
    assert shown.detail.endswith(f"; of {len(body)} bytes the first {MAX_KEPT_BYTES} are kept")
    whole = letters.show(letters.bury(replace(letter(2), body=body[:-1])))
    assert whole is not None
    assert (whole.body, whole.detail) == (body[:-1], letter(2).detail)


def test_a_flood_on_a_slow_disk_is_committed_bit_by_bit(
    engine: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    """All of them at once would take longer than one call to the ledger may."""
    monkeypatch.setattr(threads, "LEDGER_LIMIT_S", CALL_LIMIT_S)
    with engine.connect() as connection:
        for statement in SLOW:
            connection.execute(text(statement))

    async def write_all(writer: DeadLetterWriter) -> None:
        left = [letter(number) for number in range(LETTERS)]
        while left:
            written = await writer.write(left)
            assert written, "each visit commits some"
            left = left[written:]

    with threads.DaemonThreads(1, "ledger") as executor:
        calls = threads.LedgerCalls(executor)
        asyncio.run(write_all(DeadLetterWriter(DeadLetters(engine), calls, FAST_LIMITS)))
    with engine.connect() as connection:
        counts = connection.execute(text("SELECT count(*), max(count) FROM dead_letters")).one()
    assert counts == (LETTERS, 1)
