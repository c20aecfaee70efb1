"""The engine's metrics in Prometheus's text format."""

from collections.abc import Iterable, Iterator
from typing import Any

from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.core import (
    CounterMetricFamily,
    GaugeMetricFamily,
    HistogramMetricFamily,
)
from prometheus_client.registry import Collector

from nanovllm.metrics import Counter, Gauge, Histogram, Metric, Vector


class Collected(Collector):
    """Metrics that were read at one time."""

    def __init__(self, metrics: Iterable[Metric]) -> None:
        self._metrics = list(metrics)

    def collect(self) -> Iterator[Any]:
        """Each metric of one name with all its labels."""
        families: dict[str, Any] = {}
        for metric in self._metrics:
            _add(families, metric)
        yield from families.values()


def metrics_text(metrics: Iterable[Metric]) -> bytes:
    """What Prometheus reads."""
    registry = CollectorRegistry(auto_describe=False)
    registry.register(Collected(metrics))
    return generate_latest(registry)


def _add(families: dict[str, Any], metric: Metric) -> None:
    names, values = list(metric.labels), list(metric.labels.values())
    text = metric.name.removeprefix("vllm:").replace("_", " ")
    if isinstance(metric, Histogram):
        family = families.setdefault(
            metric.name, HistogramMetricFamily(metric.name, text, labels=names)
        )
        family.add_metric(values, list(metric.buckets.items()), metric.sum)
    elif isinstance(metric, Vector):
        family = families.setdefault(
            metric.name, CounterMetricFamily(metric.name, text, labels=[*names, "position"])
        )
        for position, value in enumerate(metric.values):
            family.add_metric([*values, str(position)], value)
    elif isinstance(metric, Counter):
        family = families.setdefault(
            metric.name, CounterMetricFamily(metric.name, text, labels=names)
        )
        family.add_metric(values, metric.value)
    else:
        assert isinstance(metric, Gauge)
        family = families.setdefault(
            metric.name, GaugeMetricFamily(metric.name, text, labels=names)
        )
        family.add_metric(values, metric.value)
