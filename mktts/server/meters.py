"""Prometheus metrics of one server; each has its own registry, so that several can live in one process."""

from __future__ import annotations

from prometheus_client import CONTENT_TYPE_LATEST, CollectorRegistry, Counter, Gauge, Histogram, generate_latest
from prometheus_client.process_collector import ProcessCollector

CONTENT_TYPE = CONTENT_TYPE_LATEST
_FIRST_AUDIO_S = (0.005, 0.01, 0.015, 0.02, 0.03, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.5, 1.0, 2.5, 5.0, 10.0)


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

    def page(self) -> bytes:
        return generate_latest(self.registry)
