"""The table of moves: what may follow what, and nothing else."""

from __future__ import annotations

import itertools

import pytest

from models.errors import StateForbids
from models.states import (
    KNOWN_FAILURES,
    SETTLED,
    TRANSITIONS,
    UNSETTLED,
    Move,
    State,
    check_move,
    is_settled,
)


def test_every_state_is_settled_or_unsettled_and_never_both() -> None:
    assert set(State) == SETTLED | UNSETTLED
    assert not SETTLED & UNSETTLED
    assert {State.RESERVED, State.SENT} == UNSETTLED


@pytest.mark.parametrize("state", State)
def test_is_settled_says_what_the_sets_say(state: State) -> None:
    assert is_settled(state) is (state in SETTLED)


@pytest.mark.parametrize(
    ("move", "source", "target"), list(itertools.product(Move, State, State)), ids=str
)
def test_a_move_passes_exactly_when_the_table_names_it(
    move: Move, source: State, target: State
) -> None:
    if (source, target) in TRANSITIONS[move]:
        check_move(move, source, target)
        return
    with pytest.raises(StateForbids, match=f"{source} cannot become {target}"):
        check_move(move, source, target)


def test_money_that_was_taken_is_never_moved_away_from() -> None:
    leaving = {
        (move, target)
        for move, pairs in TRANSITIONS.items()
        for source, target in pairs
        if source is State.CHARGED and target is not State.CHARGED
    }
    assert leaving == set()


def test_a_recharge_starts_only_where_it_is_certain_that_no_money_was_taken() -> None:
    assert {source for source, _ in TRANSITIONS[Move.RECHARGE]} == KNOWN_FAILURES
    assert State.SENT not in KNOWN_FAILURES
    assert State.REVIEW not in KNOWN_FAILURES


def test_nothing_becomes_sent_but_by_a_claim_or_by_staying_so() -> None:
    ways_in = {
        (move, source)
        for move, pairs in TRANSITIONS.items()
        for source, target in pairs
        if target is State.SENT and source is not State.SENT
    }
    assert ways_in == {
        (Move.CLAIM, State.RESERVED),
        (Move.RECOVER, State.RESERVED),
    }


def test_an_unknown_is_never_voided_or_recharged() -> None:
    for move in (Move.VOID, Move.RECHARGE):
        assert State.SENT not in {source for source, _ in TRANSITIONS[move]}
