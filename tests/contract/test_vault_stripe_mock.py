"""What goes out of the vault is a request that Stripe's own description of its API allows."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from urllib.parse import parse_qsl, urlencode

import pytest
import urllib3

from models.events import event_from_json
from models.keys import charge_key
from tasks.requests import CHARGES, PAYMENT_INTENTS, build_request, encode_form
from tests.support import stripe_mock
from tests.support.vault import RUN, VaultProcess, VaultStarter
from vault.rules import PREFIX, Received, understand

pytestmark = pytest.mark.timeout(600)

EVENT = event_from_json(
    {
        "customer_id": "cust_1",
        "billing_period": RUN,
        "amount_cents": 2500,
        "stripe_customer_id": "cus_1",
        "description": "Usage of 9/2026 é 100 % & more",
        "metadata": {"plan name": "gold = best", "größe": "20 %", "a": "b&c=d"},
    }
)
KEY = charge_key("cust_1", RUN)


@pytest.fixture(scope="module")
def mock_url(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    with stripe_mock.running(Path(tmp_path_factory.mktemp("stripe-mock"))) as url:
        yield url


@pytest.fixture
def vault(vault_starter: VaultStarter, mock_url: str) -> VaultProcess:
    return vault_starter(STRIPE_API_BASE=mock_url, STRIPE_API_KEY="sk_test_123")


def test_the_mock_refuses_what_stripe_would(mock_url: str) -> None:
    reply = urllib3.request(
        "POST",
        f"{mock_url}/v1/payment_intents",
        body="amount=1&currency=usd&surprise=1",
        headers={
            "Authorization": "Bearer sk_test_123",
            "Content-Type": "application/x-www-form-urlencoded",
        },
    )
    assert reply.status == 400


@pytest.mark.parametrize(
    ("endpoint", "method"), [(PAYMENT_INTENTS, "pm_card_visa"), (CHARGES, "src_1")]
)
def test_a_worker_s_create_is_a_valid_one(vault: VaultProcess, endpoint: str, method: str) -> None:
    request = build_request(
        EVENT,
        KEY,
        epoch=0,
        payment_method=method,
        key_id="k",
        namespace="stripe-billing",
        endpoint=endpoint,
    )
    reply = vault.request(
        "POST",
        f"/stripe/v1/{endpoint}",
        key=vault.issue(),
        body=encode_form(request.params),
        headers={
            "Content-Type": "application/x-www-form-urlencoded",
            "Idempotency-Key": request.idempotency_key,
            "Stripe-Version": request.api_version,
        },
    )
    assert (reply.status, reply.forwarded) == (200, "yes"), reply.body
    assert reply.json["object"] == endpoint.removesuffix("s")


def test_reads_and_cancels_are_valid(vault: VaultProcess) -> None:
    key = vault.issue()
    listing = urlencode({"customer": "cus_1", "created[gte]": "1", "limit": "100"})
    for path in (
        f"/v1/payment_intents?{listing}",
        f"/v1/charges?{listing}&starting_after=ch_1",
        "/v1/payment_intents/pi_1",
        "/v1/charges/ch_1",
        "/v1/customers/cus_1",
        "/v1/account",
    ):
        reply = vault.get(key, path)
        assert (reply.status, reply.forwarded) == (200, "yes"), (path, reply.body)
    canceled = vault.request("POST", "/stripe/v1/payment_intents/pi_1/cancel", key=key)
    assert (canceled.status, canceled.forwarded) == (200, "yes"), canceled.body


def test_the_worker_s_form_is_what_the_vault_passes_on() -> None:
    """The vault puts the form together anew: nothing of it may get lost on the way."""
    request = build_request(
        EVENT, KEY, epoch=3, payment_method="pm_1", key_id="k", namespace="stripe-billing"
    )
    form = encode_form(request.params)
    headers = (
        ("Content-Type", "application/x-www-form-urlencoded"),
        ("Idempotency-Key", request.idempotency_key),
    )
    call = understand(Received("POST", f"{PREFIX}/v1/payment_intents", headers, form))
    assert call.body is not None
    assert parse_qsl(call.body.decode()) == parse_qsl(form.decode())
    assert call.money is not None
    assert call.money.attempt_epoch == 3
