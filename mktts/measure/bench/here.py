"""`python -m mktts bench`: timings for people as a table, then for programs as one line of JSON.

The last line of standard output is one compact JSON document: `environment`, `settings`, and `figures`, a map
name -> {median, p95, min, max, n, unit}. What the names mean stands in mktts.measure.metrics; all streams run warm.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import time
from collections import defaultdict
from typing import TYPE_CHECKING, Any

from mktts.checkpoint.arguments import add_model_arguments, loading
from mktts.checkpoint.random import RANDOM_WEIGHTS
from mktts.common import python_path, write_json
from mktts.errors import BackendUnavailable, MkttsError
from mktts.measure.bench import runner as bench_peers
from mktts.measure.bench.sections import CODEC_CHUNKS_FRAMES, CODEC_WARM_UP_FRAMES
from mktts.measure.environment import environment
from mktts.measure.metrics import percentiles
from mktts.spec import CODEBOOK_SIZE, FRAME_MS, NUM_CODEBOOKS
from mktts.speech.metrics import summarise

if TYPE_CHECKING:
    from mktts.checkpoint import Checkpoint
    from mktts.synth import Synthesizer

TEXT = "The quick brown fox jumps over the lazy dog, and the dog does not mind at all."
CHECKPOINT = "random:tiny"
FULL_CODEC = "random:tiny:custom_voice:full-codec"

# Runs in a process of its own, so that the peak is that of loading and nothing else.
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

EXAMPLES = """examples:
  python -m mktts bench
  python -m mktts bench --codec full --repeats 10
  python -m mktts bench --checkpoint random:0.6b --load-only
  python -m mktts bench --peers --output bench.json
  python -m mktts bench --checkpoint path/to/checkpoint --backend torch --device cuda | tail -1 > bench.json"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_model_arguments(parser, checkpoint=None)
    parser.epilog = f"{parser.epilog}\n\nWithout --checkpoint: {CHECKPOINT}, with --peers {bench_peers.CHECKPOINT}."
    parser.add_argument("--frames", type=_positive, default=50, help=f"of {FRAME_MS:.0f} ms, per stream (default: 50)")
    parser.add_argument("--repeats", type=_positive, default=5, help="measured streams (default: 5)")
    parser.add_argument("--text", default=TEXT, help="what is said")
    parser.add_argument("--speaker", help="a speaker of the checkpoint (default: its first)")
    parser.add_argument(
        "--codec",
        choices=("checkpoint", "full"),
        default="checkpoint",
        help="codec timed by itself: the checkpoint's, or one of released size with random weights",
    )
    only = parser.add_mutually_exclusive_group()
    only.add_argument("--load-only", action="store_true", help="only load time and peak memory, in a fresh process")
    only.add_argument("--codec-only", action="store_true", help="only the codec by itself")
    parser.add_argument("--json-only", action="store_true", help="no table")
    bench_peers.add_arguments(parser)


def main(arguments: argparse.Namespace) -> int:
    """Measures what the arguments ask for and prints it."""
    import torch

    from mktts.checkpoint import open_checkpoint

    if arguments.device == "auto":
        arguments.device = "cuda" if torch.cuda.is_available() else "cpu"
    if arguments.peers:
        arguments.checkpoint = arguments.checkpoint or bench_peers.CHECKPOINT
        return bench_peers.main(arguments)
    arguments.checkpoint = arguments.checkpoint or CHECKPOINT
    checkpoint = open_checkpoint(arguments.checkpoint, arguments.revision)  # a random one is made here, unmeasured
    chosen = {name: getattr(arguments, name) for name in ("backend", "device", "dtype")}
    figures: dict[str, dict[str, Any]] = {}
    settings: dict[str, Any] = {
        "checkpoint": arguments.checkpoint,
        "model": f"{checkpoint.config.model_size} {checkpoint.config.model_type}",
        "random_weights": checkpoint.is_random,
        **chosen,
    }
    if not arguments.codec_only:
        figures |= measure_load(checkpoint, chosen)
    if not arguments.load_only:
        codec_checkpoint = open_checkpoint(FULL_CODEC) if arguments.codec == "full" else checkpoint
        settings |= {"codec": arguments.codec, "codec_random_weights": codec_checkpoint.is_random}
        if not arguments.codec_only:
            streams, used = _measure_streams(arguments, checkpoint)
            figures |= streams
            settings |= used
        figures |= measure_codec(codec_checkpoint, settings["device"], arguments.repeats)
    document = {"environment": environment(), "settings": settings, "figures": figures}
    if arguments.output:
        write_json(arguments.output, document)
    if not arguments.json_only:
        print(table(document))
    print(json.dumps(document, sort_keys=True, allow_nan=False, separators=(",", ":")))
    return 0


def measure_load(checkpoint: Checkpoint, chosen: dict[str, str | None]) -> dict[str, dict[str, Any]]:
    """Loads a synthesizer in a fresh process: seconds (files in the page cache), and peak resident bytes of the
    process after its imports, after loading, and after a first utterance."""
    command = [sys.executable, "-c", LOAD, str(checkpoint.folder), json.dumps(list(chosen.values()))]
    done = subprocess.run(
        command, capture_output=True, text=True, stdin=subprocess.DEVNULL, env={**os.environ, **python_path()}
    )
    if done.returncode:
        raise BackendUnavailable(f"loading in a fresh process failed: {done.stderr.strip().splitlines()[-1:]}")
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


def measure_codec(checkpoint: Checkpoint, device: str, repeats: int) -> dict[str, dict[str, Any]]:
    """Decodes random codes in chunks of 1, 2, 4 and 8 frames, fp32, from codes to PCM, both on the host.

    With the decoder that a synthesizer uses on `device`: on CUDA, captured graphs.
    """
    import torch

    from mktts.codec.graphs import codec_for, to_host

    decoder = codec_for(checkpoint.codec_config, checkpoint.codec_tensors(), device)
    size = min(CODEBOOK_SIZE, checkpoint.codec_config.codebook_size)
    codes = torch.randint(size, (CODEC_WARM_UP_FRAMES, NUM_CODEBOOKS), generator=torch.Generator().manual_seed(0))
    figures = {}
    for frames in CODEC_CHUNKS_FRAMES:
        state = decoder.start()
        for start in range(0, CODEC_WARM_UP_FRAMES, frames):
            to_host(decoder.decode(codes[start : start + frames], state))
        times_ms = []
        for _ in range(4 * repeats):
            start_s = time.perf_counter()
            to_host(decoder.decode(codes[:frames], state))
            times_ms.append(1_000 * (time.perf_counter() - start_s) / frames)
        figures[f"codec_chunk_{frames}_ms_per_frame"] = _figure(times_ms, "ms")
    return figures


def table(document: dict[str, Any]) -> str:
    """The document as people read it."""
    machine, settings = document["environment"], document["settings"]
    hardware = machine["gpu"] if settings["device"].startswith("cuda") else machine["cpu"]
    lines = [
        f"{hardware}, {machine['cpu_cores']} cores, torch {machine['torch']}",
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


def _measure_streams(arguments: argparse.Namespace, checkpoint: Checkpoint) -> tuple[dict[str, Any], dict[str, Any]]:
    from mktts.synth import Synthesizer

    if checkpoint.config.model_type == "base":
        raise MkttsError(
            "bench streams need a custom_voice or voice_design checkpoint; for base use --load-only or --codec-only"
        )
    speaker = arguments.speaker or next(iter(checkpoint.config.speakers), None)
    with Synthesizer.load(checkpoint, **loading(arguments)) as loaded:
        figures = measure_streams(loaded, arguments.text, speaker, arguments.frames, arguments.repeats)
        used = {
            "backend": loaded.backend_name,
            "device": str(loaded.device),
            "dtype": str(loaded.dtype).removeprefix("torch."),
        }
    return figures, {**used, "speaker": speaker, "text": arguments.text, "frames": arguments.frames}


def _figure(values: list[float], unit: str) -> dict[str, Any]:
    return {**percentiles(values), "unit": unit}


def _positive(text: str) -> int:
    value = int(text)
    if value < 1:
        raise argparse.ArgumentTypeError(f"expected at least 1, found {value}")
    return value
