"""The trainable codec against the inference decoder and against upstream's classes; learning, resuming, encoding."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor

from mktts.codec import CodecDecoder
from mktts.codec_layout import expected_codec_tensors
from mktts.errors import AudioError, CheckpointError
from mktts.spec import NUM_CODEBOOKS, SAMPLE_RATE_HZ, SAMPLES_PER_FRAME
from mktts.training.codec_data import Crops, read_shard, vowels, write_shard
from mktts.training.codec_losses import magnitudes, mel_distance
from mktts.training.codec_model import Codec, hub_tensors, write_codec
from mktts.training.codec_quantizer import Codebook
from mktts.training.codec_sizes import TINY, VOICE, CodecSizes, config_json, decoder_config
from mktts.training.codec_train import perplexities, train
from mktts.training.codec_trainer import CodecRecipe, CodecTrainer, load_codec
from mktts.training.encode import main as encode_main
from mktts.upstream import import_upstream


def codec_after_a_step(sizes: CodecSizes = TINY) -> Codec:
    """Codebooks from noise, and scales and Snakes off their starting values, so that a swapped one is noticed."""
    torch.manual_seed(0)
    codec = Codec(sizes).train()
    with torch.no_grad():
        codec(0.1 * torch.randn(4, 8 * SAMPLES_PER_FRAME), start=True)
        for name, parameter in codec.named_parameters():
            if name.endswith(("alpha", "beta", "scale", "gamma")):
                parameter.add_(0.1 * torch.randn_like(parameter))
    return codec.eval()


def decoder_tensors(codec: Codec) -> dict[str, Tensor]:
    tensors = hub_tensors(codec, torch.float32)
    return {n.removeprefix("decoder."): t for n, t in tensors.items() if n.startswith("decoder.")}


@pytest.mark.parametrize("sizes", [TINY, VOICE], ids=["tiny", "voice"])
def test_exported_tensors_have_the_hub_layout(sizes: CodecSizes) -> None:
    expected = expected_codec_tensors(config_json(sizes))
    assert {n: s.shape for n, s in expected.items()} == {
        n: tuple(t.shape) for n, t in hub_tensors(Codec(sizes)).items()
    }


def test_inference_decoder_gives_the_training_decoders_samples_whole_and_streamed() -> None:
    codec = codec_after_a_step()
    codes = torch.randint(TINY.codebook_size, (13, NUM_CODEBOOKS), generator=torch.Generator().manual_seed(1))
    expected = codec.decode(codes[None])[0]
    decoder = CodecDecoder(decoder_config(TINY), decoder_tensors(codec))
    state = decoder.start()
    streamed = torch.cat([decoder.decode(part, state) for part in codes.split(3)])
    assert expected.std() > 1e-3
    assert (decoder.decode_all(codes) - expected).abs().max() < 1e-4
    assert (streamed - expected).abs().max() < 1e-4


def test_upstream_reads_the_folder_and_gives_the_same_codes_and_samples(tmp_path: Path) -> None:
    import_upstream()
    from qwen_tts.core.tokenizer_12hz.modeling_qwen3_tts_tokenizer_v2 import Qwen3TTSTokenizerV2Model

    codec = codec_after_a_step()
    write_codec(tmp_path, codec, torch.float32)
    upstream, report = Qwen3TTSTokenizerV2Model.from_pretrained(tmp_path, output_loading_info=True)
    assert not report["missing_keys"] and not report["mismatched_keys"]
    pcm = 0.1 * torch.randn(1, 9 * SAMPLES_PER_FRAME)
    ours = codec.encode(pcm)
    with torch.inference_mode():
        theirs = upstream.eval().encode(pcm, torch.ones_like(pcm).long()).audio_codes[0]
        samples = upstream.decode(ours).audio_values[0]
    assert torch.equal(ours[0], theirs)
    assert len(torch.unique(theirs)) > TINY.codebook_size // 2
    assert (samples - codec.decode(ours)[0]).abs().max() < 1e-4


RECIPE = CodecRecipe(batch=4, crop_frames=6, steps=100, warmup_steps=5, quantise_from=4, adversarial_from=None)


@pytest.fixture(scope="module")
def shards(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("shards")
    clips = [vowels(seconds, seed) for seed, seconds in enumerate((1.0, 1.7, 0.63))]
    write_shard(folder / "a.npz", clips[:2], ["slt", "rms"], ["one", "two"])
    write_shard(folder / "b.npz", clips[2:], ["awb"], ["three"])
    return folder


def test_shards_keep_their_clips_and_crops_depend_on_seed_and_step_only(shards: Path) -> None:
    shard = read_shard(shards / "a.npz")
    assert np.array_equal(shard.clip(1), vowels(1.7, 1)) and list(shard.texts) == ["one", "two"]
    crops, again = Crops(shards, 6, seed=3), Crops(shards, 6, seed=3)
    assert crops.hours == pytest.approx(3.33 / 3600, rel=1e-3)
    late = crops.batch(7, 4)
    again.batch(2, 4)
    assert torch.equal(again.batch(7, 4), late) and not torch.equal(again.batch(8, 4), late)
    assert not torch.equal(Crops(shards, 6, seed=4).batch(7, 4), late)


def test_a_folder_without_shards_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(AudioError, match="found none"):
        Crops(tmp_path, 6, 0)


def test_training_brings_the_loss_down_and_a_resumed_run_takes_the_same_steps(shards: Path, tmp_path: Path) -> None:
    crops = Crops(shards, RECIPE.crop_frames, RECIPE.seed)
    trainer = CodecTrainer(RECIPE, TINY)
    mels = [float(trainer.train_step(crops.batch(trainer.step, 4))["mel"]) for _ in range(24)]
    assert sum(mels[-4:]) < 0.8 * sum(mels[:4])
    trainer.save(tmp_path / "state.pt")
    straight = [float(trainer.train_step(crops.batch(trainer.step, 4))["loss"]) for _ in range(2)]
    resumed = CodecTrainer(RECIPE, TINY)
    resumed.load(tmp_path / "state.pt")
    assert [float(resumed.train_step(crops.batch(resumed.step, 4))["loss"]) for _ in range(2)] == straight


def test_a_state_of_another_recipe_is_refused(tmp_path: Path) -> None:
    CodecTrainer(RECIPE, TINY).save(tmp_path / "state.pt")
    with pytest.raises(CheckpointError, match="recipe"):
        CodecTrainer(replace(RECIPE, seed=1), TINY).load(tmp_path / "state.pt")


def test_discriminators_learn_and_the_codec_is_taught_by_them(shards: Path) -> None:
    recipe = replace(RECIPE, adversarial_from=0)
    trainer = CodecTrainer(recipe, TINY, autocast=True)
    crops = Crops(shards, recipe.crop_frames, recipe.seed)
    found = [trainer.train_step(crops.batch(trainer.step, 4)) for _ in range(6)]
    assert found[-1]["judges"] < found[0]["judges"] and found[-1]["features"] > 0


def test_the_decoder_learns_alone_while_the_codes_stay(shards: Path, tmp_path: Path) -> None:
    crops = Crops(shards, RECIPE.crop_frames, RECIPE.seed)
    trainer = CodecTrainer(RECIPE, TINY)
    for _ in range(8):
        trainer.train_step(crops.batch(trainer.step, 4))
    trainer.codec.eval()
    codes, before = (
        trainer.codec.encode(crops.batch(0, 4)),
        {n: p.clone() for n, p in trainer.codec.state_dict().items()},
    )
    trainer.codec.train()
    trainer.decoder_only = True
    train(trainer, crops, tmp_path, minutes=1, stop_at=10)
    after = trainer.codec.eval().state_dict()
    changed = {name.split(".")[0] for name, tensor in before.items() if not torch.equal(tensor, after[name])}
    assert changed == {"decoder"} and torch.equal(trainer.codec.encode(crops.batch(0, 4)), codes)
    resumed = CodecTrainer(RECIPE, TINY)
    resumed.load(tmp_path / "state.pt")
    assert resumed.decoder_only


def test_by_the_clock_the_schedule_ends_with_the_slice(shards: Path, tmp_path: Path) -> None:
    recipe = replace(RECIPE, steps=1_000_000, quantise_from=0)
    trainer = CodecTrainer(recipe, TINY)
    train(trainer, Crops(shards, recipe.crop_frames, 0), tmp_path, minutes=0.05, by_clock=True)
    assert trainer.step < 1_000 and trainer.progress is not None and 0.5 < trainer.progress < 1
    assert trainer.optimizer.param_groups[0]["lr"] < 0.55 * recipe.rate


def test_a_slice_of_training_leaves_curves_a_codec_and_codes_of_every_clip(shards: Path, tmp_path: Path) -> None:
    recipe = replace(RECIPE, steps=2, quantise_from=0)
    train(CodecTrainer(recipe, TINY), Crops(shards, recipe.crop_frames, 0), tmp_path, minutes=1, every=1)
    curves = json.loads((tmp_path / "curves.json").read_text())
    assert [line["step"] for line in curves] == [1, 2] and len(curves[0]["books"]) == NUM_CODEBOOKS
    assert (tmp_path / "speech_tokenizer" / "model.safetensors").is_file()

    encode_main(["--codec", str(tmp_path / "state.pt"), "--data", str(shards), "--out", str(tmp_path / "codes")])
    with np.load(tmp_path / "codes" / "a.npz") as file:
        codes, frames, speakers = file["codes"], file["frames"], file["speaker"]
    assert codes.dtype == np.uint8 and list(frames) == [13, 22] and list(speakers) == ["slt", "rms"]
    alone = torch.zeros(1, 13 * SAMPLES_PER_FRAME)
    alone[0, :24_000] = torch.from_numpy(vowels(1.0, 0) / np.float32(32_768))
    assert np.array_equal(codes[:13], load_codec(tmp_path / "state.pt").encode(alone)[0].numpy())


def test_entries_that_win_nothing_move_until_all_are_used() -> None:
    torch.manual_seed(0)
    book = Codebook(16, 2)
    book.sums.fill_(50.0)  # all entries in one far place: one of them wins every row
    for _ in range(600):
        rows = torch.randn(256, 2)
        book.follow(rows, book.nearest(rows))
    used = perplexities(book.nearest(torch.randn(4096, 2))[:, None, None], 16)
    assert used[0] > 11


def test_mel_distance_of_a_tone_and_its_double_is_the_logarithm_of_two_in_its_bands() -> None:
    time = torch.arange(24_000) / SAMPLE_RATE_HZ
    noise = 0.1 * torch.randn(1, 24_000, generator=torch.Generator().manual_seed(0))
    tone = 0.1 * torch.sin(2 * torch.pi * 440 * time)[None] + noise
    assert float(mel_distance(2 * tone, tone)) == pytest.approx(float(np.log(2)), rel=1e-3)
    assert float(magnitudes(torch.sin(2 * torch.pi * 3000 * time)[None], 1024).max()) == pytest.approx(1, rel=1e-2)
