"""Device memory of the frame kernel's weights: the table of csrc/README.md, which this file writes anew where it
is run as a program. They are made on torch's meta device, where a tensor has a shape and no memory."""

import re
from pathlib import Path

import torch

from mktts.checkpoint import open_checkpoint
from mktts.checkpoint.tensors import expected_tensors
from mktts.kernel.grid import choose_shape
from mktts.kernel.tape import model_weights
from mktts.measure.inspection import config_at
from mktts.spec import ModelConfig

README = Path(__file__).resolve().parents[2] / "csrc" / "README.md"
TABLE = re.compile(
    r"(?<=<!-- memory: written by tests/kernel/test_memory\.py -->\n).*?(?=\n<!-- end of memory -->)", re.DOTALL
)
WEIGHTS = {  # row of the table -> what the names in csrc/state.cuh, struct Params, end in
    "talker tape": ("talker_tape",),
    "predictor tape": ("predictor_tape",),
    "heads": ("head_tape",),
    "code embeddings": ("embeddings0", "embeddings"),
    "projection into the predictor, embeddings projected": ("projection_tape", "_bias", "inputs0", "inputs"),
    "rotary tables, norms": ("_cos", "_sin", "_norms", "_qk", "_final"),
}


def account(config: ModelConfig) -> dict[str, int]:
    """Row -> bytes, on 132 multiprocessors."""
    shape, specs = choose_shape(config, 132), expected_tensors(config)
    projected = "talker.code_predictor.small_to_mtp_projection.weight" in specs
    made = {name: torch.empty(spec.shape, dtype=torch.bfloat16, device="meta") for name, spec in specs.items()}
    weights = model_weights(shape, made.__getitem__, projected)
    held = {id(t): (name, t.nbytes) for name, t in reversed(weights.items())}  # of one with two names its first
    found = {row: sum(n for name, n in held.values() if name.endswith(ends)) for row, ends in WEIGHTS.items()}
    assert sum(found.values()) == sum(n for _, n in held.values())
    return {**found, "all of them": sum(found.values())}


def computed() -> str:
    configs = {"small": open_checkpoint("small").config, "0.6B": config_at("0.6b"), "1.7B": config_at("1.7b")}
    found = [account(config) for config in configs.values()]
    lines = [["MiB", *configs], ["---", *["---:"] * len(configs)]]
    lines += [[row, *(f"{held[row] / 2**20:,.1f}" for held in found)] for row in found[0]]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def test_the_readme_of_csrc_has_the_table():
    assert TABLE.search(README.read_text(encoding="utf-8"))[0] == computed()


if __name__ == "__main__":
    README.write_text(TABLE.sub(lambda _: computed(), README.read_text(encoding="utf-8")), encoding="utf-8")
