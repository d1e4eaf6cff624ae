"""`python -m mktts text`: continue a text, written out as it is made."""

from __future__ import annotations

import argparse
import sys
from dataclasses import replace

from mktts.checkpoint.arguments import PIPE, add_model_arguments, loading, text_of
from mktts.checkpoint.random import RANDOM_WEIGHTS

EXAMPLES = """examples:
  python -m mktts text "Once upon a time" --checkpoint Qwen/Qwen3-0.6B
  python -m mktts text "The capital of France is" --checkpoint path/to/Qwen3-0.6B --greedy --max-tokens 16
  echo "Once upon a time" | python -m mktts text - --checkpoint random:tiny --seed 1 --max-tokens 8

The text is continued as it stands: no chat template is put around it. Ctrl-C or closing the pipe ends it."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("text", metavar="TEXT", help="what to continue; - reads it from standard input")
    how = parser.add_argument_group("generation")
    how.add_argument("--seed", type=int, help="repeats the same draw (default: a new one each time)")
    how.add_argument("--greedy", action="store_true", help="no draw at all")
    how.add_argument("--max-tokens", type=int, default=256, help="stop after this many tokens (default: %(default)s)")
    add_model_arguments(
        parser, None, "a folder, a Hub id, or random:SIZE", ("auto", "torch", "megakernel"), required=True
    )


def main(arguments: argparse.Namespace) -> int:
    """Writes the continuation to standard output, and how long it took to standard error."""
    from mktts.llm.checkpoint import open_text_checkpoint
    from mktts.llm.decoder import TextDecoder

    prompt = text_of(arguments.text)
    if arguments.text == PIPE:
        prompt = prompt.removesuffix("\n")
    checkpoint = open_text_checkpoint(arguments.checkpoint, arguments.revision)
    choice = replace(checkpoint.choice(), do_sample=False) if arguments.greedy else None
    with TextDecoder.load(checkpoint, **loading(arguments)) as decoder:
        first_ms = last_ms = 0.0
        stream = decoder.generate(prompt, choice=choice, seed=arguments.seed, max_tokens=arguments.max_tokens)
        for token in stream:
            first_ms, last_ms = first_ms or token.ready_ms, token.ready_ms
            print(token.text, end="", flush=True)
    print()
    rate = f", then {1e3 * (len(stream.ids) - 1) / (last_ms - first_ms):.0f} tokens/s" if last_ms > first_ms else ""
    print(
        f"{len(stream.ids)} tokens, the first after {first_ms:.0f} ms (cold){rate}, ended by {stream.finish_reason}",
        file=sys.stderr,
    )
    if checkpoint.is_random:
        print(RANDOM_WEIGHTS, file=sys.stderr)
    return 0
