"""One line a record, ids as fields, nothing of what other libraries quote."""

from __future__ import annotations

import io
import logging

import pytest

from models.errors import LedgerUnavailable
from models.logs import MAX_VALUE_CHARACTERS, LineFormatter


@pytest.fixture
def logged() -> io.StringIO:
    stream = io.StringIO()
    handler = logging.StreamHandler(stream)
    handler.setFormatter(LineFormatter("worker"))
    for name in ("tasks.test", "kombu.test"):
        logger = logging.getLogger(name)
        logger.handlers, logger.propagate = [handler], False
        logger.setLevel(logging.DEBUG)
    return stream


OURS = "tasks.test"
THEIRS = "kombu.test"


def test_a_record_of_ours_is_its_name_and_its_fields(logged: io.StringIO) -> None:
    fields = {"charge_key": "abc", "seconds": 1.5, "nothing": None, "words": "two words"}
    logging.getLogger(OURS).info("charge_claimed", extra=fields)
    line = logged.getvalue()
    assert line.endswith(
        " INFO worker tasks.test charge_claimed charge_key=abc nothing=None seconds=1.5 "
        'words="two words"\n'
    )


def test_a_line_break_in_a_value_makes_no_second_line(logged: io.StringIO) -> None:
    logging.getLogger(OURS).info("seen", extra={"text": 'a\nERROR forged "quoted"'})
    assert logged.getvalue().count("\n") == 1


def test_a_value_has_a_named_limit(logged: io.StringIO) -> None:
    logging.getLogger(OURS).info("seen", extra={"text": "x" * 10_000})
    assert len(logged.getvalue()) < MAX_VALUE_CHARACTERS + 200


def test_objects_and_fields_of_other_libraries_are_not_printed(logged: io.StringIO) -> None:
    logging.getLogger(OURS).info("seen", extra={"data": {"args": "MARKER"}})
    logging.getLogger(THEIRS).info("theirs", extra={"body": "MARKER"})
    assert "MARKER" not in logged.getvalue()


def test_of_a_foreign_message_the_first_line_is_kept(logged: io.StringIO) -> None:
    logging.getLogger(THEIRS).error("cannot read it\n\nthe body was: %s", "MARKER")
    assert logged.getvalue().endswith("cannot read it\n")


def test_of_a_foreign_exception_type_and_place_are_kept_and_not_its_text(
    logged: io.StringIO,
) -> None:
    _fail(THEIRS, ValueError("MARKER"))
    line = logged.getvalue()
    assert "ValueError at test_logs.py:" in line
    assert "MARKER" not in line
    assert line.count("\n") == 1


def test_the_text_of_an_error_of_ours_is_safe_and_kept(logged: io.StringIO) -> None:
    _fail(OURS, LedgerUnavailable("the ledger did not answer"))
    assert "LedgerUnavailable: the ledger did not answer" in logged.getvalue()


def _fail(name: str, error: Exception) -> None:
    def fail() -> None:
        raise error

    try:
        fail()
    except (ValueError, LedgerUnavailable):
        logging.getLogger(name).exception("failed")
