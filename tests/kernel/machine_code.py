"""What a kernel's machine code does with local memory, read out of the cubin without a disassembler.

An instruction is 16 bytes, its opcode the low 12 bits. NVIDIA documents neither; the numbers are those that cuobjdump
shows, the same from sm_80 to sm_120. `tight_loops` refuses a branch that leads out of the code, so that a compiler
with another encoding is noticed.
"""

import struct

import pytest

from mktts.errors import BackendUnavailable
from mktts.kernel.build import nvrtc

LOADS, STORES = {0x983}, {0x387, 0x987}  # LDL and STL, the second with a base in a uniform register: local memory
BRANCHES = {0x947, 0x547}  # the second on a uniform predicate
CALLS, PRODUCTS = {0x943, 0x944}, {0x23C}  # absolute and relative; HMMA, a product on tensor cores
# Instructions from a loop's end back to its start. Polls, waits for the ring and the positions of attention are far
# below; the loops over layers, codes and frames, in which the matrix products lie unrolled, are thousands.
TIGHT = 256
ASIDE = 32  # instructions at most that a poll leaves out but once in 256 times: the call that looks at the clock


def code_of(cubin: bytes) -> list[int]:
    """The first 64 bits of every instruction: an ELF64 file's executable sections, one behind the other."""
    (table,) = struct.unpack_from("<Q", cubin, 40)
    size, count = struct.unpack_from("<HH", cubin, 58)
    words: list[int] = []
    for i in range(count):
        _, kind, flags, _, offset, length = struct.unpack_from("<IIQQQQ", cubin, table + i * size)
        if kind == 1 and flags & 4:  # SHT_PROGBITS, SHF_EXECINSTR
            words += [first for first, _ in struct.iter_unpack("<QQ", cubin[offset : offset + length])]
    return words


def jump(word: int, arch: str) -> int:
    """Instructions from a branch's successor to its target. Until sm_89 bytes, then 32-bit words, in two pieces."""
    if arch in ("sm_80", "sm_86", "sm_87", "sm_89"):
        value, bits, unit = word >> 32, 32, 16
    else:
        value, bits, unit = word >> 34 << 8 | word >> 16 & 0xFF, 38, 4
    return (value - (value >> bits - 1 << bits)) // unit


def tight_loops(code: list[int], arch: str) -> list[range]:
    """Indices of the instructions of each. A branch to itself is none: it fills up the end of a function."""
    loops = []
    for at, word in enumerate(code):
        if word & 0xFFF not in BRANCHES:
            continue
        target = at + 1 + jump(word, arch)
        assert 0 <= target < len(code), f"{arch}: a branch at {at} leads to {target} of {len(code)}: another encoding?"
        if at - TIGHT < target < at:
            loops.append(range(target, at + 1))
    return loops


def local_in_tight_loops(code: list[int], arch: str) -> list[int]:
    """Indices of loads from and stores to local memory: spilled registers, and variables whose address is taken.

    Left out: loops over whole matrices, and what a poll does only when it has waited long (`aside`).
    """
    inside: set[int] = set()
    for loop in tight_loops(code, arch):
        if not any(code[at] & 0xFFF in PRODUCTS for at in loop):  # matrices one after another: a few times a layer
            inside.update(at for at in loop if code[at] & 0xFFF in LOADS | STORES)
            inside.difference_update(aside(code, loop, arch))
    return sorted(inside)


def aside(code: list[int], loop: range, arch: str) -> set[int]:
    """What a loop's forward branches leave out together with a call."""
    found: set[int] = set()
    for at in loop:
        if code[at] & 0xFFF in BRANCHES:
            over = range(at + 1, at + 1 + jump(code[at], arch))
            if len(over) <= ASIDE and any(code[i] & 0xFFF in CALLS for i in over):
                found.update(over)
    return found


def _nvrtc_is_there() -> bool:
    try:
        nvrtc()
    except BackendUnavailable:
        return False
    return True


# It has no package for macOS.
needs_nvrtc = pytest.mark.skipif(not _nvrtc_is_there(), reason="needs the package nvidia-cuda-nvrtc")
