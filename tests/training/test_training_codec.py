"""The trained codec against the inference decoder and against upstream's classes; learning, resuming, the commands."""

from __future__ import annotations

import itertools
import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from commands import run
from torch import Tensor

from mktts.checkpoint.tensors import expected_codec_tensors
from mktts.codec.decoder import CodecDecoder
from mktts.errors import AudioError, CheckpointError
from mktts.spec import NUM_CODEBOOKS, SAMPLE_RATE_HZ, SAMPLES_PER_FRAME
from mktts.synth.upstream import import_upstream
from mktts.training.codec import fit as codec_fit
from mktts.training.codec import train as codec_train
from mktts.training.codec.analysis import features
from mktts.training.codec.losses import magnitudes, mel_distance, mel_filters
from mktts.training.codec.model import Codec, hub_tensors, write_codec
from mktts.training.codec.sizes import TINY, VOICE, CodecSizes, config_json, decoder_config
from mktts.training.codec.train import train
from mktts.training.codec.trainer import CodecRecipe, CodecTrainer, load_codec
from mktts.training.data import encode
from mktts.training.data.codec_data import Crops, read_shard, vowels, write_shard

SPEAKERS, LENGTHS_S = ("slt", "rms", "awb"), (2.0, 3.7, 1.63)


@pytest.fixture(scope="module")
def audio(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("audio")
    clips = [vowels(seconds, seed) for seed, seconds in enumerate(LENGTHS_S)]
    write_shard(folder / "a.npz", clips[:2], list(SPEAKERS[:2]), ["one", "two"])
    write_shard(folder / "b.npz", clips[2:], list(SPEAKERS[2:]), ["three"])
    return folder


@pytest.fixture(scope="module")
def fitted(audio: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The file of a codec of few dimensions, fitted to the audio."""
    path = tmp_path_factory.mktemp("fitted") / "codec.pt"
    codec_fit.save(codec_fit.fit(codec_fit.frame_rows(audio, 1000, "cpu"), TINY, 0)[0], path)
    return path


@pytest.fixture(scope="module")
def codes(audio: Path, fitted: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("codes")
    run("train encode", "--codec", fitted, "--data", audio, "--out", folder, "--device", "cpu")
    return folder


@pytest.fixture
def codec(fitted: Path) -> Codec:
    """Scales and Snakes off their starting values, so that a swapped one is noticed."""
    torch.manual_seed(0)
    codec = load_codec(fitted)
    with torch.no_grad():
        for name, parameter in codec.named_parameters():
            if name.endswith(("alpha", "beta", "scale", "gamma")):
                parameter.add_(0.1 * torch.randn_like(parameter))
    return codec


RECIPE = CodecRecipe(batch=4, crop_frames=6, steps=100, warmup_steps=5, adversarial_from=None)


def trainer_of(fitted: Path, recipe: CodecRecipe = RECIPE, **settings: bool) -> CodecTrainer:
    return CodecTrainer(recipe, load_codec(fitted), **settings)


def steps(trainer: CodecTrainer, crops: Crops, count: int) -> list[dict[str, Tensor]]:
    return [trainer.train_step(*crops.batch(trainer.step, trainer.recipe.batch)) for _ in range(count)]


def some_codes(frames: int) -> Tensor:
    return torch.randint(TINY.codebook_size, (frames, NUM_CODEBOOKS), generator=torch.Generator().manual_seed(1))


@pytest.mark.parametrize("sizes", [TINY, VOICE], ids=["tiny", "voice"])
def test_exported_tensors_are_the_decoders_half_of_the_hub_layout(sizes: CodecSizes) -> None:
    expected = expected_codec_tensors(config_json(sizes), encoder=False)
    assert {n: s.shape for n, s in expected.items()} == {
        n: tuple(t.shape) for n, t in hub_tensors(Codec(sizes)).items()
    }


def test_inference_decoder_gives_the_training_decoders_samples_whole_and_streamed(codec: Codec) -> None:
    codes = some_codes(13)
    expected = codec.decode(codes[None])[0]
    tensors = {n.removeprefix("decoder."): t for n, t in hub_tensors(codec, torch.float32).items()}
    decoder = CodecDecoder(decoder_config(TINY), tensors)
    state = decoder.start()
    streamed = torch.cat([decoder.decode(part, state) for part in codes.split(3)])
    assert expected.std() > 1e-3
    assert (decoder.decode_all(codes) - expected).abs().max() < 1e-4
    assert (streamed - expected).abs().max() < 1e-4


def test_upstream_reads_the_folder_without_an_encoder_and_gives_the_same_samples(tmp_path: Path, codec: Codec) -> None:
    import_upstream()
    from qwen_tts.core.tokenizer_12hz.modeling_qwen3_tts_tokenizer_v2 import Qwen3TTSTokenizerV2Model

    write_codec(tmp_path, codec, torch.float32)
    upstream, report = Qwen3TTSTokenizerV2Model.from_pretrained(tmp_path, output_loading_info=True)
    assert all(name.startswith("encoder.") for name in report["missing_keys"])
    assert not report["mismatched_keys"] and not report["unexpected_keys"]
    codes = some_codes(9)[None]
    with torch.inference_mode():
        samples = upstream.eval().decode(codes).audio_values[0]
    assert (samples - codec.decode(codes)[0]).abs().max() < 1e-4


def test_an_absent_codec_is_an_error_that_says_what_makes_one(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="train fit"):
        load_codec(tmp_path / "codec.pt")


def test_shards_keep_their_clips_and_the_fit_sees_all_their_frames(audio: Path) -> None:
    shard = read_shard(audio / "a.npz")
    assert np.array_equal(shard.clip(1), vowels(LENGTHS_S[1], 1)) and list(shard.texts) == ["one", "two"]
    assert len(codec_fit.frame_rows(audio, 1000, "cpu")) == 25 + 47 + 21  # whole frames of each clip
    assert len(codec_fit.frame_rows(audio, 30, "cpu")) == 30


def test_codes_of_a_clip_are_those_of_the_clip_alone(audio: Path, fitted: Path, codes: Path) -> None:
    with np.load(codes / "a.npz") as file:
        found, frames = file["codes"], file["frames"]
        assert found.dtype == np.uint8 and list(frames) == [25, 47]
        assert list(file["speaker"]) == ["slt", "rms"] and list(file["text"]) == ["One.", "Two."]
    alone = torch.zeros(1, 25 * SAMPLES_PER_FRAME)
    alone[0, :48_000] = torch.from_numpy(vowels(2.0, 0) / np.float32(32_768))
    assert np.array_equal(found[:25], load_codec(fitted).encode(alone)[0].numpy())
    assert len(np.unique(found)) > TINY.codebook_size // 2


def test_each_part_of_a_divided_encoding_takes_its_shards(
    audio: Path, fitted: Path, codes: Path, tmp_path: Path
) -> None:
    command = ["train encode", "--codec", fitted, "--data", audio, "--out", tmp_path, "--device", "cpu"]
    run(*command, "--part", "2/2")
    assert [path.name for path in tmp_path.iterdir()] == ["b.npz"]
    (tmp_path / "b.npz").write_bytes(b"as it was")
    run(*command)
    assert (tmp_path / "b.npz").read_bytes() == b"as it was"
    with np.load(tmp_path / "a.npz") as ours, np.load(codes / "a.npz") as theirs:
        assert np.array_equal(ours["codes"], theirs["codes"])


def test_a_crops_codes_are_those_of_its_audio(audio: Path, fitted: Path, codes: Path) -> None:
    crops, codec = Crops(audio, codes, 12, seed=3), load_codec(fitted)
    assert crops.hours == pytest.approx((25 + 47 + 21) * 0.08 / 3600)
    pcm, given = crops.batch(7, 6)
    assert pcm.shape == (6, 12 * SAMPLES_PER_FRAME) and given.shape == (6, 12, NUM_CODEBOOKS)
    assert pcm.abs().max() <= 1 and given.dtype == torch.int64
    inner = slice(1, -1)  # the windows of the first frame and the last see what is around the crop
    found, given = codec.encode(pcm)[:, inner, :4], given[..., :4]  # so few frames leave nothing to the later books
    # a window across the end of a clip sees the next clip here, zeros there
    assert (found == given[:, inner]).float().mean() > 0.9
    assert max((found == given[:, shifted]).float().mean() for shifted in (slice(0, -2), slice(2, None))) < 0.5


def test_crops_depend_on_seed_and_step_only(audio: Path, codes: Path) -> None:
    crops, again = Crops(audio, codes, 6, seed=3), Crops(audio, codes, 6, seed=3)
    late = crops.batch(7, 4)
    again.batch(2, 4)
    ahead = again.batches(6, 4)
    next(ahead)
    for same in (again.batch(7, 4), next(ahead)):
        assert torch.equal(same[0], late[0]) and torch.equal(same[1], late[1])
    assert not torch.equal(again.batch(8, 4)[0], late[0])
    assert not torch.equal(Crops(audio, codes, 6, seed=4).batch(7, 4)[0], late[0])


def test_a_quiet_crop_is_drawn_again(tmp_path: Path, fitted: Path) -> None:
    loud = np.concatenate((np.zeros(20 * SAMPLES_PER_FRAME, np.int16), vowels(0.8)))
    write_shard(tmp_path / "audio" / "a.npz", [loud], ["slt"], ["one"])
    encode.encode_shard(load_codec(fitted), tmp_path / "audio" / "a.npz", tmp_path / "codes" / "a.npz")
    pcm, _ = Crops(tmp_path / "audio", tmp_path / "codes", 6, 0).batch(0, 32)
    assert (pcm.abs().amax(1) > 0.01).float().mean() > 0.9  # of single draws, half


def test_codes_of_other_audio_are_an_error_and_so_is_what_is_shorter_than_a_crop(
    audio: Path, codes: Path, tmp_path: Path
) -> None:
    with pytest.raises(AudioError, match="found none"):
        Crops(audio, tmp_path, 6, 0)
    with pytest.raises(AudioError, match="more than 93 frames"):
        Crops(audio, codes, 93, 0)
    swapped = [vowels(seconds) for seconds in (3.7, 2.0)]  # as many frames, in other clips
    write_shard(tmp_path / "audio" / "a.npz", swapped, ["slt", "rms"], ["one", "two"])
    with pytest.raises(AudioError, match=r"a\.npz.*other lengths.*encode it"):
        Crops(tmp_path / "audio", codes, 6, 0)
    (tmp_path / "audio" / "a.npz").unlink()
    with pytest.raises(AudioError, match=r"a\.npz"):
        Crops(tmp_path / "audio", codes, 6, 0)


def test_training_brings_the_loss_down_and_leaves_analysis_and_books(
    audio: Path, codes: Path, fitted: Path, tmp_path: Path
) -> None:
    crops, trainer, before = Crops(audio, codes, 6, 0), trainer_of(fitted), load_codec(fitted).state_dict()
    mels = [float(found["mel"]) for found in steps(trainer, crops, 24)]
    assert sum(mels[-4:]) < 0.8 * sum(mels[:4])
    after = trainer.codec.state_dict()
    kept = {name for name in before if torch.equal(before[name], after[name])}
    assert {name for name in kept if not name.startswith("decoder.")} == {
        *("analysis.mean", "analysis.basis", "quantizer.gain", "quantizer.first.books", "quantizer.rest.books")
    }
    trainer.save(tmp_path / "state.pt")
    pcm, _ = crops.batch(0, 2)  # the state holds the codec whole: it encodes as the fitted one does
    assert torch.equal(load_codec(tmp_path / "state.pt").encode(pcm), load_codec(fitted).encode(pcm))


@pytest.mark.slow
def test_steps_on_static_tensors_are_the_same_steps(audio: Path, codes: Path, fitted: Path) -> None:
    crops, recipe = Crops(audio, codes, 6, 0), replace(RECIPE, batch=2, adversarial_from=2, judged_frames=2)
    plain, static = trainer_of(fitted, recipe), CodecTrainer(recipe, load_codec(fitted), graphs=True)
    for found, expected in zip(steps(static, crops, 4), steps(plain, crops, 4), strict=True):
        assert {n: float(v) for n, v in found.items()} == {n: float(v) for n, v in expected.items()}


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_recorded_steps_learn_what_ordinary_ones_do(audio: Path, codes: Path, fitted: Path) -> None:
    crops, recipe = Crops(audio, codes, 6, 0), replace(RECIPE, batch=2, adversarial_from=8, judged_frames=2)
    plain, recorded = (CodecTrainer(recipe, load_codec(fitted), "cuda", graphs=graphs) for graphs in (False, True))
    mels = [[], []]
    for step in range(16):
        pcm, picked = (part.cuda() for part in crops.batch(step, 2))
        for trainer, found in zip((plain, recorded), mels, strict=True):
            found.append(float(trainer.train_step(pcm, picked)["mel"]))
    assert all(step.recorded for step in recorded.graphs._steps.values()) and len(recorded.graphs._steps) == 2
    assert np.allclose(*mels, rtol=0.05) and sum(mels[1][-4:]) < sum(mels[1][:4])


def test_a_resumed_run_takes_the_same_steps(audio: Path, codes: Path, fitted: Path, tmp_path: Path) -> None:
    crops, recipe = Crops(audio, codes, 6, 0), replace(RECIPE, batch=2, adversarial_from=1, judged_frames=2)
    trainer, resumed = trainer_of(fitted, recipe), trainer_of(fitted, recipe)
    steps(trainer, crops, 3)
    trainer.save(tmp_path / "state.pt")
    straight = steps(trainer, crops, 2)
    torch.rand(5)  # which part is judged is drawn, by the step
    resumed.load(tmp_path / "state.pt")
    for found, expected in zip(steps(resumed, crops, 2), straight, strict=True):
        assert {name: float(loss) for name, loss in found.items()} == {n: float(loss) for n, loss in expected.items()}
    assert resumed.step == 5 and len(straight[0]) == 12


def test_a_state_of_another_recipe_is_refused(fitted: Path, tmp_path: Path) -> None:
    trainer_of(fitted).save(tmp_path / "state.pt")
    with pytest.raises(CheckpointError, match="recipe"):
        trainer_of(fitted, replace(RECIPE, seed=1)).load(tmp_path / "state.pt")
    with pytest.raises(CheckpointError, match="sizes"):
        CodecTrainer(RECIPE, Codec(replace(TINY, layers=2))).load(tmp_path / "state.pt")
    with pytest.raises(CheckpointError, match="resume"):
        trainer_of(fitted).load(tmp_path / "absent.pt")


@pytest.mark.parametrize(
    "part", ["analysis.mean", "analysis.basis", "quantizer.gain", "quantizer.first.books", "quantizer.rest.books"]
)
def test_a_state_of_another_fit_is_refused_before_any_of_it_is_taken(fitted: Path, tmp_path: Path, part: str) -> None:
    other = load_codec(fitted)
    other.get_buffer(part).flatten()[-1] += 1e-3
    CodecTrainer(RECIPE, other).save(tmp_path / "state.pt")
    trainer = trainer_of(fitted)
    before = {name: tensor.clone() for name, tensor in trainer.codec.state_dict().items()}
    with pytest.raises(CheckpointError, match=rf"in {part}: name the file that the state began with"):
        trainer.load(tmp_path / "state.pt")
    assert all(torch.equal(tensor, before[name]) for name, tensor in trainer.codec.state_dict().items())


def test_the_command_refuses_to_resume_with_another_codec(fitted: Path, audio: Path, tmp_path: Path) -> None:
    other = tmp_path / "other.pt"
    codec_fit.save(codec_fit.fit(codec_fit.frame_rows(audio, 1000, "cpu"), TINY, 1)[0], other)
    trainer_of(fitted, CodecRecipe()).save(tmp_path / codec_train.STATE)
    folders = [f"--{name}={tmp_path}" for name in ("data", "codes", "out")]
    with pytest.raises(CheckpointError, match="--codec"):
        run("train codec", *folders, "--codec", other, "--resume", "--device", "cpu")


def test_a_trained_state_given_as_the_codec_is_the_same_fit(
    audio: Path, codes: Path, fitted: Path, tmp_path: Path
) -> None:
    trainer, path = trainer_of(fitted), tmp_path / "state.pt"
    steps(trainer, Crops(audio, codes, 6, 0), 2)
    trainer.save(path)
    resumed = CodecTrainer(RECIPE, load_codec(path))
    resumed.load(path)
    assert resumed.step == 2


@pytest.mark.slow
def test_discriminators_join_at_their_step_learn_and_teach(audio: Path, codes: Path, fitted: Path) -> None:
    recipe = replace(RECIPE, adversarial_from=1, batch=2)
    found = steps(trainer_of(fitted, recipe), Crops(audio, codes, 6, 0), 6)
    assert "judges" not in found[0] and "features" not in found[0]
    assert found[-1]["judges"] < found[1]["judges"] and found[-1]["features"] > 0


def test_a_step_in_bfloat16_is_near_one_in_fp32(audio: Path, codes: Path, fitted: Path) -> None:
    recipe = replace(RECIPE, adversarial_from=0, batch=1)  # one step: CPUs without bfloat16 units take seconds for it
    halves, whole = (
        steps(trainer_of(fitted, recipe, autocast=a), Crops(audio, codes, 3, 0), 1)[0] for a in (True, False)
    )
    assert halves.keys() == whole.keys() and "judges" in whole
    for name, value in whole.items():
        assert float(halves[name]) == pytest.approx(float(value), rel=0.05, abs=0.02), name


def test_by_the_clock_the_schedule_ends_with_the_slice(audio: Path, codes: Path, fitted: Path, tmp_path: Path) -> None:
    recipe = replace(RECIPE, steps=1_000_000, batch=1)
    trainer = trainer_of(fitted, recipe)
    a_second_a_step = itertools.count(0.0).__next__
    train(trainer, Crops(audio, codes, 6, 0), tmp_path, minutes=0.4, by_clock=True, clock=a_second_a_step)
    assert 20 <= trainer.step < 24 and 0.9 < trainer.progress < 1
    assert trainer.optimizer.param_groups[0]["lr"] < 0.13 * recipe.rate


def last_line(capsys: pytest.CaptureFixture[str]) -> dict:
    return json.loads(capsys.readouterr().out.splitlines()[-1])


@pytest.mark.slow
def test_the_commands_in_turn_leave_a_codec_its_codes_curves_and_a_decoder(
    audio: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(codec_fit, "VOICE", TINY)
    file, out, given = tmp_path / "codec.pt", tmp_path / "out", tmp_path / "codes"
    data = ["--data", str(audio), "--device", "cpu"]
    run("train fit", *data, "--out", file, "--frames", "80")
    fit = last_line(capsys)
    assert fit["frames"] == 80 and len(fit["left_after_each_book"]) == NUM_CODEBOOKS - TINY.noise_books
    run("train encode", *data, "--codec", file, "--out", given)
    assert last_line(capsys) == {"shards": 2, "frames": 25 + 47 + 21}
    command = [*data, "--codec", str(file), "--codes", str(given), "--out", str(out), "--no-autocast", "--every", "1"]
    command += ["--batch", "2", "--crop-frames", "6", "--steps", "4", "--adversarial-from", "3"]
    run("train codec", *command, "--stop-at", "2")
    assert last_line(capsys)["step"] == 2
    run("train codec", *command, "--resume")
    reached = last_line(capsys)
    assert (reached["step"], reached["of_steps"]) == (4, 4) and reached["loss"] > 0
    curves = json.loads((out / "curves.json").read_text())
    assert [line["step"] for line in curves] == [1, 2, 3, 4]
    assert all({"loss", "mel", "fixed_mel", "seconds"} <= line.keys() for line in curves)
    assert ["judges" in line for line in curves] == [False, False, False, True]
    trained = load_codec(out / "state.pt")
    with np.load(given / "b.npz") as shard:
        codes = torch.from_numpy(shard["codes"].astype(np.int64))[None]
    assert torch.equal(trained.encode(torch.zeros(1, 1920)), load_codec(file).encode(torch.zeros(1, 1920)))

    import_upstream()
    from qwen_tts.core.tokenizer_12hz.modeling_qwen3_tts_tokenizer_v2 import Qwen3TTSTokenizerV2Model

    upstream = Qwen3TTSTokenizerV2Model.from_pretrained(out / "speech_tokenizer", dtype=torch.float32).eval()
    with torch.inference_mode():
        samples = upstream.decode(codes).audio_values[0]
    assert samples.shape == (codes.shape[1] * SAMPLES_PER_FRAME,)
    assert (samples - trained.decode(codes)[0]).abs().max() < 0.02  # weights were written in bfloat16


def test_mel_distance_of_a_tone_and_its_double_is_the_logarithm_of_two_in_its_bands() -> None:
    time = torch.arange(24_000) / SAMPLE_RATE_HZ
    noise = 0.1 * torch.randn(1, 24_000, generator=torch.Generator().manual_seed(0))
    tone = 0.1 * torch.sin(2 * torch.pi * 440 * time)[None] + noise
    assert float(mel_distance(2 * tone, tone)) == pytest.approx(float(np.log(2)), rel=1e-3)
    assert float(magnitudes(torch.sin(2 * torch.pi * 3000 * time)[None], 1024).max()) == pytest.approx(1, rel=1e-2)


def test_filters_that_an_analysis_asked_for_first_serve_training() -> None:
    mel_filters.cache_clear()
    noise = 0.1 * torch.randn(1, 3 * SAMPLES_PER_FRAME, generator=torch.Generator().manual_seed(0))
    with torch.inference_mode():
        features(noise)
    output = noise.clone().mul_(0.5).requires_grad_()
    mel_distance(output, noise).backward()
    assert output.grad.abs().max() > 0
