"""Decoder stacks with seeded weights, as matrices or on a tape; prompts for them; how far results differ."""

import tempfile
from dataclasses import replace
from pathlib import Path

import torch
from csrc_on_cpu import unpack_launch
from torch import Tensor

from mktts.checkpoint.random.weights import random_tensors
from mktts.checkpoint.tensors import stack_shapes, tensor_specs
from mktts.kernel.grid import Shape, choose_shape
from mktts.kernel.prefill import Prefill
from mktts.kernel.tape import KERNELS, Launch, TapeStack, stack_weights
from mktts.measure.inspection import config_at
from mktts.model.qwen3 import Qwen3Stack, Stack
from mktts.spec import StackConfig

FOLDER = tempfile.TemporaryDirectory()  # of what is compiled
SMALL = replace(
    config_at("tiny").talker, hidden_size=48, intermediate_size=80, num_attention_heads=6, head_dim=16, vocab_size=8
)


def weights_of(c: StackConfig, device: str = "cpu") -> dict[str, Tensor]:
    """bf16, by their names in the stack: the same on every device."""
    made = random_tensors(tensor_specs(stack_shapes("", c)), 1, torch.bfloat16)
    return {name: tensor.to(device) for name, tensor in made.items()}


def stack(dtype: torch.dtype = torch.float32, config: StackConfig = SMALL, device: str = "cpu") -> Qwen3Stack:
    return Qwen3Stack(config, weights_of(config), "", torch.device(device), dtype)


def shape_of(size: str, layers: int, multiprocessors: int = 132) -> Shape:
    shape = choose_shape(config_at(size), multiprocessors)
    return replace(shape, talker=replace(shape.talker, num_hidden_layers=layers))


def packed(shape: Shape, weights: dict[str, Tensor]) -> dict[str, Tensor]:
    return stack_weights(shape, "talker", shape.talker, weights.__getitem__, "")


def tape_of(shape: Shape, weights: dict[str, Tensor], few: Launch | None = None) -> TapeStack:
    """Unpacked by csrc/unpack.cu, on the CPU too, where few rows go by `few`."""
    if weights["norm.weight"].is_cuda:
        return TapeStack(shape, packed(shape, weights))
    unpack = unpack_launch(shape, Path(tempfile.mkdtemp(dir=FOLDER.name)))
    return TapeStack(shape, packed(shape, weights), lambda name, *of: (few if name in KERNELS else unpack)(name, *of))


def unpacking(stack: Stack) -> Prefill:
    """Few rows by operators, too."""
    prefill = Prefill(stack)
    prefill._few = False
    prefill._passes.clear()
    return prefill


def prompt(rows: int, seed: int = 0, dtype: torch.dtype = torch.float32, width: int = SMALL.hidden_size) -> Tensor:
    return torch.randn(rows, width, generator=torch.Generator().manual_seed(100 * rows + seed)).to(dtype)


def close(found: tuple[Tensor, ...], expected: tuple[Tensor, ...], error: float = 1e-5) -> bool:
    return all(f.shape == e.shape and (f - e).abs().max() <= error for f, e in zip(found, expected, strict=True))


def rms_error(found: tuple[Tensor, ...], expected: tuple[Tensor, ...]) -> float:
    """The largest of root mean squares, as a part of what was expected."""
    assert [f.shape for f in found] == [e.shape for e in expected]
    pairs = zip(found, expected, strict=True)
    return max(float((f.double() - e.double()).norm() / e.double().norm()) for f, e in pairs)


def in_two_pieces(prefill: Prefill, x: Tensor) -> tuple[Tensor, ...]:
    """Hidden state, keys and values of rows of which the first nine come first."""
    prefill.run(x[:9])
    return prefill.run(x[9:], 9), prefill.keys_values
