"""The card that a kernel is built for: its architecture, its multiprocessors, a block's shared memory."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass, replace

import torch

from mktts.errors import BackendUnavailable
from mktts.kernel.nvrtc import known_architectures

# Architecture -> shared memory a block may have, bytes (CUDA programming guide, compute capabilities).
TARGETS = {
    "sm_80": 163 * 1024,
    "sm_86": 99 * 1024,
    "sm_87": 163 * 1024,
    "sm_89": 99 * 1024,
    "sm_90a": 227 * 1024,
    "sm_100": 227 * 1024,
    "sm_103": 227 * 1024,
    "sm_110": 227 * 1024,
    "sm_120": 99 * 1024,
    "sm_121": 99 * 1024,
}


@dataclass(frozen=True)
class Card:
    """What decides how a kernel is built.

    arch: of TARGETS, compiled to machine code; or compute_86, say: PTX, which the driver translates for any card of
    that compute capability or a later one. shared_bytes: that one block may have.
    """

    arch: str
    multiprocessors: int
    shared_bytes: int

    @classmethod
    def like(cls, arch: str, multiprocessors: int) -> Card:
        """Any card of one architecture, by its name in TARGETS or as compute_..."""
        return cls(arch, multiprocessors, TARGETS[arch.replace("compute_", "sm_")])


def card_of(device: torch.device) -> Card:
    """The CUDA device's. Raises BackendUnavailable as `target_of`."""
    properties = torch.cuda.get_device_properties(device)
    card = Card.like(target_of((properties.major, properties.minor)), properties.multi_processor_count)
    own_bytes = getattr(properties, "shared_memory_per_block_optin", card.shared_bytes)
    return replace(card, shared_bytes=min(card.shared_bytes, own_bytes))


def target_of(capability: tuple[int, int], known: Collection[int] | None = None) -> str:
    """What to compile for: the capability itself, or PTX of the newest earlier one, where it or NVRTC's is not known.

    known: what NVRTC compiles for, as `known_architectures` has it, which is the default.
    Raises BackendUnavailable for a GPU before 8.0, and without NVRTC.
    """
    wanted = 10 * capability[0] + capability[1]
    if wanted < min(map(_number, TARGETS)):
        raise BackendUnavailable(
            f"the megakernel is built for compute capability 8.0 and later, this GPU's is "
            f"{capability[0]}.{capability[1]}: pass backend='torch'"
        )
    known = known_architectures() if known is None else known
    usable = {_number(name): name for name in TARGETS if _number(name) in known}
    if wanted in usable:
        return usable[wanted]
    # sm_90a's code is for that architecture alone
    earlier = [number for number, name in usable.items() if number < wanted and not name.endswith("a")]
    if not earlier:
        raise BackendUnavailable(
            f"this NVRTC compiles for none of {', '.join(TARGETS)}: install nvidia-cuda-nvrtc 12.8 or newer"
        )
    return f"compute_{max(earlier)}"


def _number(name: str) -> int:
    return int("".join(filter(str.isdigit, name)))
