"""The tree of errors: every class survives the way between processes."""

from __future__ import annotations

import inspect
import pickle

import pytest

from models import errors
from models.errors import ChargebridgeError, DeadLetterReason, EventRefused

CLASSES = [
    value
    for value in vars(errors).values()
    if inspect.isclass(value) and issubclass(value, ChargebridgeError)
]


def test_the_tree_has_classes() -> None:
    assert EventRefused in CLASSES


@pytest.mark.parametrize("error_class", CLASSES)
def test_an_error_comes_back_from_pickling_unchanged(error_class: type[ChargebridgeError]) -> None:
    parameters = inspect.signature(error_class).parameters.values()
    required = [p for p in parameters if p.kind is p.POSITIONAL_OR_KEYWORD]
    error = error_class(*(f"the {p.name}" for p in required)) if required else error_class("line")
    again = pickle.loads(pickle.dumps(error))
    assert type(again) is error_class
    assert (again.args, str(again), vars(again)) == (error.args, str(error), vars(error))
    assert str(error)
    assert "\n" not in str(error)


def test_a_refusal_reads_as_one_line() -> None:
    refused = EventRefused(DeadLetterReason.TOO_LARGE, "the body is too long")
    assert str(refused) == "too_large: the body is too long"
    assert refused.reason == "too_large"
