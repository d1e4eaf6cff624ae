"""The lanes of a CUDA device for a checkpoint, sized by the memory that is free."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from functools import partial
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from mktts.batch.cuda.codec import CudaCodec
from mktts.batch.cuda.memory import LaneMemory
from mktts.batch.settings import BatchSettings
from mktts.checkpoint import Checkpoint
from mktts.codec.decoder import CodecDecoder, PrimedStates
from mktts.engine.scheduler import TickSettings
from mktts.errors import BackendUnavailable, CapacityError

if TYPE_CHECKING:
    from mktts.batch.cuda.lanes import CudaLanes

_STREAMS = 2_048
_PART = 0.8  # of what is free: graphs, the working memory of prompts and whatever else runs need some
_STATES_PART = 0.25  # of that, at most, for what every stream has whether it speaks or not


def cuda_lanes(
    checkpoint: Checkpoint,
    device: torch.device,
    dtype: torch.dtype,
    settings: BatchSettings,
    deterministic: bool | None = None,
    embeddings: Mapping[str, Tensor] | None = None,
) -> CudaLanes:
    """Lanes whose graphs are recorded. embeddings: the codebooks' tables by Hub name, where the device has them. Raises
    BackendUnavailable where triton is missing, CapacityError where the memory does not hold one stream."""
    try:
        from mktts.batch.cuda.lanes import CudaLanes
    except ModuleNotFoundError:
        raise BackendUnavailable(
            "engine='batch' needs triton on a CUDA device, which comes with torch's CUDA builds: install one of those, "
            "or take engine='single'"
        ) from None
    config = checkpoint.config
    plain = partial(CodecDecoder, checkpoint.codec_config, checkpoint.codec_tensors(), device)
    decoder: CodecDecoder | None = plain()
    # A slot holds a state of the decoder, in fp16 with the fast precision, and one more place of keys and values.
    state_bytes = int(1.02 * decoder.start().bytes) // (1 if settings.codec == "full" else 2)
    each = LaneMemory.of(config, dtype, settings.positions, state_bytes)
    free = int(_PART * torch.cuda.mem_get_info(device)[0]) - each.tick - _weight_bytes(checkpoint, dtype)
    slots = settings.max_streams or max(1, min(_STREAMS, int(_STATES_PART * free / each.slot)))
    left = free - each.slot * (slots + 1) if settings.memory_bytes is None else settings.memory_bytes
    pages = left // each.page
    if pages < 2:
        raise CapacityError(
            f"the batch engine needs {each.bytes(slots, 2) >> 20} MiB for {slots} streams and one page of keys and "
            f"values, {max(free, 0) >> 20} MiB can be had: lower BatchSettings(max_streams=...), or free the device"
        )
    codec = CudaCodec(lambda: decoder, slots + 1, settings.codec)
    decoder = None
    lanes = CudaLanes(
        config,
        {**checkpoint.tensors(), **(embeddings or {})},
        device,
        dtype,
        slots=slots,
        positions=min(settings.positions, config.talker.max_position_embeddings),
        pages=int(pages),
        codec=codec,
        primed=lambda: PrimedStates(plain()),
        settings=TickSettings.h200(slots),
        deterministic=deterministic is not False,
    )
    lanes.prepare()
    logging.getLogger(__name__).info(
        "batch engine: %d streams, %d pages of 64 positions (%.1f GiB), codec in %s precision",
        slots, pages, pages * each.page / 2**30, settings.codec,
    )  # fmt: skip
    return lanes


def _weight_bytes(checkpoint: Checkpoint, dtype: torch.dtype) -> int:
    """Of talker and predictor. The text table stays in its file; its rows as prompts have them are one of ours."""
    tensors = checkpoint.tensors()
    names = (name for name in tensors if name.startswith("talker.") and "text_embedding" not in name)
    texts = len(tensors["talker.model.text_embedding.weight"]) * checkpoint.config.talker.hidden_size
    return (sum(tensors[name].numel() for name in names) + texts) * dtype.itemsize
