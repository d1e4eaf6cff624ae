"""Beginning with a codec that was trained before: reading it back, widening it, giving it other codes."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path

import pytest
import torch
from commands import run
from test_training_noise import SILENT, fitted, noise, spoken
from torch import Tensor

from mktts.checkpoint import files, open_checkpoint
from mktts.checkpoint.files import WeightFiles
from mktts.codec.decoder import CodecDecoder
from mktts.errors import CheckpointError
from mktts.spec import NUM_CODEBOOKS, SAMPLES_PER_FRAME, CodecConfig
from mktts.training.codec import fit as codec_fit
from mktts.training.codec import train as codec_train
from mktts.training.codec.analysis import features
from mktts.training.codec.model import Codec, write_codec
from mktts.training.codec.quantizer import nearest_path
from mktts.training.codec.sizes import TINY, VOICE, WIDE, CodecSizes
from mktts.training.codec.trainer import load_codec
from mktts.training.codec.warm import adopted, grown, recovered, sizes_of
from mktts.training.data.codec_data import vowels, write_shard


@dataclass(frozen=True)
class CodecOnly:
    """A checkpoint's half that a codec is read back from."""

    folder: Path
    codec_config: CodecConfig
    codec_files: WeightFiles


def checkpoint_of(codec: Codec, folder: Path) -> CodecOnly:
    write_codec(folder / "speech_tokenizer", codec, torch.float32)
    return CodecOnly(folder, CodecConfig.load(folder), files.find(folder / "speech_tokenizer"))


def books_of(codec: Codec) -> Tensor:
    return torch.cat((codec.quantizer.first.books, codec.quantizer.rest.books))


def shaken(codec: Codec) -> Codec:
    """As after some training: all weights are other ones than at the start."""
    torch.manual_seed(5)
    with torch.no_grad():
        for parameter in codec.parameters():
            parameter.add_(0.01 * torch.randn_like(parameter))
    return codec


@pytest.mark.parametrize(("sizes", "other"), [(SILENT, TINY), (TINY, SILENT)])
def test_a_shipped_codecs_analysis_is_recovered_from_what_it_says(
    tmp_path: Path, sizes: CodecSizes, other: CodecSizes
) -> None:
    pcm = torch.cat([spoken(300, 1), spoken(300, 2) + 0.1 * noise(8, frames=300)], 1)
    codec = shaken(fitted(sizes, pcm))
    checkpoint = checkpoint_of(codec, tmp_path)
    assert sizes_of(checkpoint) == sizes
    rows = features(pcm)[0]  # as if the decoder were perfect
    said = codec.quantizer.redrawn(codec.quantizer.encode(codec.analysis.components(rows)))
    found = recovered(checkpoint, sizes, rows, said)
    assert found.sizes == sizes and torch.equal(books_of(found), books_of(codec))
    held_out = spoken(100, 3)
    codes, ours = codec.encode(held_out), found.encode(held_out)
    assert (codes[..., :2] == ours[..., :2]).float().mean() > 0.9
    assert torch.equal(found.decode(codes), codec.decode(codes))
    assert torch.equal(grown(found, sizes, 1).decode(codes), codec.decode(codes))
    assert torch.equal(grown(found, sizes, 1).encode(held_out), ours)
    with pytest.raises(CheckpointError, match="other tensors"):
        recovered(checkpoint, other, rows, codes)


def test_the_sizes_of_the_shipped_codec_are_read_with_its_noise() -> None:
    sizes = sizes_of(open_checkpoint("small"))
    assert (sizes.components, sizes.noise, sizes.noise_books) == (64, 64, 2) and sizes == WIDE


def test_books_whose_noise_does_not_lie_behind_the_components_are_refused(tmp_path: Path) -> None:
    codec = fitted(TINY, spoken(60))
    codec.quantizer.first.books[..., 3] = 0
    assert sizes_of(checkpoint_of(codec, tmp_path)) == TINY, "the other measured books fill it"
    codec.quantizer.rest.books[-1, :, 3] = 1
    with pytest.raises(CheckpointError, match="last 2 codebooks to fill only dimensions behind"):
        sizes_of(checkpoint_of(codec, tmp_path))


def of_fourteen_books(codec: Codec, pcm: Tensor) -> Tensor:
    """The codes that a codec would give with its first fourteen books alone."""
    books, rows = codec.quantizer.measured() / codec.quantizer.gain, codec.analysis(pcm)
    return nearest_path(rows.flatten(0, -2), books[:14]).unflatten(0, rows.shape[:-1])


def test_a_grown_codec_encodes_as_before_and_takes_every_weight() -> None:
    old = fitted(SILENT, spoken(100))
    assert torch.equal(grown(old, SILENT).decode(old.encode(spoken(9))), old.decode(old.encode(spoken(9))))
    wide = replace(TINY, latent=24, hidden=32, heads=4, layers=2)
    new = grown(old, wide)
    codes = new.encode(spoken(9, 4))
    assert codes.shape[-1] == NUM_CODEBOOKS and torch.equal(codes[..., 0], old.encode(spoken(9, 4))[..., 0])
    assert torch.equal(codes[..., :14], of_fourteen_books(old, spoken(9, 4)))
    ours = dict(new.named_parameters())
    for name, part in old.named_parameters():
        assert torch.equal(ours[name][tuple(slice(n) for n in part.shape)], part)
    other = codes.clone()
    other[..., -1] = (other[..., -1] + 1) % 32
    assert (new.decode(codes) - new.decode(other)).abs().max() > 1e-4  # noise is heard at once
    with pytest.raises(CheckpointError, match="room"):
        grown(new, TINY)
    with pytest.raises(CheckpointError, match="components"):
        grown(old, VOICE)


def test_a_grown_codec_keeps_noise_books_that_both_have_and_loses_none() -> None:
    old = shaken(fitted(TINY, spoken(60)))
    wide = grown(old, replace(TINY, latent=24), 1)
    assert torch.equal(books_of(wide), books_of(old))
    assert torch.equal(wide.quantizer(old.encode(spoken(9))), old.quantizer(old.encode(spoken(9))))
    for sizes in (replace(TINY, noise_books=3), replace(TINY, noise=12)):
        books = books_of(grown(old, sizes, 1))
        count = NUM_CODEBOOKS - sizes.noise_books
        assert torch.equal(books[:count, :, :8], books_of(old)[:count, :, :8]) and not books[count:, :, :8].any()
        assert books[count:, :, 8:].sum(0).std() == pytest.approx(1, abs=0.15), "drawn as at the start"
    for sizes in (replace(TINY, noise_books=1), SILENT):
        with pytest.raises(CheckpointError, match=f"at most {sizes.noise_books} noise books, found 2"):
            grown(old, sizes)


@pytest.mark.parametrize("sizes", [SILENT, TINY])
def test_an_adopted_decoder_hears_the_new_codes_nearly_as_it_heard_its_own(sizes: CodecSizes) -> None:
    pcm, held_out = spoken(300, 1), spoken(60, 3)
    old, new = fitted(sizes, pcm), codec_fit.fit(features(pcm[:, : 200 * SAMPLES_PER_FRAME])[0], TINY, 1)[0]
    before = old.state_dict()["quantizer.rest.output_proj.weight"].clone()
    found = adopted(old, new, features(pcm)[0])
    assert found.sizes == TINY and torch.equal(found.encode(held_out), new.encode(held_out))
    assert torch.equal(old.quantizer.rest.output_proj.weight, before), "the old one stays what it was"
    kept = old if sizes == TINY else new
    assert torch.equal(books_of(found)[14:], books_of(kept)[14:]), "what the decoder has learnt to make noise of"
    codes = [codec.encode(held_out) for codec in (old, found, new)]
    if sizes == TINY:  # the same noise for all, so that only what is measured differs
        codes = [torch.cat((own[..., :14], codes[0][..., 14:]), -1) for own in codes]
    with torch.no_grad():
        goal = old.quantizer(codes[0])
        heard, unlike = (c.quantizer(x)[:, : goal.shape[1]] for c, x in zip((found, new), codes[1:], strict=True))
    assert (heard - goal).square().mean() < 0.5 * goal.square().mean() < (unlike - goal).square().mean()


@pytest.mark.slow
def test_commands_begin_with_a_file_and_widen_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    wide = replace(TINY, latent=24)
    monkeypatch.setattr(codec_fit, "VOICE", TINY)
    monkeypatch.setattr(codec_fit, "WIDE", wide)
    monkeypatch.setattr(codec_train, "WIDE", wide)
    audio, file, begun = tmp_path / "audio", tmp_path / "old.pt", tmp_path / "new.pt"
    write_shard(audio / "a.npz", [vowels(2.0), vowels(2.0, 1)], ["slt"] * 2, ["one"] * 2)
    codec_fit.save(fitted(SILENT, spoken(60)), file)
    run("train fit", "--data", audio, "--out", begun, "--begin", file, "--device", "cpu")
    run("train encode", "--data", audio, "--codec", begun, "--out", tmp_path / "codes", "--device", "cpu")
    expected = of_fourteen_books(load_codec(file), spoken(9))
    assert torch.equal(load_codec(begun).encode(spoken(9))[..., :14], expected)
    command = ["--data", audio, "--codes", tmp_path / "codes", "--codec", begun, "--out", tmp_path / "out", "--wide"]
    command += ["--batch", "2", "--crop-frames", "6", "--steps", "3", "--device", "cpu", "--hours", "1"]
    run("train codec", *command, "--stop-at", "1")
    run("train codec", *command, "--resume")
    trained = load_codec(tmp_path / "out" / "state.pt")
    assert trained.sizes == wide
    run("train fit", "--data", audio, "--out", begun, "--begin", tmp_path / "out" / "state.pt", "--device", "cpu")
    codes = trained.encode(spoken(9))
    assert load_codec(begun).sizes == wide and torch.equal(load_codec(begun).decode(codes), trained.decode(codes))
    run("train fit", "--data", audio, "--out", begun, "--begin", file, "--refit", "--device", "cpu")
    assert not torch.equal(load_codec(begun).analysis.basis, load_codec(file).analysis.basis)
    snakes = [dict(load_codec(path).decoder.named_parameters())["decoder.5.alpha"] for path in (begun, file)]
    assert torch.equal(*snakes)
    with pytest.raises(CheckpointError, match="expected"):
        run("train fit", "--data", audio, "--out", begun, "--begin", tmp_path / "absent.pt", "--device", "cpu")


@pytest.mark.slow
def test_the_command_begins_with_the_shipped_voice(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    audio, begun = tmp_path / "audio", tmp_path / "codec.pt"
    write_shard(audio / "a.npz", [vowels(1.0)] * 2, ["slt"] * 2, ["One and two and three.", "Four, five and six."])
    command = ["--data", audio, "--out", begun, "--begin", "small", "--seconds", "2", "--device", "cpu"]
    voice = open_checkpoint("small")
    codes = torch.randint(256, (12, NUM_CODEBOOKS), generator=torch.Generator().manual_seed(0))
    expected = CodecDecoder(voice.codec_config, voice.codec_tensors()).decode_all(codes)
    assert run("train fit", *command) == 0
    assert capsys.readouterr().out.splitlines()[-1] == '{"begun_with": "small"}'
    codec = load_codec(begun)
    assert codec.sizes == WIDE and codec.encode(spoken(9)).shape == (1, 9, NUM_CODEBOOKS)
    assert expected.std() > 1e-3 and (codec.decode(codes[None])[0] - expected).abs().max() < 1e-4
