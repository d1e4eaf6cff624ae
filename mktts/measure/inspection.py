"""The components of a checkpoint, and the bytes of each that one 80 ms frame must read.

Bytes per frame count all weight bytes that a batch-1 frame fetches if nothing stays in a cache: the talker's stack and
head once, the predictor's stack and projection once per predictor pass (the megakernel projects embeddings at load time
and reads the projection once: 0.06 GB less at 1.7B), each predictor head once, and one row of each embedding table.
Activations are not counted, nor keys and values, although a frame reads the talker's for every position so far
(`StackConfig.kv_bytes_per_position` each). Everything comes from the file headers; no weights are read."""

import argparse
from collections.abc import Sequence
from typing import NamedTuple

from mktts.checkpoint import SOURCES, Checkpoint, open_checkpoint
from mktts.checkpoint.random import RANDOM_WEIGHTS
from mktts.checkpoint.random.make import small_files
from mktts.checkpoint.tensors import TensorSpec, TensorSpecs, expected_codec_tensors, expected_tensors
from mktts.errors import CheckpointError
from mktts.spec import NUM_CODEBOOKS, ModelConfig


class Component(NamedTuple):
    """One row of the table. `part` is talker, predictor, text, voice or codec."""

    name: str
    part: str
    tensors: int
    params: int
    bytes: int
    bytes_per_frame: int
    reads: str  # how often one frame reads it, as text


_PREDICTOR = "talker.code_predictor."
_N = NUM_CODEBOOKS - 1  # predictor passes, one per code after the talker's; the first processes two positions
_STACK = (_PREDICTOR + "model.layers.", _PREDICTOR + "model.norm.")
_CODEBOOKS = ("decoder.quantizer.rvq_first.vq.", "decoder.quantizer.rvq_rest.vq.")
# Name, part, how often a frame reads it (as text, times as a whole, rows of its tables), and its tensors' prefixes.
_MODEL_RULES = (
    ("talker layers", "talker", "once", 1, 0, ("talker.model.layers.", "talker.model.norm.")),
    ("codec_embedding", "talker", "1 row", 0, 1, ("talker.model.codec_embedding.",)),
    ("codec_head", "talker", "once", 1, 0, ("talker.codec_head.",)),
    ("text_embedding", "text", "per text token", 0, 0, ("talker.model.text_embedding.",)),
    ("text_projection", "text", "per text token", 0, 0, ("talker.text_projection.",)),
    ("predictor layers", "predictor", f"{_N} passes", _N, 0, _STACK),
    ("predictor embeddings", "predictor", f"{_N} rows", 0, _N, (_PREDICTOR + "model.codec_embedding.",)),
    ("lm_heads", "predictor", "each once", 1, 0, (_PREDICTOR + "lm_head.",)),
    ("small_to_mtp_projection", "predictor", f"{_N} passes", _N, 0, (_PREDICTOR + "small_to_mtp_projection.",)),
    ("speaker_encoder", "voice", "per voice", 0, 0, ("speaker_encoder.",)),
)
_CODEC_RULES = (
    ("codec codebooks", "codec", f"{NUM_CODEBOOKS} rows", 0, NUM_CODEBOOKS, _CODEBOOKS),
    ("codec decoder", "codec", "once per chunk", 1, 0, ("decoder.",)),
    ("codec encoder", "voice", "per voice", 0, 0, ("encoder.",)),
)


def components(checkpoint: Checkpoint) -> list[Component]:
    """The table of a checkpoint's components, in the order of the data flow; components it lacks are left out."""
    return _rows(checkpoint.files.tensors, _MODEL_RULES) + _rows(checkpoint.codec_files.tensors, _CODEC_RULES)


def components_at(size: str) -> list[Component]:
    """The table for a CustomVoice checkpoint of a released size ("0.6b", "1.7b"), from its configuration only, without
    downloading or creating a checkpoint. Raises CheckpointError for an unknown size."""
    tensors = expected_tensors(config_at(size))
    codec = expected_codec_tensors(small_files(size, "custom_voice", full_codec=True)["speech_tokenizer/config.json"])
    return _rows(tensors, _MODEL_RULES) + _rows(codec, _CODEC_RULES)


def config_at(size: str) -> ModelConfig:
    """The configuration of a size that `mktts.checkpoint.random.make` supports. Raises CheckpointError for an unknown
    size."""
    return ModelConfig.of(small_files(size, "custom_voice", full_codec=True)["config.json"], size)


def bytes_per_frame(rows: Sequence[Component], parts: Sequence[str] = ("talker", "predictor")) -> int:
    """Weight bytes that one frame reads in `parts`."""
    return sum(row.bytes_per_frame for row in rows if row.part in parts)


def _rows(tensors: TensorSpecs, rules: Sequence[tuple]) -> list[Component]:
    """Groups tensors into components; each belongs to the first rule with a prefix of its name."""
    members: dict[tuple, list[TensorSpec]] = {rule: [] for rule in rules}
    for name, spec in tensors.items():
        owner = next((rule for rule in rules if name.startswith(rule[-1])), None)
        if owner is None:
            raise CheckpointError(f"tensor {name}: expected a part of Qwen3-TTS 12 Hz, found none it belongs to")
        members[owner].append(spec)
    rows = []
    for (name, part, reads, whole, single, _), specs in members.items():
        size, tables = sum(spec.nbytes() for spec in specs), [spec for spec in specs if len(spec.shape) == 2]
        row_bytes = sum(spec.nbytes() // spec.shape[0] for spec in tables) // max(1, len(tables))
        read, params = whole * size + single * row_bytes, sum(spec.params for spec in specs)
        rows += [Component(name, part, len(specs), params, size, read, reads)] if specs else []
    return rows


EXAMPLES = """examples:
  python -m mktts inspect small
  python -m mktts inspect path/to/checkpoint"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("checkpoint", metavar="CHECKPOINT", help=SOURCES)
    parser.add_argument("--revision", help="of a Hub id")


def main(arguments: argparse.Namespace) -> int:
    """Prints the table."""
    checkpoint = open_checkpoint(arguments.checkpoint, arguments.revision)
    c, rows = checkpoint.config, components(checkpoint)
    sums = [sum(getattr(row, name) for row in rows) for name in ("tensors", "params", "bytes")]
    total = Component("all", "", *sums, bytes_per_frame(rows), "per frame: talker and predictor")
    stacks = [f"{s.num_hidden_layers} x {s.hidden_size}" for s in (c.talker, c.predictor)]
    random = f", {RANDOM_WEIGHTS}" if checkpoint.is_random else ""
    print(checkpoint.folder)
    print(f"{c.type.name}, size {c.model_size}, talker {stacks[0]}, predictor {stacks[1]}{random}\n")
    print(f"{'component':24}{'tensors':>8}{'params':>15}{'bytes':>16}{'bytes/frame':>16}  read")
    for row in [*rows, total]:
        sizes = f"{row.tensors:>8}{row.params:>15,}{row.bytes:>16,}{row.bytes_per_frame:>16,}"
        print(f"{row.name:24}{sizes}  {row.reads}")
    print(f"\nspeakers: {', '.join(c.speakers) or 'none'}")
    print(f"languages: {', '.join(c.languages) or 'none'}")
    return 0
