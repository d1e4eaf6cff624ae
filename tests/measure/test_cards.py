"""`cards` without a card: its models, its rows, and what it says where the kernel cannot run."""

from __future__ import annotations

import argparse
import json
import re
import shutil
import sys
from pathlib import Path

import pytest
import torch

from mktts.kernel.build import CSRC, Card, fingerprint
from mktts.measure import cards
from mktts.measure.cards import CASES, Model, run
from mktts.model.oracle import TorchBackend


def arguments(output: Path, **given: str) -> argparse.Namespace:
    known = {"models": "small", "cards": None, "compile_only": False, "output": output}
    return argparse.Namespace(**{**known, **given})


@pytest.fixture(scope="module")
def model():
    return Model.make("small", "cpu")


def test_the_small_voices_shapes_have_margins_wider_than_bf16s_rounding(model):
    assert model.codes.shape == (cards.FRAMES, 16) and len(model.codes[:, 0].unique()) > cards.FRAMES // 2
    found = run(TorchBackend(model.config, model.tensors, "cpu", torch.bfloat16), model.prompt)
    assert torch.equal(found.codes, model.codes) and len(found.steps_ms) == cards.FRAMES
    assert 1e-4 < model.bf16_error < 0.05


def test_rows_in_the_wrong_place_show_in_the_error_where_margins_hide_them(model):
    name = "talker.model.layers.2.self_attn.o_proj.weight"
    rows = model.tensors[name].roll(64, 0)  # as if sums went to other owners
    wrong = TorchBackend(model.config, model.tensors | {name: rows}, "cpu", torch.bfloat16)
    assert torch.equal(run(wrong, model.prompt, cards.FORCED_FRAMES).codes, model.codes[: cards.FORCED_FRAMES])
    assert cards.error_of(cards._observed(wrong, model.prompt), model.exact) > 1.5 * model.bf16_error


def test_every_case_is_a_card_that_a_grid_fits():
    assert {card.multiprocessors for card in CASES.values()} == {16, 24, 46, 48, 58, 84, 108, 114, 128, 170}
    assert set(cards.CARDS_OF_1P7B) <= set(CASES)
    assert {CASES[card].shared_bytes for card in cards.CARDS_OF_1P7B} == {99 * 1024}  # what a ring of two stages needs
    hopper = Card.like("sm_90a", 132)
    assert list(cards._cards("0.6b", hopper, None)) == [cards.OWN, *CASES]
    assert list(cards._cards("1.7b", hopper, None)) == [cards.OWN, *cards.CARDS_OF_1P7B]
    assert list(cards._cards("1.7b", Card.like("sm_89", 58), ["RTX 4090", "L4"])) == ["L4"]


def test_the_document_has_a_row_a_case_and_the_status_says_whether_all_were_equal(model, monkeypatch, tmp_path, capsys):
    def case_of(model: Model, card: Card) -> dict:
        if card.multiprocessors == 24:
            raise RuntimeError("no such thing")
        same = {"arch": card.arch, "multiprocessors": card.multiprocessors, "blocks": 16, "shared_bytes": 1}
        return {**same, "equal": True, "frames": cards.FRAMES, "error_ratio": 1.0, "frame_ms": 2.0}

    monkeypatch.setattr(cards, "kernel_missing", lambda: None)
    monkeypatch.setattr(cards, "card_of", lambda device: Card.like("sm_90a", 114))
    monkeypatch.setattr(cards, "head", lambda device: {"device": "a card", "revision": "abc"})
    monkeypatch.setattr(Model, "make", lambda name: model)
    monkeypatch.setattr(cards, "case_of", case_of)
    output = tmp_path / "cards.json"
    assert cards.main(arguments(output)) == 1
    document = json.loads(output.read_text())
    rows = document["cases"]
    assert [row["card"] for row in rows] == [cards.OWN, *CASES]
    assert [row["card"] for row in rows if not row["equal"]] == ["RTX 4060"]
    assert {(row["revision"], row["kernel"]) for row in rows} == {("abc", fingerprint())}
    assert "no such thing" in rows[2]["error"] and "no such thing" in capsys.readouterr().out
    again = arguments(output, cards="L4,RTX 3070")  # takes their places; the others' rows stay
    assert cards.main(again) == 0
    assert [row["card"] for row in json.loads(output.read_text())["cases"]][-2:] == ["L4", "RTX 3070"]
    assert len(json.loads(output.read_text())["cases"]) == len(rows)
    monkeypatch.setattr(cards, "fingerprint", lambda: "another kernel")
    assert cards.main(again) == 0
    assert len(json.loads(output.read_text())["cases"]) == 2


def test_a_case_that_does_not_end_is_in_the_document_before_it_begins(monkeypatch, tmp_path):
    output, seen, limits = tmp_path / "cards.json", [], []

    def case_of(model: Model, card: Card) -> dict:
        seen.append(json.loads(output.read_text())["cases"][-1])
        raise RuntimeError

    monkeypatch.setattr(cards.faulthandler, "dump_traceback_later", lambda limit_s, exit, file: limits.append(limit_s))
    monkeypatch.setattr(cards, "kernel_missing", lambda: None)
    monkeypatch.setattr(cards, "card_of", lambda device: Card.like("sm_90a", 132))
    monkeypatch.setattr(cards, "head", lambda device: {"revision": "abc"})
    monkeypatch.setattr(Model, "make", lambda name: None)
    monkeypatch.setattr(cards, "case_of", case_of)
    assert cards.main(arguments(output, cards="L4")) == 1
    assert [(row["card"], row["equal"], row["error"]) for row in seen] == [("L4", False, "no end within 180 s")]
    assert set(limits) == {cards.CASE_S}


@pytest.mark.skipif(sys.platform == "darwin", reason="NVRTC has no package for macOS")
def test_kernels_for_other_cards_are_compiled_without_a_gpu(monkeypatch, tmp_path, capsys):
    monkeypatch.setenv("MKTTS_CACHE", str(tmp_path))
    monkeypatch.setattr(cards, "kernel_missing", lambda: "no CUDA device")
    assert cards._compile([("tiny-projected", "L4", CASES["L4"])]) == 0
    assert re.search(r"tiny-projected +L4 +compute_89", capsys.readouterr().out)
    (image,) = (
        path for path in (tmp_path / "kernels").glob("compute_89-*.image") if b"mktts_frames" in path.read_bytes()
    )
    assert image.read_bytes().startswith(b"//")  # PTX


def test_a_kernels_fingerprint_leaves_out_comments_alone(tmp_path):
    csrc = tmp_path / "csrc"
    shutil.copytree(CSRC, csrc)
    before, ring = fingerprint(), csrc / "ring.cuh"
    ring.write_text("// More words.\n" + ring.read_text())
    assert fingerprint(csrc) == before
    ring.write_text(ring.read_text().replace("copies < RING", "copies <= RING"))
    assert fingerprint(csrc) != before


def test_an_unknown_model_is_named(monkeypatch, tmp_path):
    monkeypatch.setattr(cards, "kernel_missing", lambda: None)
    monkeypatch.setattr(cards, "card_of", lambda device: Card.like("sm_90a", 132))
    with pytest.raises(cards.MetricsError, match="small, tiny-projected, 1.7b, got huge"):
        cards.main(arguments(tmp_path / "cards.json", models="huge"))
    with pytest.raises(cards.MetricsError, match="--cards takes this card, RTX 3050 .*, got H200"):
        cards.main(arguments(tmp_path / "cards.json", cards="L4,H200"))
