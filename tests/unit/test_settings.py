"""Settings: read once, checked at start, and named when they are wrong."""

from __future__ import annotations

import pytest

from models.errors import ConfigurationError
from models.limits import FAST_LIMITS, Limits, check_limits
from models.money import MAX_TOTAL_CENTS
from models.settings import Settings, load_settings


def test_without_anything_set_the_defaults_stand() -> None:
    settings = load_settings({})
    assert settings.nsq_topic == "billing-events"
    assert settings.nsq_channel == "stripe-processor"
    assert (settings.redis_stream, settings.redis_group) == ("billing-stream", "billing-group")
    assert settings.limits == Limits()
    assert settings.warnings == ()


def test_the_default_and_the_fast_limits_hold_their_own_inequalities() -> None:
    assert check_limits(Limits()) == ()
    assert check_limits(FAST_LIMITS) == ()
    assert load_settings({"LIMITS": "fast"}).limits == FAST_LIMITS


@pytest.mark.parametrize(
    ("environ", "names"),
    [
        ({"CALL_S": "40"}, ("PREPARATION_S + CALL_S", "SOFT_LIMIT_S")),
        ({"SOFT_LIMIT_S": "43"}, ("SOFT_LIMIT_S", "HARD_LIMIT_S")),
        ({"HARD_LIMIT_S": "45"}, ("HARD_LIMIT_S", "LEASE_S")),
        ({"LEASE_S": "43"}, ("HARD_LIMIT_S", "LEASE_S")),
        ({"PROOF_OF_ABSENCE_S": "125"}, ("LEASE_S + VAULT_UPSTREAM_S", "PROOF_OF_ABSENCE_S")),
        ({"RESEND_WINDOW_S": "82801"}, ("RESEND_WINDOW_S", "MAX_RESEND_WINDOW_S")),
    ],
)
def test_limits_that_guard_money_are_refused_by_both_names(
    environ: dict[str, str], names: tuple[str, str]
) -> None:
    with pytest.raises(ConfigurationError) as refused:
        load_settings(environ)
    assert all(name in str(refused.value) for name in names)
    assert "\n" not in str(refused.value)
    assert load_settings(environ | {"LIMITS_CHECK": "warn"}).warnings


@pytest.mark.parametrize(
    ("environ", "names"),
    [
        ({"MSG_TIMEOUT_S": "45"}, ("LEASE_S", "MSG_TIMEOUT_S")),
        ({"MIN_IDLE_S": "45"}, ("LEASE_S", "MIN_IDLE_S")),
        ({"TOUCH_S": "30"}, ("TOUCH_S", "MSG_TIMEOUT_S")),
        ({"VISIBILITY_TIMEOUT_S": "43"}, ("HARD_LIMIT_S", "VISIBILITY_TIMEOUT_S")),
    ],
)
def test_limits_that_only_waste_work_are_warned_about(
    environ: dict[str, str], names: tuple[str, str]
) -> None:
    warnings = load_settings(environ).warnings
    assert any(all(name in warning for name in names) for warning in warnings)


@pytest.mark.parametrize(
    ("environ", "name"),
    [
        ({"LEASE_S": "soon"}, "LEASE_S"),
        ({"LEASE_S": "-1"}, "LEASE_S"),
        ({"LEASE_S": "nan"}, "LEASE_S"),
        ({"LEASE_S": "inf"}, "LEASE_S"),
        ({"TOUCH_S": "nan"}, "TOUCH_S"),
        ({"TOUCH_S": "inf"}, "TOUCH_S"),
        ({"CHARGE_NAMESPACE": "a:b"}, "CHARGE_NAMESPACE"),
        ({"MAX_CLAIMS": "0"}, "MAX_CLAIMS"),
        ({"MAX_AMOUNT_CENTS": "1e3"}, "MAX_AMOUNT_CENTS"),
        ({"MAX_AMOUNT_CENTS": "0"}, "MAX_AMOUNT_CENTS must be from 1 to"),
        ({"MAX_AMOUNT_CENTS": "-5"}, "MAX_AMOUNT_CENTS must be from 1 to"),
        ({"MAX_AMOUNT_CENTS": str(MAX_TOTAL_CENTS + 1)}, "MAX_AMOUNT_CENTS must be from 1 to"),
        ({"POLL_FOR_S": "1e300"}, "POLL_FOR_S must be a number above 0 and up to"),
        ({"DATABASE_POOLED": "maybe"}, "DATABASE_POOLED"),
        ({"LIMITS": "quick"}, "LIMITS"),
        ({"VAULT_MODE": "on"}, "VAULT_MODE"),
    ],
)
def test_a_value_that_cannot_be_read_is_one_line_that_names_the_setting(
    environ: dict[str, str], name: str
) -> None:
    with pytest.raises(ConfigurationError, match=name) as refused:
        load_settings(environ)
    assert "\n" not in str(refused.value)


def test_a_missing_setting_is_named() -> None:
    with pytest.raises(ConfigurationError, match=r"^NSQD_TCP_ADDRESS is not set$"):
        load_settings({}).require("nsq_topic", "nsqd_tcp_address")


def test_a_secret_is_not_shown_when_settings_are_printed() -> None:
    marker = "marker-of-a-secret"
    names = (
        "DATABASE_URL",
        "CELERY_BROKER_URL",
        "REDIS_URL",
        "STRIPE_API_KEY",
        "VAULT_ADMIN_KEY",
        "FLOWER_BASIC_AUTH",
        "NSQ_AUTH_SECRET",
    )
    secret = dict.fromkeys(names, f"redis://user:{marker}@host")
    secret["DATABASE_URL"] = f"postgresql://user:{marker}@host/x"
    settings = load_settings(secret)
    assert isinstance(settings, Settings)
    assert marker not in repr(settings)
    with pytest.raises(ConfigurationError) as refused:
        load_settings({"LEASE_S": marker})
    assert marker not in str(refused.value)
