"""Whether the megakernel computes what it should, as rows for a table: measured here, or committed from an H200."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from mktts.errors import OptionsError


def parity_rows(document: Mapping[str, Any] | None, otherwise: str) -> list[dict[str, Any]]:
    """One row per checkpoint and one for text; a single row saying `otherwise` where there is no document.

    Errors are relative rms errors to fp32, the kernel's over those of bf16 PyTorch (`ratio`).
    """
    if document is None:
        return [{"kernel parity": otherwise}]
    rows = [_parity_row(source, found, document) for source, found in document["checkpoints"].items()]
    rows += [row for source, found in document["checkpoints"].items() for row in _batch_rows(source, found)]
    if text := document.get("text"):
        rows.append(_text_row(text))
    return rows


def codec_rows(
    here: Sequence[Mapping[str, Any]], committed: Mapping[str, Any] | None, otherwise: str
) -> list[dict[str, Any]]:
    """Rows of `measure.parity.codec.serving_error`, measured here and committed; one saying `otherwise` where none is
    committed."""
    rows = [("here", row) for row in here] + [("committed", row) for row in (committed or {}).get("rows", ())]
    shown = [
        {
            "measured": where,
            "codec": f"{row['codec']} ({row['weights']} weights)",
            "served on": row["served_on"],
            "frames": row["frames"],
            "max error": row["max_error"],
            "SNR (dB)": row["snr_db"],
        }
        for where, row in rows
    ]
    return shown if committed else [*shown, {"measured": otherwise}]


def parity_here(kernel: str, frames: int) -> dict[str, Any] | None:
    """A small run of `mktts.measure.parity.kernel` on the tiny random checkpoint, wide margins included; None for
    "none".

    kernel: "megakernel" (CUDA), or "torch", which puts the bf16 oracle in the kernel's place on the CPU.
    """
    if kernel not in ("none", "megakernel", "torch"):
        raise OptionsError(f"KERNEL must be auto, none, megakernel or torch, got {kernel!r}")
    if kernel == "none":
        return None
    from mktts.measure.environment import head
    from mktts.measure.parity.kernel import Scope, parity_of
    from mktts.measure.parity.ratio import LIMIT

    device, source = "cuda" if kernel == "megakernel" else "cpu", "random:tiny"
    found = parity_of(source, Scope((16, 200), frames, 4 * frames), kernel, device)
    return {
        **head(device),
        "kernel": kernel,
        "limit": LIMIT,
        "settings": {"random_weights": True},
        "checkpoints": {source: found},
        "passed": found["passed"],
    }


def parity_metrics(document: Mapping[str, Any] | None) -> dict[str, bool | int | float | str]:
    """What a notebook records of its own run."""
    if document is None:
        return {"kernel": "none"}
    found = list(document["checkpoints"].values())
    ratios = [value["ratio"] for part in found if "forced" in part for value in part["forced"]["pooled"].values()]
    return {
        "kernel": document["kernel"],
        "kernel_passed": document["passed"],
        "kernel_frames_equal": sum(part["exact"]["frames"] for part in found if "exact" in part),
        **({"kernel_error_ratio": max(ratios)} if ratios else {}),
    }


def _parity_row(source: str, found: Mapping[str, Any], document: Mapping[str, Any]) -> dict[str, Any]:
    row: dict[str, Any] = {"checkpoint": source, "kernel": document["kernel"], "passed": found["passed"]}
    if "forced" in found:
        forced = found["forced"]
        row["frames forced"] = sum(forced["frames"].values())
        row |= {f"{name}: ratio": value["ratio"] for name, value in forced["pooled"].items()}
        for name, side in forced["total_variation"].items():
            row[f"total variation, {name}"] = f"{side['kernel']['mean']:.4f} (bf16 {side['bf16']['mean']:.4f})"
    if "divergence" in found:
        row["first divergence"] = _divergence(found["divergence"])
    if "exact" in found:
        exact = found["exact"]
        ended = ", then both end" if exact["equal"] and exact.get("ended") else ""
        row["frames equal (wide margins)"] = f"{exact['frames']} of {exact['asked']}{ended}"
    if found.get("errors"):
        row["errors"] = "; ".join(f"{name}: {reason}" for name, reason in found["errors"].items())
    return row


def _batch_rows(source: str, found: Mapping[str, Any]) -> list[dict[str, Any]]:
    """One row for every mode of the batched frame that was compared."""
    rows = []
    for mode, compared in found.get("batch", {}).items():
        if not isinstance(compared, Mapping) or "forced" not in compared:
            continue
        forced, free, exact = compared["forced"], compared["free"], compared.get("exact")
        passed = all(part["passed"] for part in compared.values())
        row = {"checkpoint": source, "kernel": f"batch, {mode}", "passed": passed}
        row["frames forced"] = sum(forced["frames"].values())
        row |= {f"{name}: ratio": value["ratio"] for name, value in forced["pooled"].items()}
        why = "all explained by rounding" if free["passed"] else "NOT all explained by rounding"
        row["first divergence"] = f"{len(free['differences'])} of {free['streams']} streams: {why}"
        if exact:
            row["frames equal (wide margins)"] = f"{exact['equal']} of {exact['frames']}"
        rows.append(row)
    return rows


def _divergence(found: Mapping[str, Any]) -> str:
    if not found["diverged"]:
        return f"none in {found['frames']} frames"
    why = "rounding explains it" if found["explained"] else "NOT explained by rounding"
    return f"frame {found['frame']}, codebook {found['codebook']}: {why}"


def _text_row(found: Mapping[str, Any]) -> dict[str, Any]:
    row: dict[str, Any] = {"checkpoint": f"text, {found['source']}", "passed": found["passed"]}
    if "ordinary" in found:
        row["logits of text tokens: ratio"] = found["ordinary"]["errors"]["logits"]["ratio"]
    if "margin" in found:
        row["tokens equal (wide margins)"] = f"{found['margin']['equal']} of {found['margin']['tokens']}"
    if "error" in found:
        row["errors"] = found["error"]
    return row
