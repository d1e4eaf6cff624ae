"""What a launch of the frame kernel is given and what it hands back: csrc/state.cuh in ctypes."""

from __future__ import annotations

import ctypes
from dataclasses import asdict

import torch
from torch import Tensor

from mktts.model.sampling import Choice

STATUS_WORDS = 16  # int32, at the start of a stream's pinned memory; the frames follow
MADE = 0  # status word: frames made so far
ENDED = 1  # status word: whether speech ended
STOP = 2  # status word, written by the host: make no further frame
FRAME_WORDS = (
    20  # int32: 16 codes, nanoseconds of the talker with code 0, of the predictor, whether a code is no number
)
# What a block that gave up was waiting for, by the number it leaves in its status (csrc/exchange.cuh).
WAITS = {
    1: "exchange words",
    3: "partial sums",
    5: "weights",
    6: "query, key and value words",
    7: "the host's answer",
    8: "the end of an earlier copy of weights",
    9: "the end of the last copies of weights",
}

_POINTERS = """
    talker_tape talker_head_tape projection_tape predictor_tape predictor_head_tape projection_bias
    talker_norms talker_qk talker_final predictor_norms predictor_qk predictor_final
    talker_cos talker_sin predictor_cos predictor_sin embeddings0 embeddings inputs0 inputs
    exchange status debug_logits debug_hidden trace
""".split()


def _words(choice: Choice) -> dict[str, float]:
    """The fields of a choice by csrc's names: `greedy` in the place of `do_sample`."""
    given = asdict(choice)
    return {"greedy": int(not given.pop("do_sample")), **given}


def _twice(kind: type) -> list[str]:
    """csrc's names of the fields of `kind`, each of code 0 (and of a text's tokens) and of codes 1 to 15."""
    names = [name for name, value in _words(Choice()).items() if isinstance(value, kind)]
    if kind is int:  # csrc has the newest whole number first
        names.reverse()
    return [name + book for name in names for book in ("0", "")]


class StreamParams(ctypes.Structure):
    """csrc/state.cuh, struct Stream."""

    _fields_ = (
        [(name, ctypes.c_void_p) for name in ("rows", "hidden", "sum", "kv", "seen", "out")]
        + [(name, ctypes.c_int) for name in ("slots", "position", "frame", *_twice(int))]
        + [(name, ctypes.c_float) for name in (*_twice(float), "penalty")]
        + [(name, ctypes.c_uint) for name in ("seed_lo", "seed_hi", "token")]
    )


class Params(ctypes.Structure):
    """csrc/state.cuh, struct Params."""

    _fields_ = (
        [(name, ctypes.c_void_p) for name in _POINTERS]
        + [("stream", StreamParams), ("timeout_ns", ctypes.c_ulonglong), ("tag", ctypes.c_uint)]
        + [("frames", ctypes.c_int), ("ends", ctypes.c_int * 4)]
        + [(name, ctypes.c_int) for name in ("suppress_from", "min_frames", "prefill")]
    )


def point(structure: ctypes.Structure, tensors: dict[str, Tensor | None]) -> None:
    """Sets the pointers named by `tensors`; None leaves one null."""
    for name, tensor in tensors.items():
        setattr(structure, name, None if tensor is None else tensor.data_ptr())


def set_choice(stream: StreamParams, choice: Choice, book0: bool) -> None:
    """The settings of code 0 (and of a text's tokens), or of codes 1 to 15."""
    for name, value in _words(choice).items():
        setattr(stream, name + "0" * book0, value)


def pinned_words(frames: int) -> Tensor:
    """Memory of the host that a launch of `frames` frames writes into: (words,) int32, zeros."""
    return torch.zeros(STATUS_WORDS + frames * FRAME_WORDS, dtype=torch.int32, pin_memory=True)
