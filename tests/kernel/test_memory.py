"""The account of device memory: against tensors that exist, the compiler, and the table of csrc/README.md, which this
file writes anew where it is run as a program."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import torch
from compiler import needs_nvrtc

from mktts.checkpoint import open_checkpoint
from mktts.checkpoint.tensors import expected_tensors
from mktts.kernel.build import SHARED, compile_kernel
from mktts.kernel.grid import Shape, choose_shape
from mktts.kernel.tape import model_weights
from mktts.kernel.tape_stack import TapeStack
from mktts.measure.inspection import config_at
from mktts.measure.memory import WEIGHTS, account, device_memory, rows

README = Path(__file__).resolve().parents[2] / "csrc" / "README.md"
TABLE = re.compile(
    r"(?<=<!-- memory: written by tests/kernel/test_memory\.py -->\n).*?(?=\n<!-- end of memory -->)", re.DOTALL
)


def account_at(size: str) -> tuple[Shape, dict[str, int]]:
    config = config_at(size)
    shape = choose_shape(config, 132)
    return shape, account(shape, {n: s.shape for n, s in expected_tensors(config).items()}, positions=100)


@pytest.mark.parametrize("size", ["tiny", "tiny-projected"])
def test_every_byte_of_the_packed_weights_is_in_it(size):
    checkpoint = open_checkpoint(f"random:{size}")
    shape, found = account_at(size)
    tensors = checkpoint.tensors()
    projected = size == "tiny-projected"
    made = model_weights(shape, lambda name: tensors[name].to(torch.bfloat16), projected)
    held = {tensor.data_ptr(): tensor.nbytes for tensor in made.values()}
    assert sum(found.get(row, 0) for row in WEIGHTS) == sum(held.values())
    assert found["prefill: one layer unpacked"] == TapeStack(shape, made).room_bytes
    keys_values = found["a stream: keys and values of 100 positions"]
    assert 0 <= keys_values - 100 * checkpoint.config.talker.kv_bytes_per_position < keys_values // 5  # whole slots


@pytest.mark.parametrize("size", ["tiny", "1.7b"])
@needs_nvrtc
def test_the_mailboxes_are_as_large_as_the_compiler_makes_them(size):
    shape, found = account_at(size)
    build = compile_kernel({**shape.defines, "RING": 2}, "sm_90a", SHARED)
    assert found["mailboxes between blocks"] == build.constants["exchange_bytes"]


def computed() -> str:
    table = rows(device_memory())
    heads = list(table[0])
    lines = [heads, ["---", *["---:"] * (len(heads) - 1)], *(list(row.values()) for row in table)]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def test_the_readme_of_csrc_has_the_table():
    assert TABLE.search(README.read_text(encoding="utf-8"))[0] == computed()


if __name__ == "__main__":
    README.write_text(TABLE.sub(lambda _: computed(), README.read_text(encoding="utf-8")), encoding="utf-8")
