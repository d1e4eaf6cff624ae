"""A stack's weights as the batched frame reads them: row-major matrices for cuBLAS, q, k, v and gate, up joined."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from mktts.model.qwen3 import Qwen3Stack
from mktts.spec import NUM_CODEBOOKS, ModelConfig, StackConfig

EMBEDDINGS = ("talker.model.codec_embedding.weight",) + tuple(
    f"talker.code_predictor.model.codec_embedding.{g}.weight" for g in range(NUM_CODEBOOKS - 1)
)  # the codebooks' tables by Hub name


@dataclass(frozen=True)
class StackWeights:
    """One decoder stack. Matrices are (out, in); `cos`, `sin` (positions, head_dim / 2) are of the first half."""

    config: StackConfig
    input_norm: list[Tensor]
    qkv: list[Tensor]
    q_norm: list[Tensor]
    k_norm: list[Tensor]
    o: list[Tensor]
    post_norm: list[Tensor]
    gate_up: list[Tensor]
    down: list[Tensor]
    norm: Tensor
    cos: Tensor
    sin: Tensor

    @classmethod
    def of(cls, stack: Qwen3Stack, positions: int) -> StackWeights:
        """Takes over the weights of `stack`, which is not to be used afterwards."""
        layers = [stack.layer_weights(i) for i in range(stack.config.num_hidden_layers)]
        half = stack.config.head_dim // 2
        cos, sin = (t[:, :half].contiguous() for t in stack.rotary(0, positions))
        return cls(
            config=stack.config,
            input_norm=[w.input_norm for w in layers],
            qkv=[w.qkv for w in layers],
            q_norm=[w.q_norm for w in layers],
            k_norm=[w.k_norm for w in layers],
            o=[w.o.contiguous() for w in layers],
            post_norm=[w.post_norm for w in layers],
            gate_up=[w.gate_up for w in layers],
            down=[w.down.contiguous() for w in layers],
            norm=stack.norm,
            cos=cos,
            sin=sin,
        )


@dataclass(frozen=True)
class FrameWeights:
    """All that a frame reads: both stacks, the heads, the embeddings of all codebooks, the projection if there is one.

    embeddings[g] holds the rows of codebook g; heads[g] gives codebook g, head 0 being the talker's.
    """

    talker: StackWeights
    predictor: StackWeights
    heads: list[Tensor]
    embeddings: list[Tensor]
    projection: tuple[Tensor, Tensor] | None
    eos: int

    @classmethod
    def load(
        cls,
        config: ModelConfig,
        tensors: Mapping[str, Tensor],
        device: torch.device,
        dtype: torch.dtype,
        positions: int,
        embeddings: list[Tensor] | None = None,
    ) -> FrameWeights:
        """`tensors` by Hub name. positions: of the longest stream. embeddings: the codebooks' tables where another
        backend has them on the device already, so that they are there once."""

        def get(name: str) -> Tensor:
            return tensors[name].to(device, dtype)

        groups = range(NUM_CODEBOOKS - 1)
        if embeddings is None:
            embeddings = [get(name) for name in EMBEDDINGS]
        projection = "talker.code_predictor.small_to_mtp_projection."
        projected = projection + "weight" in tensors
        return cls(
            talker=StackWeights.of(Qwen3Stack(config.talker, tensors, "talker.model.", device, dtype), positions),
            predictor=StackWeights.of(
                Qwen3Stack(config.predictor, tensors, "talker.code_predictor.model.", device, dtype), NUM_CODEBOOKS
            ),
            heads=[get("talker.codec_head.weight")]
            + [get(f"talker.code_predictor.lm_head.{g}.weight") for g in groups],
            embeddings=embeddings,
            projection=(get(projection + "weight"), get(projection + "bias")) if projected else None,
            eos=config.codec_ids.eos,
        )
