"""The frame kernel compiles for every target, without a GPU, in grids of any size. On a GPU the paths of older and
smaller cards, as PTX on the card at hand: their blocks and shared memory, the same codes; with
$MKTTS_CARDS=outputs/reference/h100/architectures.json every such case that ran is put into that record."""

import ctypes
import os
import re
import struct
from dataclasses import replace
from functools import cache
from pathlib import Path

import other_cards as cards
import pytest
import torch
from absent import needs_nvrtc
from csrc_on_cpu import RINGS

from mktts.checkpoint import open_checkpoint
from mktts.checkpoint.open import SMALL
from mktts.errors import BackendUnavailable
from mktts.kernel import build as kernel_build
from mktts.kernel.build import SHARED, TARGETS, Build, Card, build_for, compile_kernel, target_of
from mktts.kernel.grid import EPS, FRAGMENTS, WARPS, choose_shape, choose_text_shape, layer_matrices
from mktts.kernel.launch import FRAME_WORDS, STATUS_WORDS, Params
from mktts.kernel.tape import MOST_POSITIONS, ROWS, RowsParams, UnpackParams
from mktts.measure.inspection import config_at
from mktts.measure.parity.kernel import KernelUnderTest
from mktts.model.oracle import TorchBackend
from mktts.spec import ModelConfig

SLOW, pytestmark = pytest.mark.slow, pytest.mark.timeout(600)  # a busy machine's compiler may need minutes
# The sources have three branches: below sm_90, sm_90a, above. In every run each kernel is compiled for one target of
# each, at a size that has a bound of its own; all targets and sizes, 5 to 15 s each, are slow.
EVERY_RUN = ("sm_80", "sm_90a", "sm_120")
GRIDS = {  # of smaller cards
    "0.6b": [("sm_86", 16), ("sm_86", 46), ("sm_86", 84), ("sm_89", 24), ("sm_89", 58), ("sm_87", 16), ("sm_121", 48)],
    "1.7b": [("sm_87", 16), ("sm_89", 24), ("sm_89", 58), ("sm_86", 84), ("sm_80", 108), ("sm_121", 48)],
}
model_of = cache(cards.Model.make)  # the fp32 run is the slowest part


def targets(*rest):
    """TARGETS, each with `rest` behind it where there is any; slow but those of EVERY_RUN."""
    return [
        pytest.param(arch, *rest, marks=() if arch in EVERY_RUN else SLOW, id="-".join((arch, *map(str, rest))))
        for arch in TARGETS
    ]


# Bytes of spill stores and loads together, bytes of the stack: the worst the pinned compiler gives, and a tenth. They
# are where codes are drawn and between matrices. sm_90a's consumers may have 232 registers, those of others 168.
SPILLED, SPILLED_90A = (2_210, 425), (690, 220)
SPILLED_SMALL = (4_750, 810)  # of grids of fewer blocks, whose matrices have more rows

# Multiprocessors of cards that exist, the README's among them.
CARDS = {
    "sm_80": (56, 108),  # A30, A100
    "sm_86": (16, 28, 46, 84),  # RTX 3050 mobile, 3060, 3070, A6000
    "sm_87": (16,),  # Jetson Orin
    "sm_89": (24, 46, 58, 76, 128, 142),  # RTX 4060, 4070, L4, 4080, 4090, L40S
    "sm_90a": (114, 132),  # H100 on PCIe, H100
    "sm_100": (148,),
    "sm_103": (160,),
    "sm_110": (20,),  # Thor
    "sm_120": (30, 48, 170),  # RTX 5060, 5070, 5090
    "sm_121": (48,),  # DGX Spark
}


def defines(size: str, multiprocessors: int = 132) -> dict[str, int]:
    return {**choose_shape(config_of(size), multiprocessors).defines, "RING": 2}


def text_defines(size: str, multiprocessors: int = 132) -> dict[str, int]:
    """Of a model with the stack of a talker and a text vocabulary."""
    stack = replace(config_of(size).talker, vocab_size=151_936)
    return {**choose_text_shape(stack, multiprocessors).defines, "RING": 2}


def config_of(size: str) -> ModelConfig:
    return open_checkpoint(size).config if size == SMALL else config_at(size)


def numbers_said(pattern: str, build: Build) -> list[int]:
    return [int(number) for number in re.findall(pattern, build.log)]


@pytest.mark.parametrize(
    ("arch", "size", "unit", "multiprocessors"),
    [
        *targets("0.6b", "frame.cu", 132),
        *targets("0.6b", "text.cu", 132),
        *(pytest.param("sm_90a", size, "frame.cu", 132, marks=SLOW) for size in ("1.7b", "tiny-projected", SMALL)),
        *(pytest.param("sm_86", size, "frame.cu", 132, marks=SLOW) for size in ("1.7b", SMALL)),
        *(pytest.param(arch, size, "frame.cu", n, marks=SLOW) for size, grids in GRIDS.items() for arch, n in grids),
    ],
)
@needs_nvrtc
def test_the_kernels_compile_for_every_target(arch, size, unit, multiprocessors):
    most = SPILLED_SMALL if multiprocessors < 132 else SPILLED_90A if arch == "sm_90a" else SPILLED
    multiprocessors = 108 if arch == "sm_80" else multiprocessors  # an A100's: 104 blocks, with a remainder
    shape = defines(size, multiprocessors) if unit == "frame.cu" else text_defines(size)
    build = compile_kernel(shape, arch, unit)
    assert build.image[:4] == b"\x7fELF"
    assert build.constants == compile_kernel(shape, arch, SHARED).constants
    stack = numbers_said(r"(\d+) bytes stack frame", build)
    assert stack and 0 < max(numbers_said(r"Used (\d+) registers", build)) <= 255
    found = sum(numbers_said(r"(\d+) bytes spill", build)), sum(stack)
    assert all(spilled <= limit for spilled, limit in zip(found, most, strict=True)), found


# Of the shared headers, which compile at once. A wait for a copy that the ring cannot tell from the next has no end.
@pytest.mark.parametrize("size", ["0.6b", "1.7b", SMALL, "tiny-projected"])
@needs_nvrtc
def test_the_ring_fills_a_cards_shared_memory_and_has_no_more_copies_under_way_than_stages(size):
    different = {}
    for card in (Card.like(arch, count) for arch, counts in CARDS.items() for count in counts):
        speech = choose_shape(config_of(size), card.multiprocessors)
        # The sources have a branch for sm_90a and one for what is newer; within a branch these are all they see.
        branch = card.arch == "sm_90a", card.arch.startswith("sm_1")
        different[*branch, card.shared_bytes, speech.blocks] = card, speech
    for card, speech in different.values():
        known = build_for(speech.defines, card, SHARED).constants
        ring = known["ring"]
        assert ring >= 2
        assert 1 <= known["talker_copies"] <= ring and 1 <= known["predictor_copies"] <= ring
        # The CPU runs a frame with this ring and these copies; five stages and more take any of them.
        assert (ring, known["talker_copies"]) in {pair[:2] for pair in RINGS} or ring >= 5
        assert known["shared_bytes"] <= card.shared_bytes
        if size not in ("0.6b", "1.7b"):  # Qwen3 text models have the stacks of these talkers
            continue
        assert card.shared_bytes - known["stage_bytes"] < known["shared_bytes"]
        known = build_for(text_defines(size, card.multiprocessors), card, SHARED).constants
        assert 1 <= known["layer_copies"] <= known["ring"] and 1 <= known["head_copies"] <= known["ring"]


@pytest.mark.parametrize(
    ("arch", "unit", "size", "multiprocessors"),
    [
        *targets("unpack.cu", "tiny-projected", 132),
        *targets("unpack.cu", "1.7b", 132),
        *targets("rows.cu", "tiny", 132),
        ("sm_90a", "rows.cu", "1.7b", 132),
        pytest.param("sm_80", "rows.cu", "1.7b", 132, marks=SLOW),
        *(pytest.param("sm_89", "rows.cu", size, 58, marks=SLOW) for size in ("0.6b", "1.7b")),
    ],
)
@needs_nvrtc
def test_the_kernels_of_prompts_compile_for_every_target(arch, unit, size, multiprocessors):
    shape = choose_shape(config_at(size), multiprocessors)
    build = compile_kernel(shape.defines, arch, unit)
    threads, structure = (512, UnpackParams) if unit == "unpack.cu" else (256, RowsParams)
    assert 0 < max(numbers_said(r"Used (\d+) registers", build)) <= min(65_536 // threads, 255)  # of a multiprocessor
    # 224 bytes are stored and loaded at 56 blocks, where a block multiplies 224 rows of gates and ups
    assert sum(numbers_said(r"(\d+) bytes spill", build)) <= (256 if size == "1.7b" and multiprocessors < 132 else 0)
    elements = sum(matrix.elements for matrix in layer_matrices(shape.talker, shape.group).values())
    ours = {"layer_bytes": 2 * elements, "params_bytes": ctypes.sizeof(structure)}
    ours |= {"rows": ROWS, "most_keys": MOST_POSITIONS} if unit == "rows.cu" else {}
    assert build.constants == ours


# Warps a block: eight that multiply and one that feeds the ring; a whole warpgroup where registers are handed over.
@pytest.mark.parametrize(("arch", "warps"), [("sm_80", 9), ("sm_90a", 12), ("sm_120", 9), ("compute_89", 9)])
@pytest.mark.parametrize("size", ["tiny-projected", "1.7b"])
@needs_nvrtc
def test_python_and_the_kernel_hold_the_same_constants(arch, warps, size):
    build = compile_kernel(defines(size), arch, SHARED)
    eps = struct.unpack("<I", struct.pack("<f", EPS))[0]
    ours = {"params_bytes": ctypes.sizeof(Params), "warps": WARPS, "fragments": FRAGMENTS, "eps": eps}
    ours |= {"status_words": STATUS_WORDS, "frame_words": FRAME_WORDS, "threads": 32 * warps}
    assert {name: build.constants[name] for name in ours} == ours
    assert (b".target sm_89" in build.image) == (arch == "compute_89")  # PTX, which the driver translates


@needs_nvrtc
def test_a_target_without_room_for_two_stages_is_named_with_what_lacks():
    defines = choose_shape(config_at("0.6b"), 132).defines
    least_bytes = compile_kernel({**defines, "RING": 2}, "sm_90a", SHARED).constants["shared_bytes"]
    with pytest.raises(BackendUnavailable, match=rf"{least_bytes} bytes of shared memory .* {least_bytes - 1}, 1 too"):
        build_for(defines, Card("sm_90a", 132, least_bytes - 1))


@needs_nvrtc
def test_a_build_comes_from_the_cache_is_made_anew_where_that_is_damaged_and_needs_none(monkeypatch, tmp_path, capsys):
    (tmp_path / "kernels").write_text("a file where the folder would be")
    monkeypatch.setenv("MKTTS_CACHE", str(tmp_path))
    assert compile_kernel(defines("tiny"), "sm_90a", "unpack.cu").image
    assert "could not be kept" in capsys.readouterr().err
    (tmp_path / "kernels").unlink()
    assert compile_kernel(defines("tiny"), "sm_90a", "unpack.cu")
    (about,) = tmp_path.glob("kernels/*.json")
    for content in ('{"log": "", "registers": 255}', "{"):  # of another version, and cut off
        about.write_text(content)
        first = compile_kernel(defines("tiny"), "sm_90a", "unpack.cu")
    monkeypatch.setattr(kernel_build, "compile_source", lambda *a: pytest.fail("compiled again"))
    assert compile_kernel(defines("tiny"), "sm_90a", "unpack.cu") == first


@needs_nvrtc
def test_a_refused_source_shows_the_compilers_words():
    with pytest.raises(BackendUnavailable, match="error"):
        compile_kernel({**defines("tiny"), "HD": 20}, "sm_90a")


def test_a_missing_source_folder_is_named_and_a_missing_compiler_says_what_to_install(tmp_path, monkeypatch):
    with pytest.raises(BackendUnavailable, match=str(tmp_path)):
        kernel_build.source(folder=tmp_path)
    monkeypatch.setattr(kernel_build, "_candidates", lambda: ["libnothing.so.0"])
    with pytest.raises(BackendUnavailable, match="pip install nvidia-cuda-nvrtc"):
        kernel_build.nvrtc.__wrapped__()


# Compute capability; what NVRTC knows, ten times each; what is compiled for.
@pytest.mark.parametrize(
    ("capability", "known", "target"),
    [
        ((8, 0), (80, 86), "sm_80"),
        ((9, 0), (80, 89, 90), "sm_90a"),
        ((12, 1), (80, 90, 120, 121), "sm_121"),
        ((12, 1), (80, 90, 100, 120), "compute_120"),  # NVRTC 12.8
        ((8, 8), (80, 86, 87, 88, 89), "compute_87"),  # none of TARGETS, though NVRTC knows it
        ((10, 0), (80, 86, 87, 89, 90), "compute_89"),  # sm_90a's PTX runs on 9.0 alone
        ((15, 0), (80, 90, 100, 103, 110, 120, 121, 130), "compute_121"),
    ],
)
def test_targets_follow_the_compute_capability_and_what_the_compiler_knows(capability, known, target):
    assert target_of(capability, known) == target


@pytest.mark.parametrize(("capability", "known", "said"), [((7, 5), (75, 80), "7.5"), ((8, 0), (75,), "12.8 or newer")])
def test_a_gpu_or_a_compiler_that_is_too_old_is_named(capability, known, said):
    with pytest.raises(BackendUnavailable, match=said):
        target_of(capability, known)


@needs_nvrtc
def test_this_compiler_knows_every_target():
    assert [target_of((n // 10, n % 10)) for n in (80, 86, 87, 89, 90, 100, 103, 110, 120, 121)] == list(TARGETS)


# ---- grids of any size: how many blocks there are, and which rows each is dealt


# Multiprocessors -> blocks; H100 and H200 have 132.
@pytest.mark.parametrize(
    ("multiprocessors", "blocks"),
    [(16, 16), (20, 16), (24, 24), (28, 24), (46, 40), (48, 48), (58, 56), (76, 64), (84, 80), (108, 104), (128, 128)]
    + [(132, 128), (142, 128), (148, 128), (170, 128), (188, 128)],
)
@pytest.mark.parametrize("size", ["0.6b", "1.7b"])
def test_the_grid_leaves_few_multiprocessors_idle_unless_more_would_only_read_more(size, multiprocessors, blocks):
    assert choose_shape(config_at(size), multiprocessors).blocks == blocks
    assert 2 * min(multiprocessors, 170) <= 3 * blocks  # not a third idle


def test_no_block_of_a_grid_is_without_rows():
    """Who reads a buffer is known to have read it by what it sends next: a block that sends nothing is not known."""
    stack = replace(config_at("tiny").talker, hidden_size=256, head_dim=64)
    few = replace(stack, intermediate_size=2 * 4 * 11)  # 44 pairs over 16 blocks: 3 each, and none for the last
    assert all(
        (shape.group - 1) * dealt.each < dealt.total
        for multiprocessors in range(8, 130)
        for shape in [choose_text_shape(few, multiprocessors)]
        for dealt in layer_matrices(few, shape.group).values()
    )
    assert choose_text_shape(few, 32).group != 16


@pytest.mark.parametrize(
    ("multiprocessors", "changes", "said"),
    [
        (4, {}, "needs 16 multiprocessors .* has 4, 12 too few"),
        (132, {"hidden_size": 1_022}, "hidden size of 1022"),
        (132, {"intermediate_size": 3_080}, "feed-forward of 3080"),
        (132, {"head_dim": 80}, "80 wide"),
        (132, {"num_attention_heads": 64}, "8 query heads"),
    ],
)
def test_a_device_too_small_and_dimensions_that_fit_no_grid_are_named(multiprocessors, changes, said):
    with pytest.raises(BackendUnavailable, match=said):
        choose_text_shape(replace(config_at("0.6b").talker, **changes), multiprocessors)


# ---- other cards


def test_the_small_voices_shapes_have_margins_wider_than_bf16s_rounding_that_hide_rows_in_the_wrong_place():
    """Which show in the error."""
    model = cards.Model.make("small", "cpu")
    assert model.codes.shape == (cards.FRAMES, 16) and len(model.codes[:, 0].unique()) > cards.FRAMES // 2
    codes, steps_ms = cards.run(model.oracles[0], model.prompt)
    assert torch.equal(codes, model.codes) and len(steps_ms) == cards.FRAMES
    assert 1e-4 < cards.errors_of(model, KernelUnderTest(model.oracles[0]).frames(model.first))[1] < 0.05
    name = "talker.model.layers.2.self_attn.o_proj.weight"
    rows = model.tensors[name].roll(64, 0)  # as if sums went to other owners
    wrong = TorchBackend(model.config, model.tensors | {name: rows}, "cpu", torch.bfloat16)
    assert torch.equal(cards.run(wrong, model.prompt, cards.FORCED_FRAMES)[0], model.codes[: cards.FORCED_FRAMES])
    assert cards.error_ratio(model, KernelUnderTest(wrong).frames(model.first)) > 1.5


@pytest.mark.gpu
@pytest.mark.timeout(240)
@pytest.mark.parametrize(
    ("name", "card"),
    [
        pytest.param(name, card, id=f"{name}-{card}")
        for name in cards.MODELS
        for card in cards.CASES
        if name != "1.7b" or card in cards.CARDS_OF_1P7B
    ],
)
def test_another_cards_code_and_grid_give_the_oracles_codes(name, card):
    model, chosen = model_of(name), cards.CASES[card]
    blocks = choose_shape(model.config, chosen.multiprocessors).blocks
    if blocks > torch.cuda.get_device_properties().multi_processor_count:
        pytest.skip(f"needs {blocks} multiprocessors")
    if path := os.environ.get("MKTTS_CARDS"):
        cards.record_case(Path(path), name, card, {"equal": False, "error": "it failed, or did not end"})
    found = cards.case_of(model, chosen)
    if path:
        cards.record_case(Path(path), name, card, found)
    assert found["equal"] and found["frames"] == cards.FRAMES, found
    assert found["error_ratio"] <= 1.25, found
    assert found["blocks"] <= chosen.multiprocessors and found["shared_bytes"] <= chosen.shared_bytes
