"""Command-line arguments shared by several commands: checkpoint, device, backend, voice."""

import argparse
import sys
from pathlib import Path
from typing import Any

from mktts.checkpoint.open import DEFAULT_CHECKPOINT, SOURCES
from mktts.errors import TextError
from mktts.spec import FRAME_MS

BACKENDS = ("auto", "torch", "megakernel", "upstream")
PIPE = "-"  # stands for standard input or output in place of a text or a file


def add_model_arguments(
    parser: argparse.ArgumentParser, checkpoint: str | None = DEFAULT_CHECKPOINT, lexicon: bool = False
) -> None:
    """Adds the arguments that `loading` reads. checkpoint: the default. lexicon: whether to add --lexicon."""
    model = parser.add_argument_group("model")
    add_checkpoint_arguments(model, checkpoint)
    fastest = "what runs it (default: the fastest that works here)"
    model.add_argument("--backend", default="auto", choices=BACKENDS, help=fastest)
    model.add_argument("--device", default="auto", help="auto, cpu, cuda, cuda:1 (default: %(default)s)")
    precision = "of the model (default: bfloat16 on CUDA, float32 on the CPU)"
    model.add_argument("--dtype", choices=("bfloat16", "float32"), help=precision)
    if lexicon:
        text = "what is said for words: a file of lines WORD, a tab, SAID AS"
        model.add_argument("--lexicon", type=Path, metavar="FILE", help=text)


def add_checkpoint_arguments(parser: Any, default: str | None, *, required: bool = False) -> None:
    """Adds --checkpoint and --revision. default: None if the argument is `required` or the command chooses."""
    ending = "" if default is None else " (default: %(default)s)"
    parser.add_argument("--checkpoint", default=default, required=required, help=f"{SOURCES}{ending}")
    parser.add_argument("--revision", help="of a Hub id: a commit, tag or branch")


def add_voice_arguments(parser: Any) -> None:
    """Adds the arguments of one utterance: speaker, language, instruction, voice, number of frames."""
    parser.add_argument("--speaker", help="of a custom_voice checkpoint (`inspect` lists them; default: its first)")
    spoken = "that is spoken (`inspect` lists them; default: %(default)s)"
    parser.add_argument("--language", default="auto", help=spoken)
    parser.add_argument("--instruct", help="how to say it, or for voice_design what the voice is like")
    parser.add_argument("--voice", type=Path, metavar="FILE", help="a saved voice, for a base checkpoint")
    parser.add_argument("--max-frames", type=int, help=f"stop after this many frames of {FRAME_MS:.0f} ms")


def text_of(word: str) -> str:
    """Returns `word`, or the text of standard input for `-`. Raises TextError if it is not UTF-8."""
    try:
        text = sys.stdin.read() if word == PIPE else word
        text.encode()  # undecodable bytes appear as lone surrogates, which cannot be encoded
    except UnicodeError as error:
        raise TextError(f"expected a text in UTF-8, found other bytes at place {error.start}") from None
    return text


def loading(arguments: argparse.Namespace) -> dict[str, Any]:
    """The keyword arguments of Synthesizer.load given by the arguments of `add_model_arguments`."""
    import torch

    dtype = getattr(torch, arguments.dtype) if arguments.dtype else None
    made = {"backend": arguments.backend, "device": arguments.device, "dtype": dtype}
    if getattr(arguments, "lexicon", None) is not None:
        made["lexicon"] = arguments.lexicon.resolve()  # absolute, for child processes with another working folder
    return made
