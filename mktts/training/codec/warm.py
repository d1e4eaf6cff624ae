"""Begins a codec with what a trained one has learnt: from a checkpoint, with noise books, and with other widths."""

from __future__ import annotations

import copy
from collections.abc import Iterable, Mapping
from dataclasses import fields, replace

import torch
from torch import Tensor

from mktts.checkpoint import Checkpoint
from mktts.errors import CheckpointError
from mktts.spec import FRAME_RATE_HZ, NUM_CODEBOOKS, CodecConfig
from mktts.training.codec.analysis import features
from mktts.training.codec.model import Codec, hub_tensors, noise_books
from mktts.training.codec.quantizer import summed
from mktts.training.codec.sizes import CodecSizes, decoder_config

_ROWS = 40_000  # that projections are sought over: hundreds for each dimension
_DIRECTIONS = 128  # of the features that the analysis is sought among: twice its components, and well determined


def spoken(checkpoint: Checkpoint, lines: Iterable[tuple[str, str]], seconds: float) -> tuple[Tensor, Tensor]:
    """Features (N, 648) and codes (N, 16) of `seconds` of a checkpoint's own speech; lines: (text, speaker)."""
    from mktts.synth import Synthesizer

    rows, codes, spoken_s = [], [], 0.0
    with Synthesizer.load(checkpoint, backend="torch", device="cpu") as synthesizer:
        for seed, (text, speaker) in enumerate(lines):
            stream = synthesizer.stream(text, speaker=speaker, seed=seed)
            pcm = torch.from_numpy(stream.read())
            rows.append(features(pcm[None])[0])
            codes.append(stream.codes.long())
            spoken_s += len(codes[-1]) / FRAME_RATE_HZ
            if spoken_s >= seconds:
                break
    return torch.cat(rows), torch.cat(codes)


@torch.no_grad()
def recovered(checkpoint: Checkpoint, sizes: CodecSizes, rows: Tensor, codes: Tensor) -> Codec:
    """The codec of a checkpoint that was trained here, with the analysis that its files leave out.

    rows (N, 648), codes (N, 16): what it says, and the codes it said it from. What the measured ones stand for is
    known, so the analysis is the linear map that finds it in the features, by least squares among their principal
    components. sizes: of the checkpoint's codec (`sizes_of`). Raises CheckpointError where they are not.
    """
    codec = Codec(sizes)
    tensors = {name: t.float() for name, t in checkpoint.codec_files.map().items() if name.startswith("decoder.")}
    expected = {name: t.shape for name, t in hub_tensors(codec).items()}
    if {name: t.shape for name, t in tensors.items()} != expected:
        raise CheckpointError(f"{checkpoint.folder}: expected the codec of {sizes}, found other tensors")
    own = "decoder.quantizer."
    codec.decoder.load_state_dict({n.removeprefix("decoder."): t for n, t in tensors.items() if not n.startswith(own)})
    books = _books(tensors)
    codec.quantizer.first.books.copy_(books[:1])
    codec.quantizer.rest.books.copy_(books[1:])
    for chain, name in ((codec.quantizer.first, "rvq_first"), (codec.quantizer.rest, "rvq_rest")):
        chain.output_proj.weight.copy_(tensors[f"{own}{name}.output_proj.weight"])
    measured = codec.quantizer.measured()
    vectors = summed(codes[:, : len(measured)], measured)
    basis, mean = _map(rows, vectors)
    # `SplitQuantizer.fit`: entries have a deviation of sqrt(d / m) for one of d among the components, whose mean is m,
    # so components are entries times m times their own deviation; m is what makes the basis' columns as long as 1
    gain = 1 / vectors.std(0).clamp(min=1e-6)
    scale = 1 / (basis / gain).norm(dim=0).mean()
    codec.quantizer.gain = gain / scale
    codec.analysis.basis = basis / codec.quantizer.gain
    codec.analysis.mean = mean
    return codec


@torch.no_grad()
def adopted(old: Codec, fitted: Codec, rows: Tensor) -> Codec:
    """The analysis and books of `fitted`, with the decoder of `old`, which was trained for other ones.

    What the decoder takes of the old measured codes is nearly linear in what the new ones stand for, so its first
    projections are those that come nearest to it: least squares over `rows` (N, 648), features. What it takes of noise
    stays, and so do the noise books where the new sizes have the same. Raises CheckpointError as `grown`.
    """
    turned, width = copy.deepcopy(old), old.sizes.components
    first, rest = (c.output_proj.weight[:, :width, 0] for c in (turned.quantizer.first, turned.quantizer.rest))
    rows = rows[:: max(1, len(rows) // _ROWS)]
    goal = _entries(old, rows) @ torch.cat((first, rest), 1).T
    change = torch.linalg.lstsq(_entries(fitted, rows).double(), goal.double()).solution.T.float()
    first.copy_(change[:, :width])
    rest.copy_(change[:, width:])
    new = grown(turned, fitted.sizes)
    new.analysis.load_state_dict(fitted.analysis.state_dict())
    for name, buffer in fitted.quantizer.named_buffers():
        new.quantizer.get_buffer(name).copy_(buffer)
    _keep_noise(old, new)
    return new


def _entries(codec: Codec, rows: Tensor) -> Tensor:
    """What a codec's measured codes of features (N, 648) stand for: the first entry beside the others' sum, (N, 2 *
    components)."""
    codes, books = codec.quantizer.encode(codec.analysis.components(rows)), codec.quantizer.measured()
    return torch.cat((summed(codes[:, :1], books[:1]), summed(codes[:, 1 : len(books)], books[1:])), -1)


def _map(rows: Tensor, vectors: Tensor) -> tuple[Tensor, Tensor]:
    """Basis (648, width) and mean (648,) with (rows - mean) @ basis near `vectors` (N, width)."""
    middle = rows.mean(0)
    centred = (rows - middle).double()
    _, directions = torch.linalg.eigh(centred.T @ centred)
    directions = directions[:, -min(_DIRECTIONS, len(rows) // 4) :]
    goal = vectors.double()
    found = torch.linalg.lstsq(centred @ directions, goal - goal.mean(0)).solution
    basis = directions @ found
    return basis.float(), (middle - goal.mean(0) @ torch.linalg.pinv(basis)).float()


def sizes_of(checkpoint: Checkpoint) -> CodecSizes:
    """The sizes of a checkpoint's codec that was trained here. Raises CheckpointError for another one.

    The configuration says how many dimensions an entry has, and the codebooks which of them are noise.
    """
    sizes = _sizes_without_noise(checkpoint.codec_config)
    tensors = checkpoint.codec_files.map()
    count = noise_books(tensors)
    if not count:
        return sizes
    filled = _books(tensors).any(1)  # (books, dimensions)
    components = int((filled[:-count].any(0) * torch.arange(1, sizes.vector + 1)).max())
    if not components or filled[-count:, :components].any():
        raise CheckpointError(
            f"{checkpoint.folder}: expected the last {count} codebooks to fill only dimensions behind those of the "
            f"others, which fill {components} of {sizes.vector}"
        )
    return replace(sizes, components=components, noise_books=count, noise=sizes.vector - components)


def _sizes_without_noise(config: CodecConfig) -> CodecSizes:
    """As if all dimensions of an entry were components. Raises CheckpointError as `sizes_of`."""
    sizes = CodecSizes(
        codebook_size=config.codebook_size,
        components=config.codebook_dim // 2,
        latent=config.latent_dim,
        hidden=config.hidden_size,
        feed_forward=config.intermediate_size,
        heads=config.num_attention_heads,
        head_dim=config.head_dim,
        layers=config.num_hidden_layers,
        window=config.sliding_window,
        decoder=config.decoder_dim,
    )
    found = decoder_config(sizes)
    other = [field.name for field in fields(config) if getattr(found, field.name) != getattr(config, field.name)]
    if other:
        raise CheckpointError(f"expected a codec that was trained here, found another {', '.join(other)}")
    return sizes


def _books(tensors: Mapping[str, Tensor]) -> Tensor:
    """Codebooks as vectors, (16, size, dimensions) in fp32, of tensors by Hub name."""
    names = ("rvq_first.vq.layers.0", *(f"rvq_rest.vq.layers.{i}" for i in range(NUM_CODEBOOKS - 1)))
    sums, usage = (
        torch.stack([tensors[f"decoder.quantizer.{name}._codebook.{part}"].float() for name in names])
        for part in ("embedding_sum", "cluster_usage")
    )
    return sums / usage.clamp(min=1e-5)[..., None]


@torch.no_grad()
def grown(old: Codec, sizes: CodecSizes, seed: int = 0) -> Codec:
    """A codec of `sizes` with the analysis, weights and books of `old`; with its noise books where both have the same.

    A tensor that is larger now holds the old one in its first rows and columns. The rest is as at the start of a
    training: noise must be heard at once, for where it is silent nothing pulls at it, but faintly, or words suffer.
    Raises CheckpointError where `sizes` has less of anything but measured books, or another analysis.
    """
    torch.manual_seed(seed)
    new = Codec(sizes)
    if sizes.components != old.sizes.components or sizes.codebook_size != old.sizes.codebook_size:
        raise CheckpointError(f"expected a codec of the components and codebook size of {sizes}, found {old.sizes}")
    if sizes.noise_books < old.sizes.noise_books:
        raise CheckpointError(f"expected at most {sizes.noise_books} noise books, found {old.sizes.noise_books}")
    new.analysis.load_state_dict(old.analysis.state_dict())
    new.quantizer.gain.copy_(old.quantizer.gain)
    books = old.quantizer.measured()[: NUM_CODEBOOKS - sizes.noise_books]
    new.quantizer.set_books(books, torch.Generator().manual_seed(seed))
    _keep_noise(old, new)
    targets = dict(new.named_parameters())
    for name, part in old.named_parameters():
        target = targets.get(name)
        if target is None or any(a > b for a, b in zip(part.shape, target.shape, strict=True)):
            found = None if target is None else tuple(target.shape)
            raise CheckpointError(f"{name}: expected room for {tuple(part.shape)} in the new sizes, found {found}")
        if name.startswith("quantizer."):
            target[: len(part), part.shape[1] :] = 0  # noise comes in through channels of its own
        target[tuple(slice(n) for n in part.shape)] = part
    return new


def _keep_noise(old: Codec, new: Codec) -> None:
    """Gives `new` the noise books of `old` where its own have the same sizes: the decoder has learnt those entries."""
    count = new.sizes.noise_books
    if count and (count, new.sizes.noise) == (old.sizes.noise_books, old.sizes.noise):
        new.quantizer.rest.books[-count:] = old.quantizer.rest.books[-count:]
