"""The trainable talker: equal to inference row by row, learns, resumes, and exports what loads everywhere."""

from __future__ import annotations

import dataclasses
import itertools
import json

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from commands import run

from mktts.checkpoint import open_checkpoint
from mktts.checkpoint.random.make import small_files, write_weights
from mktts.checkpoint.random.weights import random_tensors
from mktts.checkpoint.tensors import expected_codec_tensors
from mktts.common import write_json
from mktts.errors import CheckpointError
from mktts.kernel.grid import choose_shape
from mktts.model.oracle import TorchBackend
from mktts.model.prompt import PromptBuilder, Request
from mktts.model.sampling import Sampling
from mktts.model.tokenizer import TextTokenizer
from mktts.spec import NUM_CODEBOOKS, SUPPRESSED_TAIL, ModelConfig
from mktts.synth.upstream import generate_codes, load_upstream
from mktts.training.codec import sizes as codec_sizes
from mktts.training.data.forms import FORMS
from mktts.training.data.talker_data import NO_TARGET, Clips, Following, Sequences, held_out
from mktts.training.talker import sizes
from mktts.training.talker.checkpoint import prepare, write_checkpoint
from mktts.training.talker.model import TalkerModel
from mktts.training.talker.train import open_data, train
from mktts.training.talker.trainer import TalkerRecipe, TalkerTrainer

TEXTS = [
    f"{who} {does} the {colour} {thing}."
    for who, does, colour, thing in zip(
        ("Anna", "A cat", "Nobody", "The river", "My brother", "Rain"),
        ("likes", "watches", "paints", "carries", "found", "covers"),
        ("old", "green", "broken", "small", "heavy", "quiet"),
        ("boat", "window", "piano", "garden", "letter", "road"),
        strict=True,
    )
]


def synthetic_clips(texts=TEXTS, codebook=sizes.TINY.codebook_size) -> Clips:
    """Codes that follow from text, speaker and time, as long as the text says."""
    speakers, codes = [], []
    for i, text in enumerate(texts):
        speakers.append(sizes.SPEAKERS[i % len(sizes.SPEAKERS)])
        letters = np.frombuffer(text.encode(), np.uint8).astype(np.int64)
        frames = letters[: 6 + len(text) % 7]
        grid = frames[:, None] * (1 + np.arange(NUM_CODEBOOKS)) + 5 * (i % 3) + np.arange(len(frames))[:, None]
        codes.append((grid % codebook).astype(np.uint8))
    starts = np.concatenate(([0], np.cumsum([len(c) for c in codes])))
    return Clips(list(texts), speakers, torch.from_numpy(np.concatenate(codes)), starts)


def write_random_codec(folder):
    """A speech_tokenizer folder of the tiny size. Random weights."""
    folder.mkdir(parents=True)
    raw = codec_sizes.config_json(codec_sizes.TINY)
    for name, content in small_files("tiny", "custom_voice", False).items():
        if name.startswith("speech_tokenizer/"):
            write_json(folder / name.split("/")[1], content)
    write_json(folder / "config.json", raw)
    write_weights(folder, random_tensors(expected_codec_tensors(raw), 0, torch.float32))
    return folder


@pytest.fixture(scope="module")
def prepared(tmp_path_factory):
    folder = tmp_path_factory.mktemp("prepared")
    prepare(folder, TEXTS, sizes.TINY)
    return folder


def peaked(model: TalkerModel) -> TalkerModel:
    """Heads and embeddings scaled up, so that logits differ visibly and greedy choices have a margin."""
    generator = torch.Generator().manual_seed(3)
    with torch.no_grad():
        for p in model.parameters():
            p.add_(torch.randn(p.shape, generator=generator) * (0.1 if p.dim() == 1 else p.shape[-1] ** -0.5))
    return model


@pytest.mark.parametrize("layout", ["whole", "streaming"])
@pytest.mark.parametrize("language", ["auto", "english"])
@pytest.mark.parametrize("predictor_hidden", [64, 32])
def test_training_logits_are_those_of_inference(tmp_path, layout, language, predictor_hidden):
    stack = dataclasses.replace(sizes.TINY.predictor, hidden=predictor_hidden)
    config = prepare(tmp_path, TEXTS, dataclasses.replace(sizes.TINY, predictor=stack))
    model, tokenizer = peaked(TalkerModel(config)).eval(), TextTokenizer.load(tmp_path)
    data = Sequences(synthetic_clips(), config, tokenizer, "cpu")
    clip = 1
    words, control = data.rows(clip, layout == "whole", language == "english")
    codes = data.codes[data.clips.starts[clip] : data.clips.starts[clip + 1]].long()
    rows = torch.arange(len(words) - len(codes), len(words))
    previous = torch.full((1, len(words), NUM_CODEBOOKS), -1)
    previous[0, rows] = codes
    with torch.no_grad():
        hidden = model.hidden(torch.tensor([words]), torch.tensor([control]), previous)[0]
        first = model.code0_logits(hidden[rows[0] - 1 :])
        rest = model.predictor_logits(hidden[rows - 1], codes)

    tensors = model.state_dict()
    backend = TorchBackend(config, tensors, dtype=torch.float32)
    builder = PromptBuilder(config, tensors, tokenizer, dtype=torch.float32)
    request = Request(TEXTS[clip], language=language, speaker=data.clips.speakers[clip], layout=layout)
    prompt = builder.build(request)
    with torch.inference_mode():
        state = backend.start(prompt, Sampling().greedy(), 0, len(codes) + 1)
        assert len(prompt.embeds) == len(words) - len(codes)
        for frame, expected in enumerate(codes):
            assert torch.allclose(first[frame], backend.code0_logits(state), atol=1e-4)
            cache = backend.predictor.new_cache(NUM_CODEBOOKS)
            x = torch.cat((state.hidden, backend.code_tables[0][expected[0]][None, None]), 1)
            for group, head in enumerate(backend.heads):
                x = x if backend.projection is None else F.linear(x, *backend.projection)
                logits = F.linear(backend.predictor.forward(x, cache), head)[0, -1]
                assert torch.allclose(rest[frame, group], logits, atol=1e-4)
                if group + 1 < len(backend.heads):
                    x = backend.code_tables[group + 1][expected[group + 1]][None, None]
            state.codes = expected
            backend._advance(state, prompt.row(frame))
        assert torch.allclose(first[-1], backend.code0_logits(state), atol=1e-4)


def test_padding_changes_no_loss_and_targets_are_the_next_codes(prepared):
    config, tokenizer = ModelConfig.load(prepared), TextTokenizer.load(prepared)
    data = Sequences(synthetic_clips(), config, tokenizer, "cpu")
    model = peaked(TalkerModel(config)).eval()
    both = data.batch(np.array([0, 1]), np.random.default_rng(0), whole=True)
    longest = both.text.shape[1]
    targets = both.target.view(2, longest)
    with torch.no_grad():
        together = model.hidden(both.text, both.control, both.previous)
        for i in (0, 1):
            codes = data.codes[data.clips.starts[i] : data.clips.starts[i + 1]].long()
            carrying = torch.nonzero(both.previous[i, :, 0] >= 0)[:, 0]
            assert torch.equal(both.previous[i, carrying], codes)
            assert torch.equal(targets[i, carrying - 1], codes[:, 0])
            assert targets[i, carrying[-1]] == config.codec_ids.eos
            assert int((targets[i] != NO_TARGET).sum()) == len(codes) + 1
            length = int(carrying[-1]) + 1
            rows = (slice(i, i + 1), slice(length))
            alone = model.hidden(both.text[rows], both.control[rows], both.previous[rows])
            assert torch.allclose(together[i, :length], alone[0], atol=1e-5)
    assert torch.equal(both.previous.flatten(0, 1)[both.rows + 1], both.codes)


def test_batches_have_few_shapes_and_every_clip_once(prepared):
    config, tokenizer = ModelConfig.load(prepared), TextTokenizer.load(prepared)
    data = Sequences(synthetic_clips(TEXTS * 20), config, tokenizer, "cpu")
    dealt = data.epoch(np.arange(120), 200, np.random.default_rng(0))
    assert set(np.concatenate(dealt)[:, 0]) == set(range(120)) and len(set(np.concatenate(dealt)[:, 1])) > 3
    shapes = {data.batch(clips, np.random.default_rng(0), whole=True).text.shape for clips in dealt}
    assert all(rows * longest <= 200 for rows, longest in shapes)
    assert len(shapes) == len({longest for _, longest in shapes}), "one number of clips for each length"


def test_a_text_is_learnt_in_its_written_forms(prepared):
    config, tokenizer = ModelConfig.load(prepared), TextTokenizer.load(prepared)
    data = Sequences(synthetic_clips(), config, tokenizer, "cpu")
    for form, (write, _) in enumerate(FORMS):
        words, control = data.rows(2, True, False, form)
        said = tokenizer.encode(write(TEXTS[2]))
        first = words.index(config.text_ids.tts_bos) + 1
        assert words[first : first + len(said) + 1] == [*said, config.text_ids.tts_eos]
        assert control.count(-1) == data.frames[2] + 3  # the role's three rows


def test_loss_falls_and_a_resumed_run_repeats_the_whole_one(tmp_path):
    recipe = TalkerRecipe(steps=60, warmup_steps=5, learning_rate=3e-3, batch_rows=160)
    data = open_data(synthetic_clips(), tmp_path, sizes.TINY, "cpu")
    whole, cut = TalkerTrainer(data, recipe), TalkerTrainer(data, recipe)
    before = whole.evaluate()
    for _ in range(40):
        whole.train_step()
    for _ in range(23):
        cut.train_step()
    cut.save(tmp_path / "state.pt")
    again = TalkerTrainer(data, recipe)
    again.load(tmp_path / "state.pt")
    for _ in range(17):
        again.train_step()
    for name, tensor in whole.average.items():
        assert torch.equal(tensor, again.average[name]), name
    after = whole.evaluate()
    assert after["held_out_code0"] < before["held_out_code0"] - 2
    assert after["held_out_codes"] < before["held_out_codes"] - 0.3


def test_steps_on_static_tensors_are_the_same_steps(tmp_path):
    recipe = TalkerRecipe(steps=60, warmup_steps=5, batch_rows=160)
    data = open_data(synthetic_clips(), tmp_path, sizes.TINY, "cpu")
    plain, static = TalkerTrainer(data, recipe), TalkerTrainer(data, recipe, graphs=True)
    for _ in range(6):
        assert {n: float(v) for n, v in plain.train_step().items()} == {
            n: float(v) for n, v in static.train_step().items()
        }


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_recorded_steps_learn_what_ordinary_ones_do(tmp_path):
    recipe = TalkerRecipe(steps=60, warmup_steps=5, learning_rate=3e-3, batch_rows=160, dropout=0.0)
    recipe = dataclasses.replace(recipe, code_noise=0.0, frame_noise=0.0)  # drawn otherwise in a graph
    data = open_data(synthetic_clips(), tmp_path, sizes.TINY, "cuda")
    plain, recorded = TalkerTrainer(data, recipe), TalkerTrainer(data, recipe, graphs=True)
    losses = [[float(trainer.train_step()["code0"]) for _ in range(40)] for trainer in (plain, recorded)]
    assert any(step.recorded for step in recorded.graphs._steps.values())
    assert np.allclose(losses[0], losses[1], rtol=0.05) and losses[1][-1] < losses[1][0] - 1


def test_exported_checkpoint_gives_upstreams_codes(tmp_path, prepared):
    config = ModelConfig.load(prepared)
    model = peaked(TalkerModel(config))
    codec = write_random_codec(tmp_path / "codec")
    folder = write_checkpoint(tmp_path / "voice", prepared, model.state_dict(), codec, "A card.", torch.float32)
    checkpoint = open_checkpoint(folder)
    assert (folder / "README.md").read_text() == "A card." and not checkpoint.is_random
    assert checkpoint.sampling().talker.temperature == sizes.TEMPERATURE
    upstream = load_upstream(folder, torch.float32)
    builder = PromptBuilder(config, checkpoint.tensors(), checkpoint.tokenizer(), dtype=torch.float32)
    backend = TorchBackend(config, checkpoint.tensors(), dtype=torch.float32)
    for layout in ("whole", "streaming"):
        request = builder.check(Request(TEXTS[2], "english", "rms", layout=layout))
        expected = generate_codes(upstream, request, checkpoint.sampling().greedy(), 0, 5)
        prompt = builder.build(request)
        state = backend.start(prompt, checkpoint.sampling().greedy(), 0, 5)
        text = [None, *(prompt.row(t) for t in range(4))]
        found = torch.stack([f.codes for f in backend.frames(state, text) if f.codes is not None])
        assert torch.equal(found, expected)


def test_shards_are_read_and_texts_stay_on_one_side(tmp_path):
    clips = synthetic_clips()
    frames = np.diff(clips.starts)
    by_id = np.array([sizes.SPEAKERS.index(s) for s in clips.speakers])
    for name, speaker in (("a", np.array(clips.speakers)), ("b", by_id)):
        np.savez(tmp_path / f"{name}.npz", codes=clips.codes, frames=frames, speaker=speaker, text=clips.texts)
    found = Following(tmp_path)()
    assert found.speakers == clips.speakers * 2 and found.texts == clips.texts * 2
    assert torch.equal(found.codes, torch.cat((clips.codes, clips.codes)))
    share = sum(held_out(f"Sentence number {i}.") for i in range(5_000)) / 5_000
    assert 0.005 < share < 0.02


def test_shards_that_come_meanwhile_join_at_the_next_epoch(tmp_path):
    clips = synthetic_clips()
    shard = {"codes": clips.codes, "frames": np.diff(clips.starts), "speaker": clips.speakers, "text": clips.texts}
    np.savez(tmp_path / "a.npz", **shard)
    following = Following(tmp_path)
    data = open_data(following(), tmp_path / "out", sizes.TINY, "cpu")
    trainer = TalkerTrainer(data, TalkerRecipe(batch_rows=100_000), more=following)
    trainer.train_step()
    alone = len(trainer.training)
    np.savez(tmp_path / "b.npz", **shard)
    while trainer.epoch == 0:
        trainer.train_step()
    both = Following(tmp_path)()
    assert trainer.data.clips.texts == both.texts and torch.equal(trainer.data.codes, both.codes)
    assert np.array_equal(trainer.data.clips.starts, both.starts) and np.array_equal(data.frames, np.diff(both.starts))
    assert sorted(trainer.training) == sorted([*trainer.training[:alone], *trainer.training[:alone] + len(clips.texts)])
    assert set(np.concatenate(trainer.batches)[:, 0]) == set(trainer.training)
    assert len(following().texts) == 0


def test_by_the_clock_the_schedule_ends_with_the_slice(tmp_path):
    recipe = TalkerRecipe(steps=1_000_000, warmup_steps=5, batch_rows=160)
    trainer = TalkerTrainer(open_data(synthetic_clips(), tmp_path / "out", sizes.TINY, "cpu"), recipe)
    a_second_a_step = itertools.count(0.0).__next__
    train(trainer, tmp_path, minutes=0.4, by_clock=True, clock=a_second_a_step)
    assert 20 <= trainer.step < 24 and 0.9 < trainer.progress < 1
    assert trainer.learning_rate() < 0.1 * recipe.learning_rate


def test_training_can_begin_with_another_voice_whose_codes_mean_something_else(tmp_path, prepared):
    config = ModelConfig.load(prepared)
    given = TalkerModel(config, seed=7).state_dict()
    codec = write_random_codec(tmp_path / "codec")
    folder = write_checkpoint(tmp_path / "other", prepared, given, codec, dtype=torch.float32)
    voice = open_checkpoint(folder)
    texts = [text.upper() for text in TEXTS]  # of which another tokenizer would be made
    data = open_data(synthetic_clips(texts), tmp_path / "out", sizes.TINY, "cpu", voice)
    assert (tmp_path / "out" / "prepared" / "merges.txt").read_text() == (prepared / "merges.txt").read_text()
    trainer = TalkerTrainer(data, TalkerRecipe())
    random = {name: p.clone() for name, p in trainer.model.state_dict().items()}
    trainer.begin_from(voice)
    size, kept = config.predictor.vocab_size, 0
    for name, ours in trainer.model.state_dict().items():
        of_codes = "lm_head" in name or "codec_" in name
        codes, others = (ours[:size], ours[size:]) if of_codes else (ours[:0], ours)
        assert torch.equal(codes, random[name][: len(codes)])
        assert torch.equal(others, given[name][len(codes) :])  # control ids and the end of speech among them
        assert torch.equal(trainer.average[name], ours)
        kept += not of_codes and not torch.equal(ours, random[name])
    assert kept > 10
    trainer.begin_from(voice, same_codec=True)
    assert all(torch.equal(ours, given[name]) for name, ours in trainer.model.state_dict().items())
    tiny = dataclasses.replace(sizes.TINY, text_hidden=16)
    small = TalkerTrainer(open_data(synthetic_clips(), tmp_path / "small", tiny, "cpu", voice), TalkerRecipe())
    with pytest.raises(CheckpointError, match="weights of this model"):
        small.begin_from(voice)


def test_the_command_goes_on_where_it_stopped_and_writes_the_checkpoint(tmp_path, capsys):
    clips, codec = synthetic_clips(), write_random_codec(tmp_path / "codec")
    shard = {"codes": clips.codes, "frames": np.diff(clips.starts), "speaker": clips.speakers, "text": clips.texts}
    (tmp_path / "codes").mkdir()
    np.savez(tmp_path / "codes" / "0.npz", **shard)
    out = tmp_path / "out"
    command = [
        "train talker",
        "--codes",
        tmp_path / "codes",
        "--out",
        out,
        "--minutes",
        5,
        "--size",
        "tiny",
        "--resume",
    ]
    for steps in (2, 4):
        run(*command, "--steps", steps, "--codec", codec)
        reached = json.loads(capsys.readouterr().out.splitlines()[-1])
        assert (reached["step"], reached["of_steps"]) == (steps, steps) and reached["held_out_code0"] > 0
    assert [line["step"] for line in json.loads((out / "talker_curves.json").read_text())] == [2, 4]
    found, config = open_checkpoint(out / "voice"), ModelConfig.load(out / "prepared")
    assert found.config == config and not found.is_random
    trained = torch.load(out / "talker.pt", weights_only=True)["average"]["talker.codec_head.weight"]
    assert torch.equal(found.tensors()["talker.codec_head.weight"], trained.bfloat16())
    with pytest.raises(CheckpointError, match="use another --out"):
        run(*command, "--seed", 5)


def test_the_voices_dimensions_suit_the_megakernel_and_its_ids_the_codebook(tmp_path):
    config = prepare(tmp_path, TEXTS, sizes.VOICE)
    assert choose_shape(config, 132).blocks >= 8
    codes = config.talker.vocab_size - SUPPRESSED_TAIL
    ids = [*dataclasses.astuple(config.codec_ids), *config.languages.values(), *config.speakers.values()]
    assert codes == sizes.VOICE.codebook_size == codec_sizes.VOICE.codebook_size
    assert len(set(ids)) == len(ids) and min(ids) >= codes and max(ids) < config.talker.vocab_size
