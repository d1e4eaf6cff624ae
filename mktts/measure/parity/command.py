"""`python -m mktts parity CHECKPOINT`: proves a checkpoint on this machine, and writes one file that can be sent.

The file and the last line of standard output are the same JSON document: the machine, and for every checkpoint its
`sections` with status ("passed", "failed", "skipped"), reason, seconds and figures, beside the kernel's comparisons
(mktts.measure.parity.kernel) and the batched frame's, `batch` (mktts.measure.parity.batch). No path of this machine is
in it.

* prompt: prompt embeddings, bit for bit upstream's.
* codes: codes of PyTorch in bf16, and in fp32 where time allows, frame for frame upstream's: greedy and drawn.
* codec: see `codec.codec_section`.

Upstream runs on the CPU, and so does what must equal it bit for bit: there the same operators round in the same way.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import math
import re
import sys
import time
import traceback
from collections.abc import Callable, Sequence
from dataclasses import asdict, replace
from functools import lru_cache, partial
from pathlib import Path
from typing import Any

import torch

from mktts.checkpoint import SOURCES, Checkpoint, open_checkpoint
from mktts.checkpoint.random import RANDOM_WEIGHTS
from mktts.common import write_json
from mktts.errors import BackendUnavailable, MetricsError
from mktts.measure.environment import head, provided_by, versions
from mktts.measure.machine import batch_missing, kernel_missing
from mktts.measure.parity.codec import codec_section
from mktts.measure.parity.kernel import MARGIN, Scope, outcome, parity_of
from mktts.measure.parity.ratio import LIMIT, Budget
from mktts.measure.parity.upstream import (
    DTYPES,
    Row,
    compare_expected,
    compare_prompts,
    standard_requests,
    upstream_codes,
)
from mktts.model.backend import device_named
from mktts.synth.upstream import load_upstream

OUTPUT = Path("mktts-parity.json")
PARTS = ("prompt", "codes", "codec", "kernel", "batch", "text")
DEFAULT_PARTS = PARTS[:-1]
CODES_FRAMES = 24  # of one request
CODES_REQUESTS = 3  # greedy, and as many drawn
SEED = 7
SCOPE = Scope()  # where time allows
# How the minutes are shared. They run in this order: the codec uses the upstream model that the prompts left loaded.
_SHARES = {"prompt": 1, "codec": 2, "codes": 5, "kernel": 6, "batch": 6}
_ON_DEVICE = ("kernel", "batch", "text")
_PACKAGES = ("mktts", "qwen-tts", "qwen-tts-hf", "transformers", "tokenizers", "triton")
_CONFIGS = ("config.json", "generation_config.json", "speech_tokenizer/config.json")
# A path from the root: its folders, as far as the last separator. Addresses (https://...) are none.
_FOLDERS = re.compile(r"(?<![\w.:/\\])(?:~|[A-Za-z]:)?[\\/](?:[^\s\\/:'\",()\[\]]+[\\/])+")

EXAMPLES = """examples:
  python -m mktts parity Qwen/Qwen3-TTS-12Hz-0.6B-CustomVoice
  python -m mktts parity path/to/checkpoint --minutes 10 --output parity.json
  python -m mktts parity random:tiny --parts prompt,codes

Exit status: 0 where all that ran passed (what was skipped says why), 1 where something failed or nothing could run."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("checkpoint", metavar="CHECKPOINT", nargs="+", help=SOURCES)
    parser.add_argument("--revision", help="of a Hub id")
    parser.add_argument(
        "--parts", metavar="PART,...", help=f"of {','.join(PARTS)} (default: {','.join(DEFAULT_PARTS)})"
    )
    parser.add_argument(
        "--minutes", type=float, default=5.0, help="for each checkpoint: fewer frames on a slow machine (default: 5)"
    )
    parser.add_argument(
        "--output", type=Path, default=OUTPUT, metavar="FILE", help="the document (default: %(default)s)"
    )
    parser.add_argument("--device", default="auto", help="of codec and kernel: auto, cpu, cuda (default: %(default)s)")
    parser.add_argument(
        "--kernel",
        choices=("megakernel", "torch"),
        default="megakernel",
        help="torch: bf16 PyTorch in the kernel's place, to try the comparison where there is no GPU",
    )
    parser.add_argument(
        "--text-model", default="random:0.6b", metavar="CHECKPOINT", help="of the part text (default: %(default)s)"
    )
    parser.add_argument("--contexts", type=int, nargs="+", default=Scope().contexts, help="prompt rows of the kernels")
    parser.add_argument("--lanes", type=int, nargs="+", default=Scope().lanes, help="of the batched frame's ticks")


def main(arguments: argparse.Namespace) -> int:
    """Prints a table and, last, the document."""
    parts = DEFAULT_PARTS if arguments.parts is None else tuple(arguments.parts.split(","))
    if unknown := [part for part in parts if part not in PARTS]:
        raise MetricsError(f"--parts takes {', '.join(PARTS)}, got {', '.join(unknown) or arguments.parts!r}")
    if not arguments.minutes > 0:
        raise MetricsError(f"--minutes must be above 0, got {arguments.minutes:g}")
    torch.set_float32_matmul_precision("highest")
    device = str(device_named(arguments.device))
    scope = replace(SCOPE, contexts=tuple(arguments.contexts), lanes=tuple(arguments.lanes))
    document: dict[str, Any] = {
        **head(device),
        "packages": {**versions(_PACKAGES), "qwen_tts": provided_by("qwen_tts")},
        "kernel": arguments.kernel,
        "limit": LIMIT,
        "minutes": arguments.minutes,
        "parts": list(parts),
        "scope": asdict(scope),
        "checkpoints": {},
        "text": {},
        "passed": False,
    }

    def store() -> None:
        found = [*document["checkpoints"].values(), *filter(None, [document["text"]])]
        document["passed"] = bool(found) and all(part["passed"] for part in found)
        write_json(arguments.output, without_paths(document))

    store()  # a file that cannot be written is known now, not after five minutes
    sources = list(dict.fromkeys(arguments.checkpoint))
    for source in sources:
        if not source.startswith("random:"):
            open_checkpoint(source, arguments.revision)  # likewise one that cannot be opened
    for source in sources:
        name = name_of(source)
        while name in document["checkpoints"]:
            name += "'"
        result = document["checkpoints"][name] = {"passed": False, "sections": {}, "errors": {}}
        _prove(source, name, parts, scope, device, arguments, result, store)
    if "text" in parts:
        document["text"] = _text(arguments, device)
        store()
    document = without_paths(document)
    print(_summary(document))
    print(f"\nwritten: {arguments.output}")
    print(json.dumps(document, sort_keys=True, allow_nan=False, separators=(",", ":")))
    return 0 if document["passed"] else 1


def _prove(
    source: str,
    name: str,
    parts: Sequence[str],
    scope: Scope,
    device: str,
    arguments: argparse.Namespace,
    result: dict[str, Any],
    store: Callable[[], None],
) -> None:
    """Fills `result` section by section, within the minutes given."""
    checkpoint = open_checkpoint(source, arguments.revision)
    result["checkpoint"] = {
        "source": name,
        "revision": checkpoint.revision,
        "model": f"{checkpoint.config.model_size} {checkpoint.config.type.name}",
        "weights": RANDOM_WEIGHTS if checkpoint.is_random else str(checkpoint.revision or "of a folder"),
        "sha256": {file: _digest(checkpoint.folder / file) for file in _CONFIGS},
    }
    missing = {part: why for part in _ON_DEVICE if (why := _missing(arguments.kernel, device, part))}
    if source.startswith("random:") and {"kernel", "batch"} & (set(parts) - set(missing)):
        open_checkpoint(source + MARGIN)  # made here, where it takes no minutes of the comparison's
    upstream, budget = upstream_of(checkpoint), Budget(60 * arguments.minutes)

    def frames(part: str, within: Budget) -> dict[str, Any]:
        found = parity_of(
            source, scope, arguments.kernel, device, batch=part == "batch", revision=arguments.revision, budget=within
        )
        if part == "batch":
            result["batch"] = found
        else:
            result.update({name: value for name, value in found.items() if name != "passed"})
        return outcome(found, part == "batch")

    work: dict[str, Callable[[Budget], dict[str, Any]]] = {
        "prompt": partial(prompt_section, checkpoint, upstream),
        "codec": partial(codec_section, checkpoint, partial(upstream, torch.bfloat16), device),
        "codes": partial(codes_section, checkpoint, upstream),
        **{part: partial(frames, part) for part in ("kernel", "batch")},
    }
    wanted = {part: share for part, share in _SHARES.items() if part in parts}
    wanted |= {part: 0 for part in wanted if part in missing}  # the others take its time
    for part, share in list(wanted.items()):
        print(f"{name}: {part} ...", file=sys.stderr, flush=True)
        within = budget.share(share / max(1, sum(wanted.values())))
        del wanted[part]
        if part in _ON_DEVICE:
            upstream.cache_clear()
        skipped = {"status": "skipped", "reason": missing.get(part), "seconds": 0.0}
        result["sections"][part] = skipped if part in missing else section(partial(work[part], within))
        states = {found["status"] for found in result["sections"].values()}
        result["passed"] = "passed" in states and "failed" not in states
        store()


def section(work: Callable[[], dict[str, Any]]) -> dict[str, Any]:
    """The outcome of `work`, which returns its figures, with a `reason` where it failed: BackendUnavailable skips, any
    other error fails."""
    begun_s = time.perf_counter()
    try:
        found = work()
        outcome = {"status": "failed" if found.get("reason") else "passed", **found}
    except BackendUnavailable as error:
        outcome = {"status": "skipped", "reason": str(error)}
    except Exception as error:  # noqa: BLE001  the other sections still count
        traceback.print_exc(file=sys.stderr)
        outcome = {"status": "failed", "reason": f"{type(error).__name__}: {error}"}
    return {**outcome, "seconds": time.perf_counter() - begun_s}


# ---- prompt and codes


def upstream_of(checkpoint: Checkpoint) -> Any:
    """dtype -> qwen-tts's model on the CPU, loaded when it is asked for and kept until `cache_clear`.

    The call raises BackendUnavailable without qwen-tts.
    """
    return lru_cache(1)(lambda dtype: load_upstream(checkpoint, dtype))


def prompt_section(checkpoint: Checkpoint, upstream: Any, budget: Budget) -> dict[str, Any]:
    """Every mode that the checkpoint has, in bf16."""
    dtype, requests = torch.bfloat16, standard_requests(checkpoint)
    model, rows = upstream(dtype), []
    for request in requests:
        if rows and budget.over:
            break
        rows += compare_prompts(checkpoint, [request], dtype, model)
    for row in rows:
        if not math.isfinite(row["max_abs_error"]):
            row["max_abs_error"] = None  # prompts of two lengths
    wrong = [row for row in rows if not row["equal"]]
    found = {"prompts": len(rows), "asked": len(requests), "equal": len(rows) - len(wrong), "rows": rows}
    if wrong:
        found["reason"] = f"{len(wrong)} of {len(rows)} prompts are not upstream's: first {_named(wrong[0])}"
    return found


def codes_section(checkpoint: Checkpoint, upstream: Any, budget: Budget) -> dict[str, Any]:
    """Greedy codes and drawn ones; fp32 where it can be done in the time that bf16 leaves."""
    requests = standard_requests(checkpoint)[:CODES_REQUESTS]
    rows: list[Row] = []
    left_out: dict[str, str] = {}
    took_s = 0.0
    for name, dtype in DTYPES.items():
        if rows and budget.left_s < took_s:
            left_out[name] = f"no time: it would take about {took_s:.0f} s, {budget.left_s:.0f} s were left"
            continue
        begun_s = time.perf_counter()
        model, within = upstream(dtype), budget.share(0.2)  # loading and ours take as much again, and so may fp32
        greedy, drawn = checkpoint.sampling().greedy(), replace(checkpoint.sampling(), rng="torch")
        expected = upstream_codes(model, requests, greedy, SEED, CODES_FRAMES, within.share(0.5))
        expected += upstream_codes(model, requests, drawn, SEED, CODES_FRAMES, within)
        del model
        upstream.cache_clear()
        rows += compare_expected(checkpoint, expected, SEED, CODES_FRAMES, dtype)
        took_s = time.perf_counter() - begun_s
    wrong = [row for row in rows if not row["equal"]]
    # The times of a run this short are no measurement: they stay out.
    kept = [{name: value for name, value in row.items() if not name.endswith("_ms_per_frame")} for row in rows]
    found = {
        "frames": {name: sum(row["frames"] for row in rows if row["dtype"] == name) for name in DTYPES},
        "asked": 2 * len(requests) * CODES_FRAMES,
        "equal": not wrong,
        "left_out": left_out,
        "rows": kept,
    }
    if wrong:
        frame, codebook = wrong[0]["first_mismatch"]
        where = f"{_named(wrong[0])}, frame {frame}, codebook {codebook}"
        found["reason"] = f"{len(wrong)} of {len(rows)} utterances are not upstream's: first {where}"
    return found


def _named(row: Row) -> str:
    return f"{row['text']!r} ({row['mode']}, {row['language']}, {row['layout']} layout, {row['dtype']})"


# ---- kernels


def _text(arguments: argparse.Namespace, device: str) -> dict[str, Any]:
    """The text decoder's comparison; `passed` is None where it was skipped."""
    from mktts.measure.parity.text import compare_text

    name = name_of(arguments.text_model)
    if missing := _missing(arguments.kernel, device, "text"):
        return {"source": name, "status": "skipped", "reason": missing, "passed": None}
    print(f"{name}: text ...", file=sys.stderr, flush=True)
    found = compare_text(arguments.text_model, arguments.kernel, device, Budget(60 * arguments.minutes))
    return {**found, "source": name, "status": "passed" if found["passed"] else "failed"}


def _missing(kernel: str, device: str, part: str) -> str | None:
    """Why the kernels of a part cannot run on `device`; None where they can."""
    if kernel != "megakernel":
        return None
    name, missing = ("batched frame", batch_missing) if part == "batch" else ("megakernel", kernel_missing)
    return missing() or (None if device.startswith("cuda") else f"the {name} does not run on {device}")


# ---- the document


def name_of(source: str) -> str:
    """What a checkpoint is called in the file: a Hub id, small or random:... as it is, a folder by its last name."""
    folder = Path(source).expanduser()
    return source if source.startswith("random:") or not folder.is_dir() else folder.resolve().name


def without_paths(value: Any) -> Any:
    """`value` with every path from the root cut to its last name, in all texts of a JSON document."""
    if isinstance(value, dict):
        return {without_paths(name): without_paths(item) for name, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [without_paths(item) for item in value]
    return _FOLDERS.sub("", value) if isinstance(value, str) else value


def _summary(document: dict[str, Any]) -> str:
    """A line a section, with its figures but for its rows."""
    lines = [f"{document['device']}, torch {document['torch']}, kernel: {document['kernel']}"]
    for source, result in document["checkpoints"].items():
        lines.append(f"\n{source}: {'passed' if result['passed'] else 'NOT passed'}")
        for name, found in result["sections"].items():
            figures = {key: v for key, v in found.items() if key not in ("status", "seconds", "reason", "rows")}
            said = found.get("reason") or json.dumps(figures)
            lines.append(f"  {name:8}{found['status']:9}{found['seconds']:6.1f} s  {said}")
        for name in ("divergence", "exact", "errors"):
            lines += [f"  {name}: {json.dumps(result[name])}"] if result.get(name) else []
    return "\n".join(lines + ([f"\ntext: {json.dumps(document['text'])}"] if document["text"] else []))


def _digest(path: Path) -> str | None:
    return hashlib.sha256(path.read_bytes()).hexdigest() if path.is_file() else None
