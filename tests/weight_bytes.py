"""The size of a safetensors file, from the format alone."""

from __future__ import annotations

import json

from mktts.checkpoint.tensors import TensorSpecs


def file_bytes(specs: TensorSpecs, dtype: str, metadata: dict[str, str] | None) -> int:
    """Size of the safetensors file that holds `specs`: compact JSON in name order, padded to 8, then the data."""
    header: dict[str, object] = {"__metadata__": metadata} if metadata else {}
    end = 0
    for name, spec in sorted(specs.items()):
        start, end = end, end + spec.nbytes(dtype)
        header[name] = {"dtype": dtype, "shape": list(spec.shape), "data_offsets": [start, end]}
    text = json.dumps(header, separators=(",", ":"))
    return 8 + (len(text) + 7) // 8 * 8 + end
