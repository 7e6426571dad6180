"""The states of a billing record and the one table of moves between them."""

from __future__ import annotations

from enum import StrEnum
from typing import Final

from models.errors import StateForbids


class State(StrEnum):
    """Where a billing record stands. The values are what the ledger stores."""

    RESERVED = "reserved"
    """Certain: nothing of this epoch reached Stripe or can still take money."""
    SENT = "sent"
    """A request may have reached Stripe; no outcome is recorded."""
    CHARGED = "charged"
    PROCESSING = "processing"
    """Stripe accepted; the payment settles later (bank debits)."""
    CARD_DECLINED = "card_declined"
    REQUIRES_ACTION = "requires_action"
    REJECTED = "rejected"
    """Stripe refused the request itself."""
    BLOCKED = "blocked"
    """The vault refused for good."""
    VOIDED = "voided"
    REVIEW = "review"
    """The outcome could not be established; a person decides."""


UNSETTLED: Final = frozenset({State.RESERVED, State.SENT})
"""The ledger still has to act; the broker must not forget the event."""

SETTLED: Final = frozenset(State) - UNSETTLED
"""The ledger owns the event; the broker may forget it."""

KNOWN_FAILURES: Final = frozenset(
    {State.CARD_DECLINED, State.REQUIRES_ACTION, State.REJECTED, State.BLOCKED}
)
"""No money was taken, and that is certain: the only states that a recharge may start from."""

MONEY_STATES: Final = frozenset({State.CHARGED, State.PROCESSING})
"""Money was taken, or Stripe has accepted to take it."""


class Move(StrEnum):
    """Why a record changes its state. One move may join several pairs of states."""

    CLAIM = "claim"
    OUTCOME = "outcome"
    LOOK_UP = "look_up"
    POLL = "poll"
    LATE_TRUTH = "late_truth"
    ADOPT = "adopt"
    RECHARGE = "recharge"
    VOID = "void"
    RESOLVE = "resolve"
    GIVE_UP = "give_up"
    RECOVER = "recover"
    IMPORT = "import"
    REPLAY = "replay"


def _pairs(
    sources: frozenset[State] | set[State], targets: frozenset[State] | set[State]
) -> frozenset[tuple[State, State]]:
    return frozenset((source, target) for source in sources for target in targets)


_S = State
TRANSITIONS: Final[dict[Move, frozenset[tuple[State, State]]]] = {
    # A claim always says `sent` first; a resend claims a record that says it already.
    Move.CLAIM: _pairs({_S.RESERVED, _S.SENT}, {_S.SENT}),
    # What one call came to. `sent` to `sent` is an unknown that was recorded.
    Move.OUTCOME: _pairs({_S.SENT}, frozenset(State) - {_S.VOIDED}),
    Move.LOOK_UP: _pairs({_S.SENT}, frozenset(State) - {_S.VOIDED, _S.BLOCKED}),
    # An intent that was open when it was settled is asked about until it ends.
    Move.POLL: _pairs(
        {_S.PROCESSING, _S.REQUIRES_ACTION},
        {_S.CHARGED, _S.CARD_DECLINED, _S.PROCESSING, _S.REQUIRES_ACTION, _S.REVIEW},
    ),
    # Money that shows itself after the record went on.
    Move.LATE_TRUTH: (
        _pairs({_S.SENT, _S.RESERVED, _S.REVIEW}, {_S.CHARGED})
        | _pairs(frozenset(State) - MONEY_STATES - {_S.SENT, _S.RESERVED, _S.REVIEW}, {_S.REVIEW})
        | {(_S.PROCESSING, _S.CHARGED)}
        # Of another amount or currency than was asked for.
        | _pairs({_S.SENT, _S.RESERVED, _S.PROCESSING}, {_S.REVIEW})
    ),
    # Money of an earlier epoch, found before another send.
    Move.ADOPT: _pairs({_S.RESERVED, _S.SENT}, MONEY_STATES | {_S.REVIEW}),
    Move.RECHARGE: _pairs(KNOWN_FAILURES, {_S.RESERVED}),
    Move.VOID: _pairs({_S.RESERVED} | KNOWN_FAILURES, {_S.VOIDED}),
    Move.RESOLVE: _pairs({_S.REVIEW}, {_S.CHARGED, _S.REJECTED}),
    # These two only make rows that were not there.
    Move.IMPORT: frozenset(),
    Move.REPLAY: frozenset(),
    Move.GIVE_UP: _pairs({_S.SENT, _S.RESERVED}, {_S.REVIEW}),
    # After a database restore Stripe's success wins over whatever the old copy says, and
    # every unsettled record is looked up before anything is sent.
    Move.RECOVER: (
        _pairs(frozenset(State), {_S.CHARGED})
        | _pairs({_S.RESERVED, _S.SENT}, {_S.SENT})
        # Of another amount or currency than was asked for.
        | _pairs(frozenset(State) - {_S.CHARGED}, {_S.REVIEW})
        # Open at Stripe in a later epoch than the copy knows.
        | _pairs(
            KNOWN_FAILURES | {_S.PROCESSING, _S.REQUIRES_ACTION},
            {_S.PROCESSING, _S.REQUIRES_ACTION},
        )
    ),
}


def is_settled(state: State) -> bool:
    """Whether the broker may forget an event whose record is in this state."""
    return state in SETTLED


def check_move(move: Move, source: State, target: State) -> None:
    """Let a move pass that the table names; raise StateForbids for any other."""
    if (source, target) not in TRANSITIONS[move]:
        raise StateForbids(f"a record that is {source} cannot become {target} by {move}")
