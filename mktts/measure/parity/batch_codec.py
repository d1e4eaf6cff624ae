"""The codec of many streams in one pass, against one pass of plain fp32 operators over each stream, on the CPU."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor

from mktts.checkpoint import Checkpoint
from mktts.codec.decoder import CodecDecoder
from mktts.measure.parity.budget import Budget
from mktts.measure.parity.codec import frame_errors, random_codes, snr_db

# Signal-to-noise ratio that a precision must have. At full size products of two fp16 halves gave 88 dB, fp16 in the
# waveform blocks 54; "plain" is fp32 operators in another order.
LEAST_SNR_DB = {"full": 80.0, "fast": 50.0, "plain": 100.0}
STREAMS = 4  # that are compared, spread over the lanes
FRAMES = 80  # beyond the codec's attention window of 72
_LEAST_FRAMES = 8
_MOST_LANES = 64

Decode = Callable[[Tensor], Tensor]  # codes (lanes, 16) int64, the next frame of every lane -> pcm (lanes, 1920)


def codec_errors(
    checkpoint: Checkpoint, kernel: str, device: str, sizes: Sequence[int], budget: Budget | None = None
) -> dict[str, Any]:
    """lanes, frames, asked, passed, and for each precision snr_db (None where equal, sample for sample), max_error (of
    full scale 1) and least_db.

    kernel: "torch" measures PyTorch's lanes, as "plain", anything else both precisions of a CUDA device. sizes: a pass
    has as many lanes as the largest, at most 64. Where the budget is short, fewer frames are decoded.
    """
    whole = CodecDecoder(checkpoint.codec_config, checkpoint.codec_tensors())
    lanes = min(max(sizes), _MOST_LANES)
    codes = torch.stack([random_codes(FRAMES, seed, whole.config.codebook_size) for seed in range(lanes)])
    compared = sorted({(lanes - 1) * i // (STREAMS - 1) for i in range(STREAMS)})
    begun_s = time.perf_counter()
    whole.decode_all(codes[0, :_LEAST_FRAMES])
    frame_s = (time.perf_counter() - begun_s) / _LEAST_FRAMES
    left_s = (budget or Budget()).left_s
    affordable = max(0.0, left_s) / (2 * len(compared) * frame_s)  # half of the time is the device's
    frames = int(max(_LEAST_FRAMES, min(FRAMES, affordable)))
    expected = [whole.decode_all(codes[lane, :frames]) for lane in compared]
    found: dict[str, Any] = {"lanes": lanes, "frames": frames, "asked": FRAMES}
    for precision in ("plain",) if kernel == "torch" else ("full", "fast"):
        decode = (
            _plain(checkpoint, device, lanes) if kernel == "torch" else _fused(checkpoint, device, lanes, precision)
        )
        pcm = torch.stack([decode(codes[:, frame])[compared].float().cpu() for frame in range(frames)], 1).flatten(1)
        joined, truth = pcm.flatten(), torch.cat(expected)
        equal = torch.equal(joined, truth)
        found[precision] = {
            "equal": equal,
            "snr_db": None if equal else snr_db(joined, truth),
            "max_error": float(frame_errors(joined, truth).max()),
            "least_db": LEAST_SNR_DB[precision],
        }
    of_each = [value for value in found.values() if isinstance(value, dict)]
    found["passed"] = all(value["equal"] or value["snr_db"] >= value["least_db"] for value in of_each)
    return found


def _plain(checkpoint: Checkpoint, device: str, lanes: int) -> Decode:
    from mktts.batch.plain.codec import CodecLanes

    codec = CodecLanes(CodecDecoder(checkpoint.codec_config, checkpoint.codec_tensors(), device), lanes)
    return partial(codec.decode, [codec.start() for _ in range(lanes)])


def _fused(checkpoint: Checkpoint, device: str, lanes: int, precision: str) -> Decode:
    from mktts.batch.cuda.codec import CudaCodec

    where = torch.device(device)
    decoder = partial(CodecDecoder, checkpoint.codec_config, checkpoint.codec_tensors(), where)
    codec = CudaCodec(decoder, lanes + 1, precision)
    codec.compile([lanes])
    slots = torch.arange(lanes, dtype=torch.int32, device=where)
    for slot in range(lanes):
        codec.enter(slot, None)
    return lambda codes: codec.decode(codes.to(where, torch.int32), slots)
