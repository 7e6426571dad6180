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
    own_init = "__init__" in vars(error_class)
    names = list(inspect.signature(error_class).parameters) if own_init else ["line"]
    error = error_class(*(f"the {name}" for name in names))
    again = pickle.loads(pickle.dumps(error))
    assert type(again) is error_class
    assert (again.args, str(again), vars(again)) == (error.args, str(error), vars(error))
    assert str(error)
    assert "\n" not in str(error)


def test_a_refusal_reads_as_one_line() -> None:
    refused = EventRefused(DeadLetterReason.TOO_LARGE, "the body is too long")
    assert str(refused) == "too_large: the body is too long"
    assert refused.reason == "too_large"
