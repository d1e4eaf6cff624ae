"""Triton kernel of the talker's input rows: those of lanes, from their slots, and those of prompts, by address."""

import triton
import triton.language as tl

from mktts.kernel.rows import rms


@triton.jit(do_not_specialize=["lane_count", "nobody", "capacity"])
def inputs(
    slots, fresh, ends, text, prompt_slots, prompt_positions, prompt_rows, positions, frames, ended, seen,
    embedding_sum, row_slot, row_pos, x, h, norm_weight, eps, lane_count, nobody, capacity,
    H: tl.constexpr, V: tl.constexpr, SIZE: tl.constexpr,
):  # fmt: skip
    """Program (row): the row's slot and position, its input x and the norm of that, h (rows, H).

    Rows before `lane_count` are the lanes': x = round(sum of the newest frame's embeddings) + text row, at the slot's
    next position. A lane at its first frame (`fresh`) has no such row, its prompt's rows ride behind; its slot begins
    anew: behind `ends` rows, no frames, no code seen, not ended. A lane whose slot has ended, or is full, has none
    either. What has no row works on zeros at position 0 of the slot that is nobody's; so do prompt rows without an
    address. The first seven arguments are parts of the tick's block; positions, frames, ended (slots,) int32, seen
    (slots, V) uint8, embedding_sum (slots, H) fp32.
    """
    T: tl.constexpr = x.dtype.element_ty
    row = tl.program_id(0).to(tl.int64)
    c = tl.arange(0, H)
    sums = tl.zeros((H,), tl.float32)
    if row < lane_count:
        slot = tl.load(slots + row)
        begins = tl.load(fresh + row) != 0
        position = tl.load(positions + slot)
        idle = begins | (tl.load(ended + slot) != 0) | (position >= capacity)
        address = tl.where(idle, 0, tl.load(text + row))
        sums = tl.load(embedding_sum + slot * H + c, mask=(c < H) & ~idle, other=0.0)
        tl.store(row_slot + row, tl.where(idle, nobody, slot.to(tl.int32)))
        tl.store(row_pos + row, tl.where(idle, 0, position))
        if begins:
            tl.store(positions + slot, tl.load(ends + row).to(tl.int32))
            tl.store(frames + slot, 0)
            tl.store(ended + slot, 0)
            i = tl.arange(0, SIZE)
            tl.store(seen + slot * V + i, tl.zeros((SIZE,), tl.uint8), mask=i < V)
        else:
            tl.store(positions + slot, tl.where(idle, position, position + 1))
    else:
        at = row - lane_count
        address = tl.load(prompt_rows + at)
        tl.store(row_slot + row, tl.load(prompt_slots + at).to(tl.int32))
        tl.store(row_pos + row, tl.load(prompt_positions + at).to(tl.int32))
    source = address.to(tl.pointer_type(T))
    value = sums.to(T).to(tl.float32) + tl.load(source + c, mask=(c < H) & (address != 0), other=0.0).to(tl.float32)
    value = value.to(T).to(tl.float32)
    tl.store(x + row * H + c, value.to(T))
    tl.store(h + row * H + c, rms(value, tl.load(norm_weight + c).to(tl.float32), eps, T, H))
