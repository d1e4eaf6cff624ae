"""Timings of one checkpoint on this machine: loading, streams through the synthesizer, and the codec by itself.

Every figure is {median, p95, p99, min, max, n, unit}. What the names mean stands in mktts.measure.metrics; all streams
run warm.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections import defaultdict
from typing import TYPE_CHECKING, Any

from mktts.checkpoint.random import RANDOM_WEIGHTS
from mktts.common import python_path
from mktts.errors import BackendUnavailable, MkttsError
from mktts.measure.bench.codec import codec_ms
from mktts.measure.environment import head
from mktts.measure.metrics import percentiles
from mktts.speech.metrics import summarise

if TYPE_CHECKING:
    import torch

    from mktts.checkpoint import Checkpoint
    from mktts.synth import Synthesizer

TEXT = "The quick brown fox jumps over the lazy dog, and the dog does not mind at all."
CHECKPOINT = "random:tiny"
FULL_CODEC = "random:tiny:custom_voice:full-codec"

STREAM_UNITS = {
    "ttfc_ms": "ms",
    "audible_ttfc_ms": "ms",
    "rtf": "compute s / audio s",
    "audio_s": "s",
    "prefill_ms": "ms",
    "talker_ms_per_frame": "ms",
    "predictor_ms_per_frame": "ms",
    "codec_ms_per_frame": "ms",
    "underruns": "count",
}

# Runs in a fresh process, so that the peak is that of loading and nothing else.
LOAD = """
import json, sys, time
import torch
from mktts.measure.environment import peak_rss_bytes
from mktts.synth import Synthesizer
imported_bytes, start_s = peak_rss_bytes(), time.perf_counter()
backend, device, dtype = json.loads(sys.argv[2])
synthesizer = Synthesizer.load(sys.argv[1], backend=backend, device=device, dtype=dtype and getattr(torch, dtype))
load_s, loaded_bytes = time.perf_counter() - start_s, peak_rss_bytes()
synthesizer.warm_up()  # memory-mapped weights count once they have been read: this reads them all
print(json.dumps({"load_s": load_s, "import_peak_rss_bytes": imported_bytes, "load_peak_rss_bytes": loaded_bytes,
                  "warm_peak_rss_bytes": peak_rss_bytes()}))
"""


def measure(
    checkpoint: Checkpoint,
    loading: dict[str, Any],
    *,
    text: str = TEXT,
    speaker: str | None = None,
    frames: int = 50,
    repeats: int = 5,
    full_codec: bool = False,
    parts: tuple[str, ...] = ("load", "streams", "codec"),
) -> dict[str, Any]:
    """The document: device, driver, torch, revision, date, environment, settings, figures.

    loading: keyword arguments of Synthesizer.load: backend, device, dtype. full_codec: times a codec of released size
    with random weights in place of the checkpoint's. Raises MkttsError for a checkpoint that cannot speak by itself.
    """
    from mktts.checkpoint import open_checkpoint
    from mktts.codec.graphs import codec_for
    from mktts.model.backend import device_named

    where, dtype = device_named(loading["device"]), loading["dtype"]
    settings: dict[str, Any] = {
        "model": f"{checkpoint.config.model_size} {checkpoint.config.type.name}",
        "random_weights": checkpoint.is_random,
        "backend": loading["backend"],
        "device": str(where),
        "dtype": None if dtype is None else _named(dtype),
    }
    figures: dict[str, dict[str, Any]] = {}
    if "load" in parts:
        figures |= measure_load(checkpoint, settings["backend"], settings["device"], settings["dtype"])
    if "streams" in parts:
        streams, used = _streams(checkpoint, loading | {"device": where}, text, speaker, frames, repeats)
        figures |= streams
        settings |= used
    if "codec" in parts:
        timed = open_checkpoint(FULL_CODEC) if full_codec else checkpoint
        settings |= {"codec": "full" if full_codec else "checkpoint", "codec_random_weights": timed.is_random}
        decoder = codec_for(timed.codec_config, timed.codec_tensors(), where)
        figures |= {name: _figure(times, "ms") for name, times in codec_ms(decoder, 4 * repeats).items()}
    return {**head(settings["device"]), "settings": settings, "figures": figures}


def measure_load(checkpoint: Checkpoint, backend: str, device: str, dtype: str | None) -> dict[str, dict[str, Any]]:
    """Loads a synthesizer in a fresh process: seconds (files in the page cache), and peak resident bytes of the
    process after its imports, after loading, and after a first utterance."""
    command = [sys.executable, "-c", LOAD, str(checkpoint.folder), json.dumps([backend, device, dtype])]
    done = subprocess.run(
        command, capture_output=True, text=True, stdin=subprocess.DEVNULL, env={**os.environ, **python_path()}
    )
    if done.returncode:
        messages = done.stderr.strip().splitlines() or [f"exit status {done.returncode}"]
        raise BackendUnavailable(f"loading in a fresh process failed: {messages[-1]}")
    values = json.loads(done.stdout.splitlines()[-1])
    return {name: _figure([value], "s" if name == "load_s" else "bytes") for name, value in values.items()}


def measure_streams(
    synthesizer: Synthesizer, text: str, speaker: str | None, frames: int, repeats: int
) -> dict[str, dict[str, Any]]:
    """Streams `text` `repeats` times, seeds 0, 1, ...; every stream makes `frames` frames or ends by itself."""
    from mktts.speech.guard import Guard
    from mktts.speech.options import StreamOptions

    found: dict[str, list[float]] = defaultdict(list)
    never_audible = 0
    options = StreamOptions(guard=Guard.off())  # random weights never end; the frame count does
    synthesizer.warm_up()
    for seed in range(repeats):
        stream = synthesizer.stream(text, speaker=speaker, seed=seed, max_frames=frames, options=options)
        metrics = summarise(list(stream))
        never_audible += metrics.audible_ttfc_ms is None
        for name in STREAM_UNITS:
            value = getattr(metrics, name)
            if value is not None:
                found[name].append(value)
    figures = {name: _figure(values, STREAM_UNITS[name]) for name, values in found.items()}
    return figures | {"never_audible": _figure([never_audible], "streams")}


def _streams(
    checkpoint: Checkpoint, loading: dict[str, Any], text: str, speaker: str | None, frames: int, repeats: int
) -> tuple[dict[str, Any], dict[str, Any]]:
    from mktts.synth import Synthesizer

    if checkpoint.config.type.clones:
        raise MkttsError(
            "bench streams need a custom_voice or voice_design checkpoint; for base use --load-only or --codec-only"
        )
    speaker = speaker or checkpoint.config.default_speaker
    with Synthesizer.load(checkpoint, **loading) as loaded:
        figures = measure_streams(loaded, text, speaker, frames, repeats)
        used = {"backend": loaded.backend_name, "device": str(loaded.device), "dtype": _named(loaded.dtype)}
    return figures, {**used, "speaker": speaker, "text": text, "frames": frames}


def table(document: dict[str, Any]) -> str:
    """The document as people read it."""
    machine, settings = document["environment"], document["settings"]
    lines = [
        f"{document['device']}, {machine['cpu_cores']} cores, torch {machine['torch']}",
        ", ".join(
            f"{name} {settings[name]}"
            for name in ("checkpoint", "backend", "device", "dtype", "codec")
            if settings.get(name)
        ),
    ]
    if settings["random_weights"] or settings.get("codec_random_weights"):
        lines.append(RANDOM_WEIGHTS)
    lines += ["", f"{'':32}{'median':>12}{'p95':>12}{'n':>5}  unit"]
    for name, figure in document["figures"].items():
        scale, unit, digits = (2**20, "MiB", 0) if figure["unit"] == "bytes" else (1, figure["unit"], 3)
        median, p95 = (f"{figure[key] / scale:,.{digits}f}" for key in ("median", "p95"))
        lines.append(f"{name.removesuffix('_bytes'):32}{median:>12}{p95:>12}{figure['n']:>5}  {unit}")
    return "\n".join(lines)


def _figure(values: list[float], unit: str) -> dict[str, Any]:
    return {**percentiles(values), "unit": unit}


def _named(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
