"""Prometheus metrics of one server; each has its own registry, so that several can live in one process.

Names and units as https://prometheus.io/docs/practices/naming/ has them: base units (seconds), counters end in _total.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from itertools import accumulate

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest
from prometheus_client.core import GaugeMetricFamily, HistogramMetricFamily, Metric
from prometheus_client.process_collector import ProcessCollector
from prometheus_client.registry import Collector

from mktts.engine.runner import TICK_BOUNDS_S, EngineStats

_FIRST_AUDIO_S = (0.005, 0.01, 0.015, 0.02, 0.03, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.5, 1.0, 2.5, 5.0, 10.0)
_OF_ENGINES = {
    "mktts_streams_listened": ("Streams that need frames in time, by engine.", "listeners"),
    "mktts_streams_waiting": ("Streams that wait for admission, by engine.", "waiting"),
    "mktts_lanes": ("Slots for streams, by engine.", "lanes"),
    "mktts_lanes_used": ("Slots that a stream has, by engine.", "lanes_used"),
    "mktts_pages": ("Pages of keys and values, by engine.", "pages"),
    "mktts_pages_free": ("Pages that are free, by engine.", "pages_free"),
}


class Meters:
    def __init__(self, model: str, backend: str, device: str, random_weights: bool) -> None:
        self.registry = CollectorRegistry()
        ProcessCollector(registry=self.registry)  # resident memory, open files
        info = Gauge(
            "mktts_info",
            "Always 1; the labels say what is served.",
            ("model", "backend", "device", "random_weights"),
            registry=self.registry,
        )
        info.labels(model, backend, device, str(random_weights).lower()).set(1)
        self.open_streams = Gauge("mktts_streams_open", "Streams being generated.", registry=self.registry)
        self.streams = Counter(
            "mktts_streams", "Streams ended, by route and finish reason.", ("route", "reason"), registry=self.registry
        )
        self.refused = Counter("mktts_refused", "Requests refused, by code.", ("code",), registry=self.registry)
        self.audio_s = Counter("mktts_audio_seconds", "Audio handed to connections.", registry=self.registry)
        self.first_audio_s = Histogram(
            "mktts_first_audio_seconds",
            "From the request (or the first text) to the first PCM on the host.",
            ("route",),
            buckets=_FIRST_AUDIO_S,
            registry=self.registry,
        )
        self.first_byte_s = Histogram(
            "mktts_first_byte_seconds",
            "From the request (or the first text) to the first write of sound to the connection.",
            ("route",),
            buckets=_FIRST_AUDIO_S,
            registry=self.registry,
        )
        self.underruns = Counter(
            "mktts_underruns",
            "Writes later than the place of a listener who plays from the first one on, without a prebuffer.",
            registry=self.registry,
        )
        self.late_s = Counter("mktts_late_seconds", "By which those writes were late.", registry=self.registry)

    def watch(
        self, stats: Callable[[], Mapping[str, EngineStats]], capacity: Callable[[], float], behind: Callable[[], int]
    ) -> None:
        """Adds what is asked for at every scrape: the state of the engines, how many listeners are admitted at once,
        and how many streams are behind."""
        self.registry.register(_Engines(stats, capacity, behind))

    def page(self) -> bytes:
        return generate_latest(self.registry)


class _Engines(Collector):
    def __init__(
        self, stats: Callable[[], Mapping[str, EngineStats]], capacity: Callable[[], float], behind: Callable[[], int]
    ) -> None:
        self._stats, self._capacity, self._behind = stats, capacity, behind

    def collect(self) -> Iterable[Metric]:
        yield GaugeMetricFamily(
            "mktts_streams_behind", "Streams whose listeners have played all that went out.", self._behind()
        )
        yield GaugeMetricFamily("mktts_capacity", "Listeners that are admitted at once.", self._capacity())
        stats = self._stats()
        for name, (text, field) in _OF_ENGINES.items():
            family = GaugeMetricFamily(name, text, labels=("engine",))
            for engine, one in stats.items():
                family.add_metric((engine,), getattr(one, field))
            yield family
        ticks = HistogramMetricFamily("mktts_tick_seconds", "Ticks, on the device, by engine.", labels=("engine",))
        for engine, one in stats.items():
            counts = list(accumulate(list(one.ticks.counts)))
            bounds = [*map(str, TICK_BOUNDS_S), "+Inf"]
            ticks.add_metric((engine,), list(zip(bounds, counts, strict=True)), one.ticks.sum_s)
        yield ticks

    def describe(self) -> Iterable[Metric]:
        return ()  # nothing is asked for before a scrape
