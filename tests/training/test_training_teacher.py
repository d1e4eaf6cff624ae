"""Teachers: Kokoro's parts, any program, recordings; shards of what they say."""

import lzma
import sys
import wave

import numpy as np
import pytest
import torch

from mktts.errors import BackendUnavailable, CheckpointError, TextError
from mktts.training.data import kokoro
from mktts.training.data.audio import read_shard
from mktts.training.data.kokoro import Phonemes
from mktts.training.data.teacher import Item, make_shards, program, read_texts

WORDS = {
    "cat": "kˈæt", "wait": "wˈAt", "apple": "ˈæpᵊl", "live": {"DEFAULT": "lˈɪv"}, "hope": "hˈOp", "bus": "bˈʌs",
    "Anna": "ˈænə", "that": {"DEFAULT": "ðæt", "None": "ðˈæt"}, "X": "ˈɛks", "Q": "kjˈu",
}  # fmt: skip
NUMBERS = {sign: i for i, sign in enumerate(" .,!?" + "".join(sorted({c for w in WORDS.values() for c in str(w)})), 1)}
# Says a tone as long as its text.
PROGRAM = """
import math, struct, sys, wave
with wave.open(sys.argv[2], "wb") as f:
    f.setnchannels(1); f.setsampwidth(2); f.setframerate(16000)
    n = 8000 + 100 * len(sys.argv[1])
    f.writeframes(struct.pack(f"<{n}h", *[int(9000 * math.sin(i * i / 40000)) for i in range(n)]))
"""


@pytest.mark.parametrize(
    ("text", "phonemes"),
    [
        ("The cat.", "ðə kˈæt."),
        ("the apple, to Anna", "ði ˈæpᵊl, tʊ ˈænə"),
        ("anna waited to", "ˈænə wˈATᵻd tu"),
        ("a bus, buses; hoping cats", "ɐ bˈʌs, bˈʌsᵻz; hˈOpɪŋ kˈæts"),
        ("that that", "ðæt ðˈæt"),
        ("I live, qx", "ˌI lˈɪv, kjˈuˈɛks"),
    ],
)
def test_words_become_phonemes_by_lists_endings_and_what_follows(text, phonemes):
    assert Phonemes(WORDS, NUMBERS).written(text) == phonemes


def test_phonemes_have_numbers_and_unknown_words_are_told():
    read = Phonemes(WORDS, NUMBERS)
    assert read("cat") == [NUMBERS[sign] for sign in "kˈæt"] and len(read("cat " * 300)) == 510
    assert read.knows("Cats wait, hoping!") and not read.knows("The cat sat.")


@pytest.mark.parametrize(
    ("node", "name"),
    [
        ("/encoder/F0.1/conv1x1/Conv_quant", "predictor.F0.1.conv1x1"),
        ("/encoder/shared/LSTM_quant", "predictor.shared"),
        ("/encoder/text_encoder/cnn.0/cnn.0.0/Conv_quant", "text_encoder.cnn.0.0"),
        ("/decoder/decoder/generator/ups.1/ConvTranspose", "decoder.generator.ups.1"),
        ("/encoder/bert/encoder/albert_layer_groups.0/albert_layers.0/ffn/MatMul_quant",
         "bert.encoder.albert_layer_groups.0.albert_layers.0.ffn"),
    ],
)  # fmt: skip
def test_nodes_of_the_model_have_the_names_of_its_modules(node, name):
    assert kokoro._module(node) == name


@pytest.mark.parametrize("activation", [0.2, torch.full((1, 4, 1), 1.5)], ids=["leaky", "snake"])
def test_a_longer_neighbour_changes_nothing_of_a_sentence(activation):
    x, gain, shift = torch.randn(2, 4, 30), torch.randn(2, 4, 1), torch.randn(2, 4, 1)
    mask = (torch.arange(30) < torch.tensor([[30], [12]])).float()[:, None]
    together = kokoro.normed(x, gain, shift, mask, activation)
    alone = kokoro.normed(x[1:, :, :12], gain[1:], shift[1:], mask[1:, :, :12], activation)
    assert torch.allclose(together[1, :, :12], alone[0], atol=1e-5) and not together[1, :, 12:].any()
    plain = torch.nn.functional.instance_norm(x[:1]) * (1 + gain[:1]) + shift[:1]
    if isinstance(activation, float):
        assert torch.allclose(together[:1], torch.nn.functional.leaky_relu(plain, activation), atol=1e-5)


def test_sentences_are_planned_by_length_and_come_back_in_their_order(monkeypatch):
    model, widths = kokoro.Kokoro({}), []

    def plan(phonemes, voices):
        zeros = torch.zeros(1)
        return [kokoro._Planned(zeros, zeros, zeros, len(p)) for p in phonemes]

    def vocode(plans, width, generator):
        widths.append((len(plans), width))
        return torch.stack([torch.full((width * kokoro.FRAME_SAMPLES,), float(p.frames)) for p in plans])

    monkeypatch.setattr(model, "_plan", plan)
    monkeypatch.setattr(model, "_vocode", vocode)
    found = model.speak([[1] * n for n in (5, 60, 33, 20)], [torch.zeros(1)] * 4, frames=130)
    assert [len(pcm) for pcm in found] == [n * kokoro.FRAME_SAMPLES for n in (5, 60, 33, 20)]
    assert [pcm[0] for pcm in found] == [5, 60, 33, 20] and widths == [(2, 64), (2, 32)]


def test_files_that_are_missing_or_others_are_named(tmp_path):
    with pytest.raises(CheckpointError, match="--fetch"):
        kokoro.load_kokoro(tmp_path, "cpu")
    with pytest.raises(CheckpointError, match="do not use it"):
        kokoro._checked("model", b"another", "0" * 64)


def test_shards_hold_what_was_said_at_the_speakers_level_and_are_kept(tmp_path):
    items = [Item(f"text {i}", ("anna", "bob")[i % 2]) for i in range(5)]
    seeds = []

    def speak(batch, seed):
        seeds.append((seed, len(batch)))
        return [np.full(12_000, 0.1, np.float32) if item.text != "text 2" else np.zeros(12_000) for item in batch]

    assert make_shards(tmp_path, items, speak, {"anna": 6.0, "bob": 0.0}, per=2) == 3
    assert seeds == [(0, 2), (1, 2), (2, 1)]
    first, second = (read_shard(tmp_path / f"shard{i:05}.npz") for i in range(2))
    assert [clip[:2] for clip in first] == [("text 0", "anna"), ("text 1", "bob")]
    assert [clip.text for clip in second] == ["text 3"]  # silence is left out
    assert first[0].pcm.max() / first[1].pcm.max() == pytest.approx(2, rel=0.01)
    (tmp_path / "shard00001.npz").unlink()
    assert make_shards(tmp_path, items, speak, {"anna": 6.0, "bob": 0.0}, per=2) == 1 and seeds[3:] == [(1, 2)]


def test_any_program_is_a_teacher_and_its_failure_is_named(tmp_path):
    (tmp_path / "say.py").write_text(PROGRAM)
    (pcm,) = program(f"{sys.executable} {tmp_path}/say.py {{text}} {{wav}}")([Item("four", "anna")], 0)
    assert len(pcm) == 8_400 * 3 // 2 and 0.2 < np.abs(pcm).max() < 0.3
    with wave.open(str(tmp_path / "r.wav"), "wb") as file:
        file.setnchannels(1), file.setsampwidth(2), file.setframerate(24_000), file.writeframes(b"\x00\x10" * 90)
    (pcm,) = program(f"cat {tmp_path}/{{name}}.wav")([Item("x", "anna", name="r")], 0)
    assert len(pcm) == 90
    with pytest.raises(BackendUnavailable, match="expected false to say 'hello'"):
        program("false {text}")([Item("hello", "anna")], 0)


def test_lists_are_read_and_recordings_by_their_names(tmp_path):
    (tmp_path / "t.xz").write_bytes(lzma.compress(b"One.\nTwo.\n"))
    assert read_texts(tmp_path / "t.xz", ["a", "b"]) == [Item("One.", "a"), Item("Two.", "b")]
    (tmp_path / "metadata.csv").write_text("r1|Mr. Hill|Mister Hill has 3\nr2|four| \n")
    found = read_texts(tmp_path / "metadata.csv", ["a"])
    assert [(item.name, item.text) for item in found] == [("r1", "Mister hill has three."), ("r2", "Four.")]
    (tmp_path / "x.xz").write_text("plain")
    with pytest.raises(TextError, match=r"x\.xz"):
        read_texts(tmp_path / "x.xz", ["a"])
