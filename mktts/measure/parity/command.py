"""`python -m mktts parity CHECKPOINT`: verifies a checkpoint on this machine, and writes a report that can be shared.

The file and the last line of standard output are the same JSON document: the machine, and for every checkpoint its
`sections` with status ("passed", "failed", "skipped"), reason, seconds and figures, and the kernel's comparisons
(mktts.measure.parity.kernel). It contains no path of this machine.

* prompt: prompt embeddings must equal upstream's bit for bit.
* codes: codes of PyTorch in bf16, greedy and drawn, must equal upstream's frame for frame.
* codec: see `codec.codec_section`."""

import argparse
import json
import re
import sys
import time
import traceback
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from functools import lru_cache, partial
from hashlib import sha256
from pathlib import Path
from typing import Any, Literal

import torch

from mktts.arguments import add_options, given, option
from mktts.checkpoint import SOURCES, Checkpoint, open_checkpoint
from mktts.checkpoint.random import RANDOM_WEIGHTS
from mktts.common import require_writable, write_json
from mktts.engine.upstream import load_upstream
from mktts.errors import BackendUnavailable, MetricsError
from mktts.measure.environment import head, kernel_missing, provided_by, versions
from mktts.measure.parity.codec import codec_section
from mktts.measure.parity.kernel import LIMIT, MARGIN, Scope, outcome, parity_of, share
from mktts.measure.parity.upstream import Row, compare_codes, compare_prompts, standard_requests
from mktts.model.backend import device_named

OUTPUT = Path("mktts-parity.json")
PARTS = ("prompt", "codes", "codec", "kernel")
CODES_FRAMES = 24  # frames per request
CODES_REQUESTS = 3  # as many with greedy as with drawn codes
SEED = 7
SCOPE = Scope()  # if time allows
_PACKAGES = ("mktts", "qwen-tts", "qwen-tts-hf", "transformers", "tokenizers")
_CONFIGS = ("config.json", "generation_config.json", "speech_tokenizer/config.json")
# The folders of an absolute path, up to the last separator. URLs (https://...) do not match.
_FOLDERS = re.compile(r"(?<![\w.:/\\])(?:~|[A-Za-z]:)?[\\/](?:[^\s\\/:'\",()\[\]]+[\\/])+")

EXAMPLES = """examples:
  python -m mktts parity Qwen/Qwen3-TTS-12Hz-0.6B-CustomVoice
  python -m mktts parity path/to/checkpoint --minutes 10 --output parity.json
  python -m mktts parity random:tiny --parts prompt,codes

Exit status: 0 if all sections that ran passed (skipped ones give the reason), 1 if one failed or none could run."""


@dataclass(frozen=True)
class ParitySettings:
    """What is compared for every checkpoint, and on which device. Raises MetricsError for values out of range."""

    revision: str | None = option(None, "of a Hub id")
    parts: str = option(",".join(PARTS), "the sections to run", metavar="PART,...")
    minutes: float = option(5.0, "time for each checkpoint; a slow machine compares fewer frames")
    device: str = option("auto", "of codec and kernel: auto, cpu, cuda")
    kernel: Literal["megakernel", "torch"] = option("megakernel", "torch: bf16 PyTorch instead, where there is no GPU")

    def __post_init__(self) -> None:
        if unknown := [part for part in self.parts.split(",") if part not in PARTS]:
            raise MetricsError(f"--parts takes {', '.join(PARTS)}, got {', '.join(unknown) or self.parts!r}")
        if not self.minutes > 0:
            raise MetricsError(f"--minutes must be above 0, got {self.minutes:g}")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("checkpoint", metavar="CHECKPOINT", nargs="+", help=SOURCES)
    add_options(parser, ParitySettings)
    parser.add_argument("--output", type=Path, default=OUTPUT, metavar="FILE", help="document (default: %(default)s)")


def main(arguments: argparse.Namespace) -> int:
    """Prints a table and then the document. Returns 0 if all checkpoints passed, else 1."""
    settings = ParitySettings(**given(ParitySettings, arguments))
    settings = replace(settings, device=str(device_named(settings.device)))
    torch.set_float32_matmul_precision("highest")
    require_writable(arguments.output)
    sources = list(dict.fromkeys(arguments.checkpoint))
    for source in sources:
        if not source.startswith("random:"):
            open_checkpoint(source, settings.revision)  # fails now rather than after the checkpoints before it
    found: dict[str, dict[str, Any]] = {}
    for source in sources:
        name = name_of(source)
        while name in found:
            name += "'"
        found[name] = _proven(source, name, settings)
    document = {
        **head(settings.device),
        "packages": {**versions(_PACKAGES), "qwen_tts": provided_by("qwen_tts")},
        "kernel": settings.kernel,
        "limit": LIMIT,
        "minutes": settings.minutes,
        "parts": settings.parts.split(","),
        "scope": asdict(SCOPE),
        "checkpoints": found,
        "passed": all(one["passed"] for one in found.values()),
    }
    document = without_paths(document)
    write_json(arguments.output, document)
    print(_summary(document))
    print(f"\nwritten: {arguments.output}")
    print(json.dumps(document, sort_keys=True, allow_nan=False, separators=(",", ":")))
    return 0 if document["passed"] else 1


def _proven(source: str, name: str, settings: ParitySettings) -> dict[str, Any]:
    """Runs the sections of one checkpoint within the given minutes."""
    revision = settings.revision
    checkpoint = open_checkpoint(source, revision)
    files = [name for name in _CONFIGS if (checkpoint.folder / name).is_file()]
    digests = {name: sha256((checkpoint.folder / name).read_bytes()).hexdigest() for name in files}
    about = {
        "source": name,
        "revision": checkpoint.revision,
        "model": f"{checkpoint.config.model_size} {checkpoint.config.type.name}",
        "weights": RANDOM_WEIGHTS if checkpoint.is_random else str(checkpoint.revision or "of a folder"),
        "sha256": digests,
    }
    result: dict[str, Any] = {"checkpoint": about, "sections": {}}
    upstream, why_not = lru_cache(1)(partial(load_upstream, checkpoint, torch.bfloat16)), None
    if settings.kernel == "megakernel":
        on_gpu = settings.device.startswith("cuda")
        why_not = kernel_missing() or (None if on_gpu else f"the megakernel does not run on {settings.device}")

    def kernel_section(until_s: float) -> dict[str, Any]:
        if why_not is not None:
            raise BackendUnavailable(why_not)
        upstream.cache_clear()
        result.update(parity_of(source, SCOPE, settings.kernel, settings.device, revision=revision, until_s=until_s))
        return outcome(result)

    # Relative shares of the time; a section that is left out leaves its share to the others. The codec uses the
    # upstream model that the prompt section has loaded.
    work = {
        "prompt": (1, partial(prompt_section, checkpoint, upstream)),
        "codec": (2, partial(codec_section, checkpoint, upstream, settings.device)),
        "codes": (5, partial(codes_section, checkpoint, upstream)),
        "kernel": (0 if why_not else 12, kernel_section),
    }
    wanted = {part: work[part] for part in work if part in settings.parts.split(",")}
    if source.startswith("random:") and "kernel" in wanted and not why_not:
        open_checkpoint(source + MARGIN)  # created before the comparison's time starts
    until_s, left = time.perf_counter() + 60 * settings.minutes, sum(mine for mine, _ in wanted.values())
    for part, (mine, compare) in wanted.items():
        print(f"{name}: {part} ...", file=sys.stderr, flush=True)
        result["sections"][part] = section(compare, share(until_s, mine / max(1, left)))
        left -= mine
    states = {found["status"] for found in result["sections"].values()}
    return {**result, "passed": "passed" in states and "failed" not in states}


def section(compare: Callable[[float], dict[str, Any]], until_s: float) -> dict[str, Any]:
    """Runs a comparison, which returns figures, with a `reason` if it failed. Returns them with status and seconds;
    BackendUnavailable gives "skipped", any other exception "failed"."""
    begun_s = time.perf_counter()
    try:
        found = compare(until_s)
        outcome = {"status": "failed" if found.get("reason") else "passed", **found}
    except BackendUnavailable as error:
        outcome = {"status": "skipped", "reason": str(error)}
    except Exception as error:  # noqa: BLE001  the other sections still run
        traceback.print_exc(file=sys.stderr)
        outcome = {"status": "failed", "reason": f"{type(error).__name__}: {error}"}
    return {**outcome, "seconds": time.perf_counter() - begun_s}


# ---- prompt and codes


def prompt_section(checkpoint: Checkpoint, upstream: Any, until_s: float) -> dict[str, Any]:
    """Compares prompts of every mode of the checkpoint, in bf16. They take milliseconds, so `until_s` is not used."""
    rows = compare_prompts(checkpoint, standard_requests(checkpoint), torch.bfloat16, upstream())
    return {"prompts": len(rows), "equal": sum(row["equal"] for row in rows), "rows": rows} | _reason(rows, "prompts")


def codes_section(checkpoint: Checkpoint, upstream: Any, until_s: float) -> dict[str, Any]:
    """Compares greedy and drawn codes, in bf16."""
    requests, drawn = standard_requests(checkpoint)[:CODES_REQUESTS], checkpoint.sampling()
    rows = []
    for sampling, part in ((drawn.greedy(), 0.5), (drawn, 1.0)):
        asked = requests, sampling, SEED, CODES_FRAMES, torch.bfloat16, upstream()
        rows += compare_codes(checkpoint, *asked, share(until_s, part))
    frames, asked = sum(row["frames"] for row in rows), 2 * len(requests) * CODES_FRAMES
    return {"frames": frames, "asked": asked, "rows": rows} | _reason(rows, "utterances")


def _reason(rows: list[Row], what: str) -> dict[str, str]:
    """The reason why a section failed; {} if it passed."""
    wrong = [row for row in rows if not row["equal"]]
    if not wrong:
        return {}
    where = "{text!r} ({mode}, {language}, {layout} layout, {dtype})".format(**wrong[0])
    if "first_mismatch" in wrong[0]:
        where += ", frame {}, codebook {}".format(*wrong[0]["first_mismatch"])
    return {"reason": f"{len(wrong)} of {len(rows)} {what} are not upstream's: first {where}"}


# ---- the document


def name_of(source: str) -> str:
    """A checkpoint's name in the document: a Hub id, small or random:... as it is, a folder without its parents."""
    folder = Path(source).expanduser()
    return source if source.startswith("random:") or not folder.is_dir() else folder.resolve().name


def without_paths(value: Any) -> Any:
    """Shortens absolute paths to their last name in all strings of a JSON document."""
    if isinstance(value, dict):
        return {without_paths(name): without_paths(item) for name, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [without_paths(item) for item in value]
    return _FOLDERS.sub("", value) if isinstance(value, str) else value


def _summary(document: dict[str, Any]) -> str:
    """Formats the document with one line per section, which has its figures without the rows."""
    lines = [f"{document['device']}, torch {document['torch']}, kernel: {document['kernel']}"]
    for source, result in document["checkpoints"].items():
        lines.append(f"\n{source}: {'passed' if result['passed'] else 'NOT passed'}")
        for name, found in result["sections"].items():
            figures = {key: v for key, v in found.items() if key not in ("status", "seconds", "reason", "rows")}
            said = found.get("reason") or json.dumps(figures)
            lines.append(f"  {name:8}{found['status']:9}{found['seconds']:6.1f} s  {said}")
    return "\n".join(lines)
