"""What the vault counts. No label holds a key, a customer or a run: those are in the database."""

from __future__ import annotations

from typing import Final

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest

CONTENT_TYPE: Final = "text/plain; version=0.0.4; charset=utf-8"
_SECONDS: Final = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 80)


class Metrics:
    """The counters of one vault process, in a registry of its own."""

    def __init__(self) -> None:
        self.registry = CollectorRegistry()
        self.requests = Counter(
            "vault_requests",
            "Requests by call, and whether they were forwarded",
            ("call", "forwarded", "status"),
            registry=self.registry,
        )
        self.refusals = Counter(
            "vault_refusals", "Requests not passed on, by reason", ("code",), registry=self.registry
        )
        self.holds = Counter(
            "vault_holds", "Holds by the state they went to", ("state",), registry=self.registry
        )
        self.alarms = Counter(
            "vault_alarms",
            "Things that must be looked at: late_success, double_charge, uncommitted_outcome",
            ("alarm",),
            registry=self.registry,
        )
        self.failed_logins = Counter(
            "vault_failed_authentications", "Unknown keys and bearers", registry=self.registry
        )
        self.in_flight = Gauge(
            "vault_in_flight", "Requests being forwarded now", registry=self.registry
        )
        self.upstream_s = Histogram(
            "vault_upstream_seconds",
            "Time of Stripe's answers",
            registry=self.registry,
            buckets=_SECONDS,
        )
        self.hold_s = Histogram(
            "vault_hold_seconds",
            "Time to take a hold and commit that it is sent",
            registry=self.registry,
            buckets=_SECONDS,
        )
        for alarm in ("late_success", "double_charge", "uncommitted_outcome"):
            self.alarms.labels(alarm)

    def page(self) -> bytes:
        """All of them in the text format of Prometheus."""
        return bytes(generate_latest(self.registry))
