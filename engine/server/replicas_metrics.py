"""The metrics of several replicas as one page: every sample says of which replica it is."""

from collections.abc import Mapping

from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.core import Metric
from prometheus_client.parser import text_string_to_metric_families
from prometheus_client.registry import Collector

LABEL = "replica"


class _Ready(Collector):
    """Families that have been read already."""

    def __init__(self, families: list[Metric]) -> None:
        self._families = families

    def collect(self) -> list[Metric]:
        return self._families


def merged(pages: Mapping[str, str]) -> dict[str, Metric]:
    """Families by name, from the page (Prometheus' text format) of each replica, its samples labelled with its name."""
    families: dict[str, Metric] = {}
    for replica, page in pages.items():
        for family in text_string_to_metric_families(page):
            mine = families.setdefault(family.name, Metric(family.name, family.documentation, family.type, family.unit))
            for sample in family.samples:
                labels = {LABEL: replica, **sample.labels}
                mine.add_sample(sample.name, labels, sample.value, sample.timestamp, sample.exemplar)
    return families


def page(families: list[Metric]) -> bytes:
    """The text format of these families."""
    registry = CollectorRegistry(auto_describe=False)
    registry.register(_Ready(families))
    return generate_latest(registry)
