"""A cloned voice: what a Base checkpoint extracts from a reference recording (`mktts.synth.cloning`), in one file."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from mktts.common import write_whole
from mktts.errors import VoiceError
from mktts.spec import CODEBOOK_SIZE, NUM_CODEBOOKS

_FORMAT = "mktts-voice-1"


@dataclass(frozen=True, eq=False)
class Voice:
    """A speaker embedding (x-vector), and for in-context cloning also the reference's codes and transcript, which are
    part of every prompt."""

    embedding: Tensor  # (H,) floating, on the CPU; H is the talker's hidden size
    codes: Tensor | None  # (T, 16) int64, on the CPU
    transcript: str | None
    model_size: str  # of the checkpoint that made the voice: "0b6" or "1b7"

    def __post_init__(self) -> None:
        embedding, codes = self.embedding, self.codes
        if not (isinstance(embedding, Tensor) and embedding.dim() == 1 and embedding.is_floating_point()):
            raise VoiceError(f"embedding must be a floating tensor (H,), got {_describe(embedding)}")
        if not embedding.isfinite().all():
            raise VoiceError("embedding must be finite, found NaN or infinity")
        if (codes is None) != (self.transcript is None):
            raise VoiceError("codes and transcript go together: give both (in-context) or neither (x-vector)")
        if codes is None:
            return
        shaped = isinstance(codes, Tensor) and codes.dim() == 2 and codes.shape[1] == NUM_CODEBOOKS and len(codes)
        if not shaped or codes.dtype != torch.int64:
            raise VoiceError(f"codes must be int64 (T >= 1, {NUM_CODEBOOKS}), got {_describe(codes)}")
        if codes.min() < 0 or codes.max() >= CODEBOOK_SIZE:
            raise VoiceError(f"codes must be in 0..{CODEBOOK_SIZE - 1}, found {int(codes.min())}..{int(codes.max())}")
        if not isinstance(self.transcript, str) or not self.transcript.strip():
            raise VoiceError("transcript must be what the reference says, got an empty text")

    @cached_property
    def digest(self) -> str:
        """Hexadecimal SHA-256 of everything but `model_size`: equal voices have equal digests; computed once."""
        content = hashlib.sha256(repr(self.transcript).encode())
        for tensor in (self.embedding, self.codes):
            if tensor is not None:
                content.update(f"{tensor.dtype} {tuple(tensor.shape)} ".encode())
                content.update(tensor.detach().cpu().contiguous().view(torch.uint8).numpy())
        return content.hexdigest()

    def save(self, path: Path | str, notes: str = "", mode: int = 0o644) -> Path:
        """Writes one safetensors file, completely or not at all. notes: free text for the header. mode: permissions."""
        from safetensors.torch import save

        tensors = {"embedding": self.embedding.contiguous()}
        header = {"format": _FORMAT, "model_size": self.model_size}
        if self.codes is not None:
            tensors["codes"] = self.codes.contiguous()
            header["transcript"] = str(self.transcript)
        if notes:
            header["notes"] = notes
        return write_whole(path, save(tensors, header), mode)

    @staticmethod
    def notes(path: Path | str) -> str:
        """The `notes` passed to `save`, "" if none. Reads only the header. Raises VoiceError."""
        with _opened(path) as file:
            return (file.metadata() or {}).get("notes", "")

    @classmethod
    def load(cls, path: Path | str) -> Voice:
        """Reads a file written by `save`. Raises VoiceError for anything else."""
        with _opened(path) as file:
            header = file.metadata() or {}
            tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118  not a dict
        if header.get("format") != _FORMAT or "embedding" not in tensors:
            found = f"format {header.get('format')!r} with tensors {sorted(tensors)[:5]}"
            raise VoiceError(f"{path}: expected a file made by Voice.save (format {_FORMAT}), found {found}")
        try:
            return cls(tensors["embedding"], tensors.get("codes"), header.get("transcript"), header["model_size"])
        except (VoiceError, KeyError) as error:
            raise VoiceError(f"{path}: {error}") from None


@contextmanager
def _opened(path: Path | str) -> Iterator[Any]:
    from safetensors import SafetensorError, safe_open

    try:
        with safe_open(path, framework="pt") as file:
            yield file
    except (OSError, SafetensorError) as error:
        raise VoiceError(f"{path}: expected a file made by Voice.save, could not read it: {error}") from None


def _describe(value: Any) -> str:
    return f"{value.dtype} {tuple(value.shape)}" if isinstance(value, Tensor) else type(value).__name__
