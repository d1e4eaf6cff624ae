"""The matrices of a frame at the released sizes, as fixed-order products take them."""

from __future__ import annotations

from mktts.batch.cuda.tiles import Kind

RELEASED = [
    (kind, columns, depth)
    for hidden, inner in ((1_024, 3_072), (2_048, 6_144))
    for kind, columns, depth in (
        (Kind.LINEAR, 4_096, hidden),
        (Kind.JOINED, hidden, 2_048),
        (Kind.GATED, inner, hidden),
        (Kind.JOINED, hidden, inner),
        (Kind.LINEAR, 3_072, hidden),
    )
]
