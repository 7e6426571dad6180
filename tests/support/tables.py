"""The table of moves as the docs print it."""

from __future__ import annotations

from models.states import TRANSITIONS, State


def transition_table() -> str:
    """One line a pair of states: from, to, and the moves that join them."""
    lines = ["| from | to | by |", "|---|---|---|"]
    for source in State:
        for target in State:
            moves = [move for move, pairs in TRANSITIONS.items() if (source, target) in pairs]
            if moves:
                lines.append(f"| {source} | {target} | {', '.join(moves)} |")
    return "\n".join(lines)
