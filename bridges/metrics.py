"""The metrics page of a bridge. No label holds a key, a customer, an id or an address."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Final

from prometheus_client import generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from bridges.counters import DEAD_LETTER_REASON

if TYPE_CHECKING:
    from bridges.bridge import Bridge

CONTENT_TYPE: Final = "text/plain; version=0.0.4; charset=utf-8"
_PREFIX: Final = "chargebridge_bridge_"
DISPOSITIONS: Final[Mapping[str, tuple[str, ...]]] = {
    "ack": ("acked",),
    "park": ("parked",),
    "requeue": ("handed_back", "requeued_before_timeout", "overflow"),
    "dead_letter": ("dead_letters",),
}
"""Which counts make up each disposition. A dead letter is acked once it is committed, so it
counts as both."""
SINGLE: Final[Mapping[str, tuple[str, tuple[str, ...]]]] = {
    "taken": ("Deliveries taken from the broker", ("taken",)),
    "redeliveries": (
        "Deliveries that the broker had delivered before",
        ("redelivered", "redelivered_while_held", "taken_again"),
    ),
    "renewals": ("Leases on deliveries that were extended", ("renewed",)),
    "late_acks": (
        "Acks of deliveries that were no longer held here, or had nobody to hear them",
        ("E_FIN_FAILED", "ack_of_unowned", "answer_without_connection"),
    ),
    "published": ("Events handed to the workers", ("published",)),
}


class BridgeCollector(Collector):
    """Reads the counters when somebody asks for the page, and costs nothing before."""

    def __init__(self, bridge: Bridge) -> None:
        self._bridge = bridge

    def collect(self) -> Iterator[Metric]:
        """Every metric of the bridge but its histogram."""
        counters, source = self._bridge.counters, self._bridge.source.name
        deliveries = CounterMetricFamily(
            f"{_PREFIX}deliveries",
            "Deliveries by source and what was done with them",
            labels=("source", "disposition"),
        )
        for disposition, names in DISPOSITIONS.items():
            deliveries.add_metric((source, disposition), sum(counters[n] for n in names))
        yield deliveries
        for name, (text, names) in SINGLE.items():
            family = CounterMetricFamily(f"{_PREFIX}{name}", text, labels=("source",))
            family.add_metric((source,), sum(counters[n] for n in names))
            yield family
        yield from self._by_name(source, counters.snapshot())
        yield from self._gauges(source)

    def _by_name(self, source: str, counts: Mapping[str, int]) -> Iterator[Metric]:
        letters = CounterMetricFamily(
            f"{_PREFIX}dead_letters", "Dead letters by reason", labels=("source", "reason")
        )
        others = CounterMetricFamily(
            f"{_PREFIX}events", "Everything counted, by its name", labels=("source", "event")
        )
        for name, count in counts.items():
            if name.startswith(DEAD_LETTER_REASON):
                letters.add_metric((source, name.removeprefix(DEAD_LETTER_REASON)), count)
            else:
                others.add_metric((source, name), count)
        yield letters
        yield others

    def _gauges(self, source: str) -> Iterator[Metric]:
        bridge = self._bridge
        gauges = {
            "in_flight": ("Deliveries held now", len(bridge.held)),
            "in_flight_limit": ("Deliveries that may be held", bridge.held.limit),
            "parked": ("Parked deliveries that are watched", len(bridge.parked)),
            "queue_full": (
                "1 while nothing is published because the task queue is full",
                int(bridge.dispatcher.paused),
            ),
            "charging_behind": (
                "1 while next to nothing is published because no record settles",
                int(bridge.dispatcher.behind),
            ),
            "no_sweep": (
                "1 while records are due and no sweep hands them out",
                int(bridge.sweep_watch.missing),
            ),
        }
        for name, (text, value) in gauges.items():
            family = GaugeMetricFamily(f"{_PREFIX}{name}", text, labels=("source",))
            family.add_metric((source,), value)
            yield family


def page(bridge: Bridge) -> bytes:
    """All metrics in the text format of Prometheus."""
    return bytes(generate_latest(bridge.counters.registry))
