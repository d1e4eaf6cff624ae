"""How fast the voice speaks: streams one at a time, on this machine."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from mktts.measure.metrics import percentiles
from mktts.speech.metrics import summarise

Figures = dict[str, Any]


def speed_figures(
    checkpoint: str, device: str, texts: Sequence[str], speakers: Sequence[str], count: int, layout: str | None
) -> Figures:
    """RTF and audible TTFC (mktts.speech.metrics) of `count` warm streams, one at a time, alone on the machine."""
    import torch

    from mktts.synth import Synthesizer
    from mktts.synth.synthesizer import default_cpu_threads

    with Synthesizer.load(checkpoint, backend="torch", device=device) as synthesizer:
        synthesizer.warm_up()
        found = []
        for i in range(count):
            speaker = speakers[i % len(speakers)]
            found.append(summarise(synthesizer.stream(texts[i % len(texts)], speaker=speaker, seed=i, layout=layout)))
        threads = default_cpu_threads(synthesizer.checkpoint) or torch.get_num_threads()
    audible = [m.audible_ttfc_ms for m in found if m.audible_ttfc_ms is not None]
    return {
        "rtf": percentiles(m.rtf for m in found),
        "ttfc_ms": percentiles(m.ttfc_ms for m in found),
        "audible_ttfc_ms": percentiles(audible) if audible else None,
        "never_audible": count - len(audible),
        "underruns": sum(m.underruns for m in found),
        "backend": "torch",
        "device": device,
        "threads": threads,
    }
