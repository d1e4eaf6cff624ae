"""The codec as a CUDA device serves it (fused kernels, in graphs) against one pass of plain fp32 operators on the CPU.

python -c "from mktts.measure.parity import serving_codec; serving_codec.write('outputs/reference/h200/codec.json')"
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from mktts.checkpoint import open_checkpoint
from mktts.codec.decoder import CodecDecoder
from mktts.codec.graphs import codec_for
from mktts.common import write_json
from mktts.measure.environment import head
from mktts.measure.parity.codec import decode_streamed, frame_errors, random_codes, snr_db

SOURCES = ("small", "random:0.6b")  # the trained codec in the box, and the released size with random weights
SCHEDULE = (1, 1, 2, 4, 8)
COMMAND = (
    "python -c \"from mktts.measure.parity import serving_codec as s; s.write('outputs/reference/h200/codec.json')\""
)


def serving_error(
    source: str, frames: int = 80, seed: int = 0, schedule: Sequence[int] = SCHEDULE, device: str = "cuda"
) -> dict[str, Any]:
    """One row: `frames` seeded random codes, streamed by the codec that serves on `device`, against the one fp32 pass.

    max_error: largest absolute sample error, full scale 1. snr_db: signal to noise. Raises CheckpointError,
    BackendUnavailable.
    """
    checkpoint = open_checkpoint(source)
    config, tensors = checkpoint.codec_config, checkpoint.codec_tensors()
    codes = random_codes(frames, seed, config.codebook_size)
    expected = CodecDecoder(config, tensors).decode_all(codes)
    found = decode_streamed(codec_for(config, tensors, device), codes, schedule).float().cpu()
    weights = "random" if checkpoint.is_random else "trained"
    return {
        "codec": source,
        "weights": weights,
        "served_on": device,
        "frames": frames,
        "max_error": float(frame_errors(found, expected).max()),
        "snr_db": snr_db(found, expected),
    }


def document(sources: Sequence[str] = SOURCES, device: str = "cuda") -> dict[str, Any]:
    """A row of `serving_error` for each source, and the machine (`environment.head`)."""
    return {**head(device), "rows": [serving_error(source, device=device) for source in sources]}


def write(path: Path | str) -> None:
    """Measures on the CUDA device of this machine and writes the document to `path`."""
    write_json(Path(path), document())
