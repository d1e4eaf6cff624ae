"""Seeded random tensors for any layout, well-conditioned, so that the audio is neither silent nor clipped."""

import math
import zlib

import torch
import torch.nn.functional as F
from torch import Tensor

from mktts.checkpoint.tensors import Shape, TensorSpecs
from mktts.errors import CheckpointError
from mktts.spec import NUM_CODEBOOKS, ModelConfig, StackConfig

HEAD_LOGIT_STD = 3.0
PEAK_LOGIT = 16.0  # for each of the two factors of a code; see `widen_margins`
TEXT_CLASSES = 8
GROUP_RMS = 0.1  # of the embeddings of codes 1-15, compared with 1 for those of code 0
LAST_CODEC_CONV = "decoder.decoder.6.conv.weight"
WAVEFORM_GAIN = 0.025  # keeps the waveform near 0.06 RMS, well below the clamp at 1
RESIDUAL_GAIN = 0.25  # for the codec's twelve residual units; with 1 they would amplify rounding a hundredfold


def random_tensors(specs: TensorSpecs, seed: int, dtype: torch.dtype) -> dict[str, Tensor]:
    """One CPU tensor for each of `specs`, in `dtype`; it depends on `seed` and on its own name and shape only."""
    made = {}
    for name, spec in specs.items():
        centre, spread = _distribution(name, spec.shape)
        made[name] = torch.randn(spec.shape, generator=_generator(name, seed)).mul_(spread).add_(centre).to(dtype)
    return made


def _generator(name: str, seed: int) -> torch.Generator:
    """A generator seeded with a 32-bit hash of name and seed, since torch's CPU generator ignores the higher bits."""
    return torch.Generator().manual_seed(zlib.crc32(f"{seed} {name}".encode()))


def _distribution(name: str, shape: Shape) -> tuple[float, float]:
    """Mean and standard deviation by the tensor's role."""
    owner, leaf = name.split(".")[-2:]
    if leaf == "initialized":
        return 1.0, 0.0
    if leaf == "cluster_usage":
        return 1.0, 0.1  # not exactly 1, so that a reader that forgets to divide by it gives wrong results
    if leaf in ("embed_sum", "embedding_sum"):
        return 0.0, 2 / math.sqrt(shape[-1])
    if leaf in ("gamma", "scale"):
        return 0.1, 0.02
    if leaf in ("alpha", "beta"):
        return 0.0, 0.1
    if "norm" in owner and leaf == "weight":
        return 1.0, 0.1
    if leaf == "bias":
        return 0.0, 0.02
    if "embedding" in name:
        return 0.0, 0.05
    if "codec_head" in name or "lm_head" in name:
        return 0.0, HEAD_LOGIT_STD / math.sqrt(shape[-1])
    spread = 1 / math.sqrt(_fan_in(name, shape))
    if name.startswith("decoder.decoder.") and ".conv2." in name:
        spread *= RESIDUAL_GAIN
    return 0.0, spread * WAVEFORM_GAIN if name == LAST_CODEC_CONV else spread


def _fan_in(name: str, shape: Shape) -> int:
    """The number of inputs summed into one output value; weights of deviation 1/sqrt(number) keep the variance."""
    if len(shape) == 3 and ".upsample." in name and "dwconv" not in name:
        return shape[0]  # transposed, kernel = stride: one tap reaches each output
    if len(shape) == 3 and name.startswith("decoder.decoder.") and ".block.1." in name:
        return 2 * shape[0]  # transposed, kernel = 2 * stride: two taps
    return math.prod(shape[1:])


def widen_margins(tensors: dict[str, Tensor], config: ModelConfig, eos_after: int | None = None) -> None:
    """Rewrites talker and predictor in place so that every greedy choice wins by a wide margin.

    A talker code is a pair (step, word): the step follows the previous one in a fixed cycle; the word follows the
    text embedding of this frame, which has one of TEXT_CLASSES values (token id modulo that). Each later code is a
    permutation of the previous one. Attention and MLPs still contribute, but little. Runs that differ in summation
    order therefore agree code for code, and runs with different text do not. eos_after: end-of-speech wins after
    that many steps of the cycle since the prompt. Raises CheckpointError for less than 2."""
    if eos_after is not None and eos_after < 2:
        raise CheckpointError(f"eos_after must be at least 2 frames (upstream forbids earlier ends), found {eos_after}")
    generator = _generator("margins", 0)
    shrink_branches(tensors, "talker.model.", config.talker, 1.0)
    shrink_branches(tensors, "talker.code_predictor.model.", config.predictor, GROUP_RMS)
    _rewrite_talker(tensors, config, generator, eos_after)
    _rewrite_predictor(tensors, config, generator)


def shrink_branches(tensors: dict[str, Tensor], prefix: str, stack: StackConfig, input_rms: float) -> None:
    """Scales attention and MLPs of one stack to about 0.15 of its residual stream in total, at any depth."""
    gain = 0.15 * input_rms / math.sqrt(2 * stack.num_hidden_layers)
    for i in range(stack.num_hidden_layers):
        for leaf in ("self_attn.o_proj", "mlp.down_proj"):
            tensors[f"{prefix}layers.{i}.{leaf}.weight"] *= gain


def _rewrite_talker(
    tensors: dict[str, Tensor], config: ModelConfig, generator: torch.Generator, eos_after: int | None
) -> None:
    """Rewrites the talker, where code c is the pair (step, word) = (c // TEXT_CLASSES, c % TEXT_CLASSES)."""
    width, size = config.talker.hidden_size, config.predictor.vocab_size
    count = size // TEXT_CLASSES
    classes = torch.randn(TEXT_CLASSES, config.text_hidden_size, generator=generator)
    text = tensors["talker.model.text_embedding.weight"]
    text.copy_(classes.to(text.dtype)[torch.arange(config.text_vocab_size) % TEXT_CLASSES])
    projected = _project_text(tensors, classes)
    spread = (projected - projected.mean(0)).square().mean().sqrt()
    for leaf in ("weight", "bias"):
        tensors[f"talker.text_projection.linear_fc2.{leaf}"] /= spread  # text rows vary with standard deviation 1
    projected = _project_text(tensors, classes)
    cycle = torch.randperm(count, generator=generator)
    order, before = torch.empty_like(cycle), torch.empty_like(cycle)  # step s is followed by order[s]
    order[cycle] = cycle.roll(-1)
    before[order] = torch.arange(count)
    words = F.normalize(projected - projected.mean(0), dim=-1)  # directions of the projected text
    # One orthonormal basis for words and for marks, which encode a code's word in its embedding, so that neither
    # affects the choice of the step.
    basis = torch.linalg.qr(torch.cat([words, torch.randn(TEXT_CLASSES + 1, width, generator=generator)]).T).Q
    marks = basis[:, TEXT_CLASSES : 2 * TEXT_CLASSES].T
    rows = torch.randn(count, width, generator=generator)
    steps = F.normalize(rows - rows @ basis @ basis.T, dim=-1)
    step, word = torch.arange(size) // TEXT_CLASSES, torch.arange(size) % TEXT_CLASSES
    embedding, head = tensors["talker.model.codec_embedding.weight"], tensors["talker.codec_head.weight"]
    embedding[:size] = (math.sqrt(width) * (steps[step] + 0.7 * marks[word])).to(embedding.dtype)
    embedding[config.codec_ids.bos] = (math.sqrt(width) * steps[0]).to(embedding.dtype)
    gain = PEAK_LOGIT / math.sqrt(width)
    head[:size] = (gain * (steps[before[step]] + words[word])).to(head.dtype)
    head[size:] = 0
    if eos_after is not None:
        last = torch.tensor(0)
        for _ in range(eos_after):
            last = order[last]
        head[config.codec_ids.eos] = (4 * gain * steps[last]).to(head.dtype)


def _rewrite_predictor(tensors: dict[str, Tensor], config: ModelConfig, generator: torch.Generator) -> None:
    root, width, size = "talker.code_predictor.", config.predictor.hidden_size, config.predictor.vocab_size
    projection = tensors.get(root + "small_to_mtp_projection.weight")
    source = tensors["talker.model.codec_embedding.weight"][:size]
    for group in range(NUM_CODEBOOKS - 1):
        seen = source.float() if projection is None else source.float() @ projection.float().T
        head = tensors[f"{root}lm_head.{group}.weight"]
        successor = torch.randperm(size, generator=generator)
        head[successor] = (2 * PEAK_LOGIT / math.sqrt(width) * F.normalize(seen, dim=-1)).to(head.dtype)
        source = tensors[f"{root}model.codec_embedding.{group}.weight"]
        # small, so that the sum of sixteen embeddings keeps the direction of the embedding of code 0
        source.copy_(GROUP_RMS * torch.randn(source.shape, generator=generator))


def _project_text(tensors: dict[str, Tensor], rows: Tensor) -> Tensor:
    first, second = (
        [tensors[f"talker.text_projection.linear_fc{i}.{leaf}"].float() for leaf in ("weight", "bias")] for i in (1, 2)
    )
    return F.linear(F.silu(F.linear(rows, *first)), *second)
