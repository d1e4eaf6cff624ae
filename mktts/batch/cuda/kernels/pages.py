"""Triton kernels that bring the host's book of pages to the device: rows of the table, copies between pages."""

import triton
import triton.language as tl


@triton.jit(do_not_specialize=["columns"])
def set_table(changes, table, columns, COLUMNS: tl.constexpr):
    """Program (change): table (slots, columns) int32 gets a row. changes (n, 1 + columns) int32: slot, then its row."""
    change = changes + tl.program_id(0).to(tl.int64) * (columns + 1)
    slot = tl.load(change).to(tl.int64)
    i = tl.arange(0, COLUMNS)
    tl.store(table + slot * columns + i, tl.load(change + 1 + i, mask=i < columns), mask=i < columns)


@triton.jit
def copy_rows(copies, pages, D: tl.constexpr, PAGE: tl.constexpr):
    """Program (copy, part): the first rows of one page's keys, or values, of one layer and head.

    copies (n, 3) int32: source, target, rows. pages (pages, parts, PAGE, D).
    """
    copy = copies + 3 * tl.program_id(0).to(tl.int64)
    part, parts = tl.program_id(1), tl.num_programs(1)
    source = (tl.load(copy).to(tl.int64) * parts + part) * PAGE * D
    target = (tl.load(copy + 1).to(tl.int64) * parts + part) * PAGE * D
    e = tl.arange(0, PAGE * D)
    live = e < tl.load(copy + 2) * D
    tl.store(pages + target + e, tl.load(pages + source + e, mask=live), mask=live)
