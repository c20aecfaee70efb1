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
    """Metrics that were read at one time, with the model's name for clients."""

    def __init__(self, metrics: Iterable[Metric], model_name: str) -> None:
        self._metrics, self._model_name = list(metrics), model_name

    def collect(self) -> Iterator[Any]:
        """Each metric of one name with all its labels."""
        families: dict[str, Any] = {}
        for metric in self._metrics:
            _add(families, metric, {**metric.labels, "model_name": self._model_name})
        yield from families.values()


def metrics_text(metrics: Iterable[Metric], model_name: str) -> bytes:
    """The text for Prometheus; the label `model_name` is the given one, as in vLLM's server."""
    registry = CollectorRegistry(auto_describe=False)
    registry.register(Collected(metrics, model_name))
    return generate_latest(registry)


def _add(families: dict[str, Any], metric: Metric, labels: dict[str, str]) -> None:
    names, values = list(labels), list(labels.values())
    text = metric.name.partition(":")[2].replace("_", " ")
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
