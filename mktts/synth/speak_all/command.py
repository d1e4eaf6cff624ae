"""`python -m mktts speak-all`: a table of sentences into a folder of audio files and a manifest."""

from __future__ import annotations

import argparse
import json
import sys
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from mktts.audio import require_format
from mktts.batch.settings import BatchSettings
from mktts.checkpoint.arguments import add_model_arguments, loading
from mktts.checkpoint.random import RANDOM_WEIGHTS
from mktts.common import whole_number
from mktts.errors import OptionsError, PromptError
from mktts.model.sampling import MAX_SEED, drawn_seed
from mktts.model.voice import Voice
from mktts.spec import FRAME_MS
from mktts.synth.speak_all.folder import MANIFEST, held, settle_settings
from mktts.synth.speak_all.sentences import COLUMNS, NEEDED, Table
from mktts.synth.speak_all.takes import MAX_RETRIES, Manner
from mktts.synth.speak_all.work import Job, Speakers, bring_up, speak_here

if TYPE_CHECKING:
    from mktts.checkpoint import Checkpoint

OUTPUTS = ("wav", "flac", "opus", "mp3")
EXAMPLES = f"""examples:
  python -m mktts speak-all sentences.txt -o spoken
  python -m mktts speak-all sentences.jsonl -o spoken --format flac --seed 1
  python -m mktts speak-all sentences.tsv -o spoken --checkpoint path/to/checkpoint --speaker vivian
  python -m mktts speak-all sentences.tsv -o spoken --checkpoint path/to/checkpoint --ray

A line of .txt is a text. A line of .jsonl is an object, the first line of .tsv names the columns: {", ".join(NEEDED)},
which must be there, {", ".join(COLUMNS[len(NEEDED) :])}. What a line leaves out is as
the options say. The audio of a line lies in DIR under its id. {MANIFEST} there has one line for each: status (ok;
unfinished, no attempt came to its end; failed; bad), file, duration_s, seed, finish_reason, and retried, the attempts
that were not kept. The same command again goes on where it was ended or killed: what is done stays, lines that were
changed are spoken again, and other settings are refused. One line of JSON comes last. Exit status 1: not every line is
ok."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("sentences", type=Path, metavar="SENTENCES", help="a file .jsonl, .tsv or .txt")
    parser.add_argument("-o", "--output", type=Path, required=True, metavar="DIR", help="the folder that they go to")
    parser.add_argument("--format", choices=OUTPUTS, default="wav", help="of the files (default: %(default)s)")
    line = parser.add_argument_group("for lines that do not say")
    line.add_argument("--voice", type=Path, metavar="FILE", help="a saved voice, for a base checkpoint")
    line.add_argument("--speaker", help="of a custom_voice checkpoint (`inspect` lists them; default: its first)")
    line.add_argument("--language", default="auto", help="that is spoken (default: %(default)s)")
    line.add_argument("--instruct", help="how to say it, or for voice_design what the voice is like")
    line.add_argument("--max-frames", type=int, help=f"stop after this many frames of {FRAME_MS:.0f} ms")
    how = parser.add_argument_group("generation")
    how.add_argument("--seed", type=int, help="that those of lines follow from (default: drawn, and kept in DIR)")
    how.add_argument("--greedy", action="store_true", help="no draw at all")
    how.add_argument("--layout", choices=("whole", "streaming"), help="of the prompt (default: the checkpoint type's)")
    how.add_argument(
        "--retries",
        type=int,
        help=f"with another seed, of what runs away or misses its end: 0 to {MAX_RETRIES} (default: {MAX_RETRIES}; "
        "0 for random weights, which never end, and for --greedy)",
    )
    how.add_argument("--at-once", type=int, metavar="N", help="sentences together (default: as many as fit)")
    how.add_argument(
        "--deterministic", action=argparse.BooleanOptionalAction, help="codes that no neighbour changes, on a GPU too"
    )
    how.add_argument(
        "--codec-precision", choices=("full", "fast"), default="full", help="on a GPU: fast decodes in half precision"
    )
    many = parser.add_argument_group("many GPUs, by Ray Data; DIR must be the same for all machines")
    many.add_argument("--ray", action="store_true", help="a synthesizer on every GPU")
    many.add_argument("--ray-address", metavar="ADDRESS", help="of a cluster (default: this machine)")
    many.add_argument("--replicas", type=int, metavar="N", help="synthesizers (default: one a GPU)")
    add_model_arguments(parser)


def main(arguments: argparse.Namespace) -> int:
    """Speaks what is not done yet; 0 where every line is ok, else 1."""
    from mktts.checkpoint import open_checkpoint

    _check(arguments)
    table = Table(arguments.sentences)
    checkpoint = open_checkpoint(arguments.checkpoint, arguments.revision)
    nobody = bool(table.columns) and "voice" not in table.columns and arguments.voice is None
    if nobody and checkpoint.config.type.clones:
        raise PromptError("a base checkpoint has no speakers: expected a column voice, or --voice FILE")
    speakers = _speakers(arguments, checkpoint)
    with held(arguments.output) as folder:
        settings = settle_settings(folder, _settings(arguments, checkpoint.revision), {"seed": drawn_seed()})
        retries = arguments.retries
        if retries is None:
            retries = 0 if checkpoint.is_random or arguments.greedy else MAX_RETRIES
        manner = _manner(arguments, settings["seed"], retries)
        job = Job(folder, arguments.format, manner, arguments.at_once)
        report = bring_up(job, table, speakers)
    if checkpoint.is_random:
        print(RANDOM_WEIGHTS, file=sys.stderr)
    print(json.dumps(report))
    return 0 if report["ok"] == report["lines"] else 1


def _check(arguments: argparse.Namespace) -> None:
    """Refuses at once what could only fail after the model has loaded."""
    require_format(arguments.format)
    for name, least, most in (
        ("seed", 0, MAX_SEED),
        ("max_frames", 1, None),
        ("retries", 0, MAX_RETRIES),
        ("at_once", 1, None),
        ("replicas", 1, None),
    ):
        if (value := getattr(arguments, name)) is not None:
            whole_number(f"--{name.replace('_', '-')}", value, least, most)
    if arguments.ray and arguments.device not in ("auto", "cpu", "cuda"):
        raise OptionsError(f"--ray gives every synthesizer a GPU of its own: leave out --device {arguments.device}")
    if not arguments.ray and (arguments.ray_address or arguments.replicas):
        raise OptionsError("--ray-address and --replicas are options of --ray, which is missing")


def _settings(arguments: argparse.Namespace, revision: str | None) -> dict[str, Any]:
    """All that the sound of a line follows from beside the line."""
    named = arguments.checkpoint
    names = (
        "format",
        "speaker",
        "language",
        "instruct",
        "layout",
        "greedy",
        "max_frames",
        "backend",
        "dtype",
        "deterministic",
        "codec_precision",
    )
    return {
        "checkpoint": str(Path(named).resolve()) if Path(named).is_dir() else named,
        "revision": revision,
        **{name: getattr(arguments, name) for name in names},
        "voice": None if arguments.voice is None else Voice.load(arguments.voice).digest,
        "seed": arguments.seed,
    }


def _manner(arguments: argparse.Namespace, seed: int, retries: int) -> Manner:
    return Manner(
        seed=seed,
        beside=arguments.sentences.resolve().parent,
        voice=None if arguments.voice is None else str(arguments.voice.resolve()),
        speaker=arguments.speaker,
        language=arguments.language,
        instruct=arguments.instruct,
        layout=arguments.layout,
        max_frames=arguments.max_frames,
        greedy=arguments.greedy,
        retries=retries,
    )


def _speakers(arguments: argparse.Namespace, checkpoint: Checkpoint) -> Speakers:
    """Many together wherever the backend allows it: nobody listens."""
    together = arguments.backend in ("auto", "torch")
    model = {**loading(arguments), "deterministic": arguments.deterministic}
    model["engine"] = "batch" if together else "auto"
    model["batch"] = BatchSettings(codec=arguments.codec_precision)
    if not arguments.ray:
        return partial(speak_here, checkpoint, model)
    from mktts.synth.speak_all.cluster import require_ray, speak_on_cluster

    require_ray()
    source = str(checkpoint.folder) if checkpoint.revision is None else arguments.checkpoint
    return partial(speak_on_cluster, source, checkpoint.revision, model, arguments.ray_address, arguments.replicas)
