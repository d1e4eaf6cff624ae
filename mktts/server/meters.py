"""Prometheus metrics of one server; each has its own registry, so that several can live in one process. Names and units
as https://prometheus.io/docs/practices/naming/ has them: base units (seconds), counters end in _total."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from functools import partial
from itertools import accumulate

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest
from prometheus_client.core import GaugeMetricFamily, HistogramMetricFamily, Metric
from prometheus_client.process_collector import ProcessCollector
from prometheus_client.registry import Collector

from mktts.engine.runner import TICK_BOUNDS_S, EngineStats
from mktts.server.schemas import StreamState

_FIRST_AUDIO_S = (0.005, 0.01, 0.015, 0.02, 0.03, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.5, 1.0, 2.5, 5.0, 10.0)
_OF_ENGINES = {
    "mktts_streams_listened": ("Streams that need frames in time, by engine.", "listeners"),
    "mktts_streams_waiting": ("Streams that wait for admission, by engine.", "waiting"),
    "mktts_lanes": ("Slots for streams, by engine.", "lanes"),
    "mktts_lanes_used": ("Slots that a stream has, by engine.", "lanes_used"),
    "mktts_pages": ("Pages of keys and values, by engine.", "pages"),
    "mktts_pages_free": ("Pages that are free, by engine.", "pages_free"),
}


class Meters(Collector):
    """labels: what is served. stats, capacity, streams_open: asked at every scrape: the state of the engines, how many
    listeners are admitted at once, and how many streams there are."""

    def __init__(
        self,
        labels: Mapping[str, str],
        stats: Callable[[], Mapping[str, EngineStats]],
        capacity: Callable[[], float],
        streams_open: Callable[[], float],
    ) -> None:
        self._registry = registry = CollectorRegistry()
        counter, gauge = partial(Counter, registry=registry), partial(Gauge, registry=registry)
        seconds = partial(Histogram, labelnames=("route",), buckets=_FIRST_AUDIO_S, registry=registry)
        since = "From the request (or the first text) to the first"
        ProcessCollector(registry=registry)  # resident memory, open files
        gauge("mktts_info", "Always 1; the labels say what is served.", tuple(labels)).labels(**labels).set(1)
        gauge("mktts_capacity", "Listeners that are admitted at once.").set_function(capacity)
        gauge("mktts_streams_open", "Streams being generated.").set_function(streams_open)
        self._streams = counter("mktts_streams", "Streams ended, by route and finish reason.", ("route", "reason"))
        self._refused = counter("mktts_refused", "Requests refused, by code.", ("code",))
        self._audio_s = counter("mktts_audio_seconds", "Audio handed to connections.")
        self._first_audio_s = seconds("mktts_first_audio_seconds", f"{since} PCM on the host.")
        self.first_byte_s = seconds("mktts_first_byte_seconds", f"{since} write of sound to the connection.")
        self.underruns = counter(
            "mktts_underruns",
            "Writes later than the place of a listener who plays from the first one on, without a prebuffer.",
        )
        self.late_s = counter("mktts_late_seconds", "By which those writes were late.")
        self._stats = stats
        registry.register(self)

    def refuse(self, code: str) -> None:
        self._refused.labels(code).inc()

    def count(self, state: StreamState) -> None:
        """Counts a stream that has ended; one that found no place was refused, and was none."""
        if state.error is not None and state.error.code == "busy":
            return
        self._streams.labels(state.route, state.finish_reason).inc()
        self._audio_s.inc(state.audio_s)
        if state.first_audio_ms is not None:
            self._first_audio_s.labels(state.route).observe(state.first_audio_ms / 1_000)

    def page(self) -> bytes:
        return generate_latest(self._registry)

    def collect(self) -> Iterable[Metric]:
        """The state of the engines."""
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
