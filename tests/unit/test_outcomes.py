"""classify(): every kind of evidence, on a first send and after an earlier unknown."""

from __future__ import annotations

import itertools

import pytest

from models.outcomes import (
    VAULT_BLOCKS,
    VAULT_LOOK_UPS,
    History,
    Outcome,
    OutcomeKind,
    Reply,
    ReplyKind,
    classify,
)
from models.states import State

K = OutcomeKind
FIRST = History(earlier_unknown=False, vaulted=False)
AGAIN = History(earlier_unknown=True, vaulted=False)
VAULT_FIRST = History(earlier_unknown=False, vaulted=True)
VAULT_AGAIN = History(earlier_unknown=True, vaulted=True)


def answer(status: int, **fields: object) -> Reply:
    return Reply(kind=ReplyKind.ANSWER, http_status=status, **fields)  # type: ignore[arg-type]


def error(status: int, code: str | None = None, **fields: object) -> Reply:
    return answer(status, error_type="invalid_request_error", error_code=code, **fields)


EVIDENCE = [
    # what came back, on the first send, after an earlier unknown
    (answer(200, object_status="succeeded"), K.CHARGED, K.CHARGED),
    (answer(200, object_status="processing"), K.PROCESSING, K.PROCESSING),
    (answer(200, object_status="pending"), K.PROCESSING, K.PROCESSING),
    (answer(200, object_status="requires_action"), K.REQUIRES_ACTION, K.REQUIRES_ACTION),
    (answer(200, object_status="requires_payment_method"), K.CARD_DECLINED, K.CARD_DECLINED),
    (answer(200, object_status="canceled"), K.CARD_DECLINED, K.CARD_DECLINED),
    (answer(200, object_status="failed"), K.CARD_DECLINED, K.CARD_DECLINED),
    (answer(200, object_status="requires_capture"), K.UNRECOGNISED, K.UNRECOGNISED),
    (answer(200, object_status="requires_confirmation"), K.UNRECOGNISED, K.UNRECOGNISED),
    (answer(200, object_status="a_status_of_next_year"), K.UNRECOGNISED, K.UNRECOGNISED),
    (answer(200, object_status=None), K.UNRECOGNISED, K.UNRECOGNISED),
    (answer(402, error_type="card_error", error_code="card_declined"), K.CARD_DECLINED, None),
    (answer(402, error_code="authentication_required"), K.REQUIRES_ACTION, None),
    (
        answer(402, error_code="card_declined", decline_code="authentication_required"),
        K.REQUIRES_ACTION,
        None,
    ),
    (error(400, "parameter_missing"), K.REJECTED, K.UNKNOWN),
    (error(404, "resource_missing"), K.REJECTED, K.UNKNOWN),
    (error(400, "amount_too_small", replayed=True), K.REJECTED, K.REJECTED),
    (error(404, "resource_missing", replayed=True), K.REJECTED, K.REJECTED),
    (answer(400, error_type="idempotency_error"), K.UNKNOWN_LOOK_UP, K.UNKNOWN_LOOK_UP),
    (answer(401), K.NOT_EXECUTED, K.UNKNOWN),
    (answer(403), K.NOT_EXECUTED, K.UNKNOWN),
    (answer(429, error_code="rate_limit"), K.NOT_EXECUTED, K.UNKNOWN),
    (answer(429, error_code="lock_timeout"), K.NOT_EXECUTED, K.UNKNOWN),
    (error(409, "idempotency_key_in_use"), K.UNKNOWN, K.UNKNOWN),
    (answer(424), K.UNKNOWN, K.UNKNOWN),
    (answer(302), K.UNKNOWN, K.UNKNOWN),
    (answer(418), K.UNKNOWN, K.UNKNOWN),
    (answer(500), K.UNKNOWN, K.UNKNOWN),
    (answer(502), K.UNKNOWN, K.UNKNOWN),
    (answer(503), K.UNKNOWN, K.UNKNOWN),
    (answer(500, replayed=True), K.UNKNOWN_LOOK_UP, K.UNKNOWN_LOOK_UP),
    (Reply(ReplyKind.BROKEN), K.UNKNOWN, K.UNKNOWN),
    (Reply(ReplyKind.BROKEN, http_status=200), K.UNKNOWN, K.UNKNOWN),
    (Reply(ReplyKind.NOT_CONNECTED), K.NOT_EXECUTED, K.UNKNOWN),
    (Reply(ReplyKind.NOT_SENT), K.NOT_EXECUTED, K.UNKNOWN),
]


@pytest.mark.parametrize(("reply", "first", "again"), EVIDENCE)
def test_a_reply_is_judged_by_what_it_proves_of_the_original_request(
    reply: Reply, first: OutcomeKind, again: OutcomeKind | None
) -> None:
    assert classify(reply, FIRST).kind is first
    assert classify(reply, AGAIN).kind is (again or first)


@pytest.mark.parametrize(("reply", "first", "again"), EVIDENCE)
def test_through_the_vault_the_same_evidence_counts_only_if_it_says_it_forwarded(
    reply: Reply, first: OutcomeKind, again: OutcomeKind | None
) -> None:
    if reply.kind is not ReplyKind.ANSWER:
        assert classify(reply, VAULT_FIRST).kind is first
        return
    forwarded = Reply(
        **{name: getattr(reply, name) for name in Reply.__slots__} | {"forwarded": True}
    )
    assert classify(forwarded, VAULT_FIRST).kind is first
    assert classify(forwarded, VAULT_AGAIN).kind is (again or first)
    assert classify(reply, VAULT_FIRST).kind is K.UNKNOWN


NOT_FOR_GOOD = [
    "no_billing_run",
    "run_closing",
    "key_expired",
    "key_unknown",
    "busy",
    "endpoint_refused",
    "other_hold_live",
]


@pytest.mark.parametrize("code", sorted(VAULT_BLOCKS))
def test_a_refusal_for_good_blocks_only_a_first_send(code: str) -> None:
    reply = answer(402, error_code=code, forwarded=False)
    assert classify(reply, VAULT_FIRST).kind is K.BLOCKED
    assert classify(reply, VAULT_AGAIN).kind is K.UNKNOWN


@pytest.mark.parametrize("code", NOT_FOR_GOOD)
def test_a_wrong_key_or_an_unopened_run_never_settles_the_queue_as_failed(code: str) -> None:
    reply = answer(403, error_code=code, forwarded=False)
    assert classify(reply, VAULT_FIRST).state is State.RESERVED
    assert classify(reply, VAULT_AGAIN).state is State.SENT


@pytest.mark.parametrize("code", sorted(VAULT_LOOK_UPS))
def test_a_vault_that_will_not_resend_asks_for_a_look_up(code: str) -> None:
    for history in (VAULT_FIRST, VAULT_AGAIN):
        assert classify(answer(409, error_code=code, forwarded=False), history).kind is (
            K.UNKNOWN_LOOK_UP
        )


DEFINITE_WITHOUT_MONEY = {
    State.CARD_DECLINED,
    State.REQUIRES_ACTION,
    State.REJECTED,
    State.BLOCKED,
    State.RESERVED,
}
STATUSES = [*range(200, 206), 301, 302, 400, 401, 402, 403, 404, 405, 409, 418, 422, 424, 429,
            *range(500, 505), 520, 599]  # fmt: skip


def test_after_an_unknown_only_a_success_a_402_or_a_replay_is_definite() -> None:
    """Unknown is never treated as failed, whatever the later replies are."""
    for status, replayed, error_type, status_word, forwarded in itertools.product(
        STATUSES,
        (False, True),
        (None, "invalid_request_error", "idempotency_error", "api_error", "card_error"),
        (None, "succeeded", "processing", "nonsense"),
        (None, True, False),
    ):
        reply = answer(
            status,
            replayed=replayed,
            error_type=error_type,
            object_status=status_word,
            forwarded=forwarded,
        )
        for history in (AGAIN, VAULT_AGAIN):
            state = classify(reply, history).state
            if state in DEFINITE_WITHOUT_MONEY:
                assert status == 402 or (status in (400, 404) and replayed)
                assert error_type != "idempotency_error" or status == 402
            if state in (State.CHARGED, State.PROCESSING):
                assert 200 <= status < 300
                assert status_word in ("succeeded", "processing")


def test_only_a_success_with_the_word_for_it_is_paid() -> None:
    for status, word in itertools.product(STATUSES, (None, "succeeded", "canceled", "paid", "")):
        outcome = classify(answer(status, object_status=word), FIRST)
        assert (outcome.kind is K.CHARGED) == (200 <= status < 300 and word == "succeeded")


def test_an_outcome_keeps_what_the_reply_said() -> None:
    reply = answer(
        402,
        error_code="card_declined",
        decline_code="insufficient_funds",
        error_message="Your card has insufficient funds.",
        payment_intent_id="pi_1",
        charge_id="ch_1",
        request_id="req_1",
        replayed=True,
    )
    assert classify(reply, FIRST) == Outcome(
        kind=K.CARD_DECLINED,
        http_status=402,
        payment_intent_id="pi_1",
        charge_id="ch_1",
        error_code="card_declined",
        decline_code="insufficient_funds",
        error_message="Your card has insufficient funds.",
        request_id="req_1",
        replayed=True,
    )
