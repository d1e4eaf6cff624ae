"""The trained codec against the inference decoder and upstream's classes; its losses, learning and resuming."""

from dataclasses import replace

import numpy as np
import pytest
import torch

from mktts.audio import to_pcm16
from mktts.codec.decoder import CodecDecoder
from mktts.engine.upstream import import_upstream
from mktts.errors import AudioError
from mktts.spec import NUM_CODEBOOKS, SAMPLE_RATE_HZ, SAMPLES_PER_FRAME
from mktts.training.codec import model, train
from mktts.training.codec.model import TINY, Codec, decoder_config, encoded, hub_tensors
from mktts.training.codec.train import CodecRecipe, CodecTrainer, onset
from mktts.training.data.audio import Clip, Crops, read_shard, trimmed, write_shard

RECIPE = CodecRecipe(
    batch=2, crop_frames=7, judged_frames=1, steps=100, block=2, warmup_steps=2, adversarial_from=2, joint_steps=4,
    onsets=0.5, rate=2e-3,
)  # fmt: skip


def vowels(seconds: float, seed: int = 0) -> np.ndarray:
    """Like a voice, int16 24 kHz: a pulse train of gliding pitch, whose harmonics come and go."""
    generator = np.random.default_rng(seed)
    n, knots = int(seconds * SAMPLE_RATE_HZ), max(2, int(5 * seconds))

    def curve(low: float, high: float) -> np.ndarray:
        return np.interp(np.linspace(0, knots - 1, n), np.arange(knots), generator.uniform(low, high, knots))

    phase = 2 * np.pi * np.cumsum(curve(90, 220)) / SAMPLE_RATE_HZ
    wave = sum(curve(0, 1) * np.sin(harmonic * phase) / harmonic for harmonic in range(1, 30)) * curve(0, 1)
    return np.frombuffer(to_pcm16((0.5 * wave / np.abs(wave).max()).astype(np.float32)), "<i2")


@pytest.fixture(scope="module")
def audio(tmp_path_factory):
    folder = tmp_path_factory.mktemp("audio")
    write_shard(folder / "a.npz", [Clip("one", "anna", vowels(2.0, 0)), Clip("two", "bob", vowels(3.7, 1))])
    write_shard(folder / "b.npz", [Clip("three", "anna", vowels(1.63, 2))])
    return folder


@pytest.fixture
def crops(audio):
    return Crops(audio, RECIPE.crop_frames, 0, RECIPE.onsets)


@pytest.fixture
def codec():
    """Scales and Snakes off their starting values, so that a swapped one is noticed; entries of some size."""
    torch.manual_seed(0)
    codec = Codec(TINY).eval()
    with torch.no_grad():
        for name, parameter in codec.decoder.w.hub().items():
            if name.endswith(("alpha", "beta", "scale", "gamma", "bias")):
                parameter.add_(0.1 * torch.randn_like(parameter))
        codec.quantizer.books.normal_()
    return codec


def noise(samples, seed=0):
    return 0.1 * torch.randn(1, samples, generator=torch.Generator().manual_seed(seed))


def test_inference_and_upstream_give_the_training_decoders_samples_whole_and_streamed(tmp_path, codec):
    import_upstream()
    from qwen_tts.core.tokenizer_12hz.modeling_qwen3_tts_tokenizer_v2 import Qwen3TTSTokenizerV2Model

    codes = torch.randint(TINY.codebook_size, (13, NUM_CODEBOOKS))
    expected = codec.decode(codes[None])[0]
    tensors = {n.removeprefix("decoder."): t for n, t in hub_tensors(codec, torch.float32).items()}
    decoder = CodecDecoder(decoder_config(TINY), tensors)
    state = decoder.start()
    streamed = torch.cat([decoder.decode(part, state) for part in codes.split(3)])
    assert expected.std() > 1e-3
    assert (decoder.decode_all(codes) - expected).abs().max() < 1e-4
    assert (streamed - expected).abs().max() < 1e-4
    model.write_codec(tmp_path, codec, torch.float32)
    upstream, report = Qwen3TTSTokenizerV2Model.from_pretrained(tmp_path, output_loading_info=True)
    assert all(name.startswith("encoder.") for name in report["missing_keys"])
    assert not report["mismatched_keys"] and not report["unexpected_keys"]
    with torch.inference_mode():
        samples = upstream.eval().decode(codes[None]).audio_values[0]
    assert (samples - expected).abs().max() < 1e-4


def test_codes_of_a_clip_are_those_of_the_clip_alone_followed_by_silence(codec):
    clips = [vowels(seconds, i) for i, seconds in enumerate((2.0, 0.7, 1.33))]
    together, alone = encoded(codec, clips), [encoded(codec, [clip])[0] for clip in clips]
    assert [len(codes) for codes in together] == [25, 9, 17]
    for a, b in zip(together, alone, strict=True):
        assert (a == b).float().mean() > 0.98  # sums of another batch round otherwise


def test_each_book_takes_the_entry_nearest_to_what_is_left(codec):
    quantizer = codec.quantizer
    rows = torch.randn(1, 50, TINY.vector)
    codes, left = quantizer.encode(rows), rows[0]
    for book, code in zip(quantizer.books, codes[0].unbind(-1), strict=True):
        assert torch.equal(torch.cdist(left, book).argmin(1), code)
        left = left - book[code]
    assert torch.allclose(rows[0] - left, quantizer.summed(codes)[0], atol=1e-5)


def test_entries_follow_their_rows_and_those_that_none_chooses_begin_anew():
    torch.manual_seed(0)
    quantizer = Codec(TINY).quantizer
    rows = torch.randn(4, 40, TINY.vector)
    quantizer.begin(rows)
    quantizer.books[0, 5] = quantizer.sums[0, 5] = 1e4
    quantizer.usage[0, 5] = 0.0
    missed = []
    for _ in range(150):
        given = rows.clone().requires_grad_()
        stands_for, distance = quantizer.learn(given)
        missed.append(float(distance.detach()))
    assert missed[-1] < 0.7 * missed[0] and quantizer.books[0, 5].abs().max() < 10
    stands_for.sum().backward()
    assert torch.allclose(given.grad, torch.ones_like(given))  # straight through
    assert torch.allclose(quantizer.summed(quantizer.encode(rows)), quantizer.learn(rows)[0], atol=1e-5)


def test_the_loss_of_repetition_hears_a_comb_and_a_lost_pitch_in_every_band():
    time = torch.arange(2 * SAMPLE_RATE_HZ) / SAMPLE_RATE_HZ
    hiss = noise(len(time))
    comb = noise(train.STEP_SAMPLES).repeat(1, len(time) // train.STEP_SAMPLES)
    found, _, more = train.repetition(comb, hiss)
    assert (more[4:] > 0.6).all() and found > 0.01 and float(train.repetition(hiss, hiss)[0]) < 1e-9
    pulses = sum(torch.sin(2 * torch.pi * 110 * n * time) / n for n in range(1, 60))[None] * 0.05
    others = sum(torch.sin(2 * torch.pi * 50 * n * time) / n for n in range(1, 120))[None] * 0.05
    assert train.repetition(others, pulses)[0] > 5 * train.repetition(pulses + 0.01 * hiss, pulses)[0]
    hoarse, clear = (train.repetition(pulses + level * hiss, pulses)[1] for level in (0.3, 0.003))
    assert hoarse > 0.1 and clear < 0.02
    output = (pulses + 0.3 * hiss).clone().requires_grad_()
    sum(train.repetition(output, pulses)[:2]).backward()
    assert output.grad.abs().max() > 0


def test_mel_distance_of_a_tone_and_its_double_is_the_logarithm_of_two():
    time = torch.arange(24_000) / SAMPLE_RATE_HZ
    tone = 0.1 * torch.sin(2 * torch.pi * 440 * time)[None] + noise(24_000)
    assert float(train.mel_distance(2 * tone, tone)) == pytest.approx(float(np.log(2)), rel=1e-3)
    sine = torch.sin(2 * torch.pi * 3000 * time)[None]
    assert float(train.spectrum(sine, 1024).abs().max()) == pytest.approx(1, 1e-2)


def test_a_click_before_all_sound_is_a_loss():
    silence = torch.zeros(2, 4_800)
    click = silence.clone()
    click[:, 0] = 0.01
    assert float(onset(click, silence)) > 0.3 and float(onset(silence, silence)) == 0


def steps(trainer, count):
    return [{name: float(value) for name, value in trainer.train_step().items()} for _ in range(count)]


def test_it_learns_resumes_exactly_and_then_codes_stand_still(crops, tmp_path):
    whole, cut = (CodecTrainer(RECIPE, TINY, crops) for _ in range(2))
    found = steps(whole, 6)
    assert ["judges" in line for line in found] == [False] * 2 + [True] * 4
    assert ["commitment" in line for line in found] == [True] * 4 + [False] * 2
    steps(cut, 2)
    cut.write(tmp_path)
    resumed = CodecTrainer(RECIPE, TINY, crops)
    resumed.load(tmp_path)
    assert steps(resumed, 2) == found[2:4]
    before = resumed.codec.encode(crops.batch(1, 2))
    assert steps(resumed, 2) == found[4:]
    for part in ("weights", "average", "moments"):
        torch.testing.assert_close(resumed.state()[part], whole.state()[part], rtol=0, atol=0)
    assert torch.equal(resumed.codec.encode(crops.batch(1, 2)), before)
    plain = replace(RECIPE, adversarial_from=100, joint_steps=100)
    trainer = CodecTrainer(plain, TINY, crops)
    mels = [line["mel"] for line in steps(trainer, 16)]
    assert sum(mels[-4:]) < 0.9 * sum(mels[:4])
    rows = trainer.codec.encoder(crops.batch(1, 8)).detach().flatten(0, 1)
    covariance = torch.cov(rows.T)
    assert covariance.trace().square() / covariance.square().sum() > 3  # axes: more than one or two numbers differ


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_recorded_steps_learn_what_ordinary_ones_do(crops):
    recipe = replace(RECIPE, joint_steps=8, adversarial_from=4)
    plain, recorded = (CodecTrainer(recipe, TINY, crops, "cuda", graphs=graphs) for graphs in (False, True))
    mels = [[line["mel"] for line in steps(trainer, 24)] for trainer in (plain, recorded)]
    assert len(recorded.steps.recorded) == 3
    assert np.allclose(*mels, rtol=0.1) and sum(mels[1][-4:]) < sum(mels[1][:4])


def test_crops_depend_on_seed_and_step_only_and_some_begin_where_a_clip_does(audio):
    crops, again = Crops(audio, 6, 3, 0.5), Crops(audio, 6, 3, 0.5)
    assert crops.hours == pytest.approx((25 + 47 + 21) * 0.08 / 3600)
    late = crops.batch(7, 4)
    again.batch(2, 4)
    ahead = again.batches(6, 4)
    next(ahead)
    assert late.shape == (4, 6 * SAMPLES_PER_FRAME)
    assert torch.equal(again.batch(7, 4), late) and torch.equal(next(ahead), late)
    assert not torch.equal(again.batch(8, 4), late) and not torch.equal(Crops(audio, 6, 4).batch(7, 4), late)
    starts = {torch.from_numpy(vowels(s, i)[:100] / np.float32(32768)) for i, s in enumerate((2.0, 3.7, 1.63))}
    assert all(any(torch.equal(row[:100], start) for start in starts) for row in late[:2])
    ahead.close()


def test_bad_shards_are_named(audio, tmp_path):
    with pytest.raises(AudioError, match="more than 93 frames"):
        Crops(audio, 93, 0)
    np.savez(tmp_path / "x.npz", audio=np.zeros(4, np.int16), samples=[5], speaker=["a"], text=["b"])
    with pytest.raises(AudioError, match=r"x\.npz.*5 samples"):
        read_shard(tmp_path / "x.npz")


def test_silence_around_speech_is_cut():
    speech = np.float32(np.concatenate((np.zeros(24_000), 0.3 * np.sin(np.arange(4_800)), np.full(24_000, 1e-3))))
    cut = trimmed(speech)
    assert len(cut) == pytest.approx(960 + 4_800 + 1_920, abs=3) and cut[0] == cut[-1] == 0
    assert len(trimmed(np.zeros(100, np.float32))) == 0
