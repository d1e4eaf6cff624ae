"""Front end, noise books and talker together: what is learnt is what the voice meets, and noise is left to chance."""

from __future__ import annotations

import json
import lzma
import sys
from dataclasses import replace

import numpy as np
import pytest
import torch
from commands import run
from test_training_talker import TEXTS, synthetic_clips, write_random_codec

from mktts.checkpoint import open_checkpoint
from mktts.errors import CheckpointError, TextError
from mktts.spec import NUM_CODEBOOKS
from mktts.training import voice
from mktts.training.data.talker_data import Following
from mktts.training.talker import noise, sizes
from mktts.training.talker.train import STATE, open_data, write_voice
from mktts.training.talker.trainer import TalkerRecipe, TalkerTrainer

RAW = ["It is xml at 9:03.", "SHE PAID $86 FOR Mr Hill", "Chapter 25, page 50.", "no mark and no capital"]
SAID = [
    "It is X M L at nine oh three.",  # which read once more would be ten M L
    "She paid eighty-six dollars for mister hill.",
    "Chapter twenty-five, page fifty.",
    "No mark and no capital.",
]
# Says a tone for every text, and notes what it was given.
TEACHER = """#!{python}
import io, math, struct, sys, wave
with open({said!r}, "a") as file:
    file.write(sys.argv[sys.argv.index("-t") + 1] + "\\n")
out = io.BytesIO()
with wave.open(out, "wb") as f:
    f.setnchannels(1); f.setsampwidth(2); f.setframerate(16000)
    tone = [int(9000 * math.sin(i * i / 40_000)) for i in range(12_000)]
    f.writeframes(struct.pack("<12000h", *tone))
sys.stdout.buffer.write(out.getvalue())
"""
# The program with tiny sizes in the codec's place.
TINY_PROGRAM = """
import sys
from mktts.training.codec import fit, sizes
fit.VOICE = sizes.TINY
from mktts.cli import main
sys.exit(main(sys.argv[1:]))
"""


def shard(folder, texts, **more):
    clips = synthetic_clips(TEXTS[: len(texts)])
    kept = {"codes": clips.codes, "frames": np.diff(clips.starts), "speaker": clips.speakers}
    folder.mkdir()
    np.savez(folder / "0.npz", **kept, text=texts, **more)
    return folder


def trainer(out, **recipe):
    data = open_data(synthetic_clips(), out, sizes.TINY, "cpu")
    quiet = TalkerRecipe(batch_rows=160, code_noise=0.0, frame_noise=0.0, dropout=0.0)
    return TalkerTrainer(data, replace(quiet, **recipe))


def test_texts_of_shards_are_learnt_in_the_front_ends_words(tmp_path):
    assert Following(shard(tmp_path / "raw", RAW))().texts == SAID
    assert Following(shard(tmp_path / "read", SAID, front_end="english"))().texts == SAID
    with pytest.raises(TextError, match="Привет"):
        Following(shard(tmp_path / "other", ["Привет."]))()


def test_noise_codes_are_other_ones_in_every_step_and_their_heads_learn_nothing(tmp_path, monkeypatch):
    one = trainer(tmp_path, noise_books=2)
    seen, hidden = [], one.model.hidden
    monkeypatch.setattr(one.model, "hidden", lambda t, c, previous: seen.append(previous) or hidden(t, c, previous))
    batch = one.data.batch(one.training[:3], np.random.default_rng(0))
    for _ in range(2):
        one.losses(batch, noisy=True)
    one.losses(batch, noisy=False)
    there, size = batch.previous[..., 0] >= 0, sizes.TINY.codebook_size
    for previous in seen:
        assert torch.equal(previous[..., :-2], batch.previous[..., :-2]) and (previous[~there] == -1).all()
        assert 0 <= int(previous[there].min()) and int(previous.max()) < size
    assert (seen[0][there][:, -2:] != seen[1][there][:, -2:]).float().mean() > 0.8
    assert torch.equal(seen[2], batch.previous), "evaluation repeats itself"

    one.train_step()
    heads = one.model.talker.code_predictor.lm_head
    assert [bool(head.weight.grad.any()) for head in heads] == [True] * 13 + [False] * 2
    assert one.model.talker.code_predictor.model.codec_embedding[-1].weight.grad.any(), "the talker still sees them"


def test_the_loss_of_codes_leaves_the_noise_books_out(tmp_path):
    one = trainer(tmp_path, noise_books=2)
    batch = one.data.batch(one.training[:3], np.random.default_rng(0))
    other = batch.codes.clone()
    other[:, -2:] = (other[:, -2:] + 7) % sizes.TINY.codebook_size
    with torch.no_grad():
        found = [float(one.losses(replace(batch, codes=c), False)[1]) for c in (batch.codes, other)]
        one.recipe = replace(one.recipe, noise_books=0)
        without = [float(one.losses(replace(batch, codes=c), False)[1]) for c in (batch.codes, other)]
    assert found[0] == found[1] and without[0] != without[1]


def test_flat_heads_say_little_and_greedy_codes_vary():
    generator = torch.Generator().manual_seed(1)
    names = [f"talker.code_predictor.lm_head.{i}.weight" for i in range(NUM_CODEBOOKS - 1)]
    norm = torch.rand(64, generator=generator) + 0.5
    trained = {name: torch.randn(256, 64, generator=generator) for name in names}
    found = noise.with_flat_heads({**trained, "talker.code_predictor.model.norm.weight": norm}, 2)
    assert all(torch.equal(found[name], trained[name]) for name in names[:-2])
    rows = torch.randn(400, 64, generator=generator) * norm
    for name in names[-2:]:
        logits = rows @ found[name].T
        assert 0.25 < float(logits.std(1).mean()) < 0.35
        assert len(logits.argmax(1).unique()) > 100
    assert not torch.equal(found[names[-1]], found[names[-2]])


def test_a_voice_is_not_written_with_a_codec_of_other_noise(tmp_path):
    trainer(tmp_path / "talker", noise_books=2).save(tmp_path / "talker" / STATE)
    with pytest.raises(CheckpointError, match="--noise-books 0"):
        write_voice(tmp_path / "talker", write_random_codec(tmp_path / "codec"))


@pytest.mark.slow  # 20 s: each of its commands has a test of its own, and test_training_recordings.py runs them in turn
def test_the_whole_training_in_small(tmp_path, monkeypatch, capsys):
    said, program, flite = (tmp_path / name for name in ("said", "program.py", "flite"))
    program.write_text(TINY_PROGRAM)
    flite.write_text(TEACHER.format(python=sys.executable, said=str(said)))
    flite.chmod(0o755)
    monkeypatch.setenv("FLITE", str(flite))
    monkeypatch.setattr(voice, "command", lambda *words: [sys.executable, str(program), "train", *map(str, words)])
    monkeypatch.setattr(voice, "_PACK_S", 95.0)  # of these minutes: what is left is a few steps
    texts = [*RAW, *(f"{text} {i}" for i in range(3) for text in TEXTS)]
    (tmp_path / "texts.xz").write_bytes(lzma.compress("\n".join(texts).encode()))
    folder = tmp_path / "run"
    words = ["--texts", tmp_path / "texts.xz", "--out", folder, "--minutes", 1.8, "--first-hours", 0.001]
    words += ["--workers", 1, "--codec-devices", "cpu", "--talker-devices", "cpu", "--fit=--frames 400"]
    words += ["--codec=--batch 1 --crop-frames 6 --hours 1 --stop-at 1 --adversarial-from -1"]
    words += ["--talker=--size tiny --batch-rows 160 --steps 2"]
    assert run("train voice", *words) == 0, [path.read_text() for path in (folder / "logs").iterdir()]
    assert said.read_text().splitlines()[:4] == SAID
    with np.load(next((folder / "codes").glob("*.npz"))) as file:
        assert list(file["text"][:4]) == SAID and file["noise_books"] == 2
    run("train bring", "--run", folder, "--to", tmp_path / "to")
    assert json.loads(capsys.readouterr().out.splitlines()[-1])["missing"] == {}
    state = torch.load(folder / "talker" / STATE, weights_only=True)
    assert state["recipe"]["noise_books"] == 2
    written = write_voice(folder / "talker", folder / "codec0" / "speech_tokenizer")
    found = open_checkpoint(written)
    assert found.text_front_end() == "english"
    name = f"talker.code_predictor.lm_head.{NUM_CODEBOOKS - 2}.weight"
    assert torch.equal(found.tensors()[name], noise.with_flat_heads(state["average"], 2)[name].bfloat16())
