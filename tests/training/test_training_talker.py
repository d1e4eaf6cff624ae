"""The trainable talker: equal to inference row by row, learns, resumes, and exports what loads everywhere."""

import dataclasses

import numpy as np
import pytest
import torch
from test_training_codec import vowels

from mktts.checkpoint import open_checkpoint
from mktts.checkpoint.open import SMALL
from mktts.engine.upstream import load_upstream
from mktts.errors import CheckpointError
from mktts.kernel.grid import choose_shape
from mktts.measure.parity.upstream import compare_codes
from mktts.model.oracle import TorchBackend
from mktts.model.prompt import PromptBuilder, Request
from mktts.model.sampling import Sampling
from mktts.spec import NUM_CODEBOOKS, SUPPRESSED_TAIL
from mktts.training import state
from mktts.training.codec import model as codec_model
from mktts.training.data.audio import Clip, write_shard
from mktts.training.talker import model as talker_model
from mktts.training.talker import train
from mktts.training.talker.model import VOICE, TalkerModel, model_config, write_checkpoint
from mktts.training.talker.train import Clips, Sequences, TalkerRecipe, TalkerTrainer

SPEAKERS = ("anna", "bob", "carl")
TINY = dataclasses.replace(talker_model.TINY, speakers=SPEAKERS)
CONFIG = model_config(TINY)
TEXTS = [
    "Anna likes the old boat.", "A cat watches the green window.", "Nobody paints the broken, heavy piano.",
    "The river carries the small garden.", "My brother found the heavy letter.", "Rain covers the quiet road.",
]  # fmt: skip
RECIPE = TalkerRecipe(steps=45, warmup_steps=5, block=5, learning_rate=3e-3, batch_rows=200, dropout=0.1)


def synthetic_clips(texts=TEXTS, codebook=TINY.codebook_size) -> Clips:
    """Codes that follow from text, speaker and time, as long as the text says."""
    codes = []
    for i, text in enumerate(texts):
        letters = np.frombuffer(text.encode(), np.uint8).astype(np.int64)
        frames = letters[: 6 + len(text) % 7]
        grid = frames[:, None] * (1 + np.arange(NUM_CODEBOOKS)) + 5 * (i % 3) + np.arange(len(frames))[:, None]
        codes.append((grid % codebook).astype(np.uint8))
    starts = np.concatenate(([0], np.cumsum([len(c) for c in codes])))
    speakers = [SPEAKERS[i % len(SPEAKERS)] for i in range(len(texts))]
    return Clips(list(texts), speakers, torch.from_numpy(np.concatenate(codes)), starts)


@pytest.fixture(scope="module")
def small():
    return open_checkpoint(SMALL)


@pytest.fixture(scope="module")
def codec():
    """Of the tiny size. Random weights."""
    torch.manual_seed(0)
    return codec_model.Codec(codec_model.TINY)


@pytest.fixture
def data(small):
    return Sequences(synthetic_clips(), CONFIG, small.tokenizer(), "cpu")


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
def test_training_logits_are_those_of_inference(small, layout, language, predictor_hidden):
    sizes = dataclasses.replace(TINY, predictor=TINY.predictor | {"hidden_size": predictor_hidden})
    config = model_config(sizes)
    model, tokenizer = peaked(TalkerModel(config)).eval(), small.tokenizer()
    data = Sequences(synthetic_clips(), config, tokenizer, "cpu")
    clip = 1
    words, control = data.rows(clip, layout == "whole", language == "english")
    codes = data.codes[data.clips.starts[clip] : data.clips.starts[clip + 1]].long()
    rows = torch.arange(len(words) - len(codes), len(words))
    previous = torch.full((1, len(words), NUM_CODEBOOKS), -1)
    previous[0, rows] = codes
    with torch.no_grad():
        hidden = model.hidden(torch.tensor([words]), torch.tensor([control]), previous)[0]
        first = model.w.linear("talker.codec_head", hidden[rows[0] - 1 :])
        rest = model.predictor_logits(hidden[rows - 1], codes)

    tensors = model.w.hub()
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
            x = torch.stack((state.head_rows[-1], backend.code_tables[0][expected[0]]))
            for group, head in enumerate(backend.heads):
                x = x if backend.projection is None else backend.projection(x)
                logits = head(backend.predictor.advance(x, [cache], [len(x)]))[-1]
                assert torch.allclose(rest[frame, group], logits, atol=1e-4)
                if group + 1 < len(backend.heads):
                    x = backend.code_tables[group + 1][expected[group + 1]][None]
            state.codes = expected
            backend._advance([state], [prompt.row(frame)])
        assert torch.allclose(first[-1], backend.code0_logits(state), atol=1e-4)


def test_padding_changes_no_loss_and_targets_are_the_next_codes(data):
    config = data.config
    model = peaked(TalkerModel(config)).eval()
    both = data.batch(np.array([[0, 0], [1, 0]]), np.random.default_rng(0))
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
            assert int((targets[i] != train.NO_TARGET).sum()) == len(codes) + 1
            length = int(carrying[-1]) + 1
            rows = (slice(i, i + 1), slice(length))
            alone = model.hidden(both.text[rows], both.control[rows], both.previous[rows])
            assert torch.allclose(together[i, :length], alone[0], atol=1e-5)
    assert torch.equal(both.previous.flatten(0, 1)[both.rows + 1], both.codes)


def test_batches_have_few_shapes_and_every_clip_once(small):
    data = Sequences(synthetic_clips(TEXTS * 20), CONFIG, small.tokenizer(), "cpu")
    dealt = data.epoch(np.arange(120), 200, np.random.default_rng(0))
    assert set(np.concatenate(dealt)[:, 0]) == set(range(120)) and len(set(np.concatenate(dealt)[:, 1])) > 3
    shapes = {data.batch(clips, np.random.default_rng(0)).text.shape for clips in dealt}
    assert all(rows * longest <= 200 for rows, longest in shapes)
    assert len(shapes) == len({longest for _, longest in shapes}), "one number of clips for each length"


def test_a_text_is_learnt_in_its_written_forms(data, small):
    tokenizer, written = small.tokenizer(), [write(TEXTS[2]) for write, _ in train.FORMS]
    assert written[1:] == [
        "Nobody paints the broken, heavy piano",
        "nobody paints the broken, heavy piano.",
        "Nobody paints the broken heavy piano.",
        "nobody paints the broken heavy piano",
    ]
    for form, text in enumerate(written):
        words, control = data.rows(2, True, False, form)
        said = tokenizer.encode(text)
        first = words.index(data.config.text_ids.tts_bos) + 1
        assert words[first : first + len(said) + 1] == [*said, data.config.text_ids.tts_eos]
        assert control.count(-1) == data.frames[2] + 3  # the role's three rows
    assert 0.005 < sum(train.held_out(f"Sentence number {i}.") for i in range(5_000)) / 5_000 < 0.02


def test_loss_falls_and_a_resumed_run_repeats_the_whole_one(tmp_path, data):
    whole, cut = TalkerTrainer(RECIPE, TINY, data), TalkerTrainer(dataclasses.replace(RECIPE, steps=20), TINY, data)
    before = whole.measured()
    cut.recipe = RECIPE  # whose schedule it has, but for where it stops
    while cut.step < 20:
        cut.train_step()
    cut.write(tmp_path)
    again = TalkerTrainer(RECIPE, TINY, data)
    again.load(tmp_path)
    state.train(whole, tmp_path / "whole", 1)
    state.train(again, tmp_path, 1)
    assert [line["code0"] for line in again.curves] == [line["code0"] for line in whole.curves[4:]]
    assert all(torch.equal(tensor, again.average[name]) for name, tensor in whole.average.items())
    after = whole.measured()
    assert after["held_out_code0"] < before["held_out_code0"] - 2
    assert after["held_out_codes"] < before["held_out_codes"] - 0.3


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_recorded_steps_learn_what_ordinary_ones_do(small):
    recipe = dataclasses.replace(RECIPE, dropout=0.0, code_noise=0.0, frame_noise=0.0)  # drawn otherwise in a graph
    data = Sequences(synthetic_clips(), CONFIG, small.tokenizer(), "cuda")
    plain, recorded = TalkerTrainer(recipe, TINY, data), TalkerTrainer(recipe, TINY, data, graphs=True)
    losses = [[float(trainer.train_step()["code0"]) for _ in range(40)] for trainer in (plain, recorded)]
    assert recorded.steps.recorded
    assert np.allclose(losses[0], losses[1], rtol=0.05) and losses[1][-1] < losses[1][0] - 1


def test_exported_checkpoint_gives_upstreams_codes(tmp_path, small, codec):
    model = peaked(TalkerModel(CONFIG))
    folder = write_checkpoint(tmp_path / "voice", TINY, model.w.hub(), codec, torch.float32)
    checkpoint = open_checkpoint(folder)
    assert not checkpoint.is_random and checkpoint.sampling() == small.sampling()
    assert checkpoint.config == CONFIG and list(CONFIG.speakers) == list(SPEAKERS)
    asked = [Request(TEXTS[2], "english", "bob", layout=layout) for layout in ("whole", "streaming")]
    upstream = load_upstream(folder, torch.float32)
    rows = compare_codes(checkpoint, asked, checkpoint.sampling().greedy(), 0, 5, torch.float32, upstream)
    assert [row["equal"] for row in rows] == [True, True]


def test_a_folder_of_speech_becomes_clips_of_codes(tmp_path):
    torch.manual_seed(0)
    write_shard(tmp_path / "a.npz", [Clip("one", "anna", vowels(0.5)), Clip("two", "bob", vowels(0.9, 1))])
    codec = codec_model.Codec(codec_model.TINY).eval()
    codec.quantizer.begin(codec.encoder(torch.from_numpy(vowels(4.0) / np.float32(32768))[None]))
    found = train.read_clips(tmp_path, codec)
    assert found.texts == ["one", "two"] and found.speakers == ["anna", "bob"] and list(found.starts) == [0, 7, 19]
    assert found.codes.shape == (19, 16) and found.codes.dtype == torch.uint8 and len(found.codes.unique()) > 10


def test_training_begins_with_another_voices_words_and_none_of_its_codes(tmp_path, small, data, codec):
    given = TalkerModel(CONFIG, seed=7)
    other = open_checkpoint(write_checkpoint(tmp_path / "other", TINY, given.w.hub(), codec, dtype=torch.float32))
    trainer = TalkerTrainer(RECIPE, TINY, data)
    random = {name: p.clone() for name, p in trainer.model.w.hub().items()}
    trainer.begin_from(other)
    size, kept = data.config.predictor.vocab_size, 0
    for name, ours in trainer.model.w.hub().items():
        of_codes = "lm_head" in name or "codec_" in name
        codes, others = (ours[:size], ours[size:]) if of_codes else (ours[:0], ours)
        assert torch.equal(codes, random[name][: len(codes)])
        assert torch.equal(others, given.w.hub()[name][len(codes) :])  # control ids and the end of speech among them
        kept += not of_codes and not torch.equal(ours, random[name])
    assert kept > 10
    with pytest.raises(CheckpointError, match="of shape"):
        trainer.begin_from(small)


@pytest.mark.parametrize("other", [{"speakers": ("dora",)}, {"codebook_size": 64}])
def test_a_state_of_other_speakers_or_another_codec_is_named(tmp_path, data, other):
    state.train(
        TalkerTrainer(dataclasses.replace(RECIPE, steps=1), dataclasses.replace(TINY, **other), data), tmp_path, 1
    )
    with pytest.raises(CheckpointError, match=f"expected the sizes of this run, found .*{next(iter(other))}"):
        TalkerTrainer(RECIPE, TINY, data).load(tmp_path)


def test_the_voices_dimensions_suit_the_megakernel_and_its_ids_the_codebook():
    config = model_config(dataclasses.replace(VOICE, speakers=("heart", "michael")))
    assert choose_shape(config, 132).blocks >= 8
    codes = config.talker.vocab_size - SUPPRESSED_TAIL
    ids = [*dataclasses.astuple(config.codec_ids), *config.languages.values(), *config.speakers.values()]
    assert codes == VOICE.codebook_size == codec_model.VOICE.codebook_size
    assert len(set(ids)) == len(ids) and min(ids) >= codes and max(ids) < config.talker.vocab_size
