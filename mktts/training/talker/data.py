"""Speech as codes in memory, and batches of whole training sequences by the rules of `mktts.model.prompt`.

Every text, in the words of the text front end, is learnt in several forms, drawn anew whenever it comes up: people
leave out commas, and a long sentence is said in segments, of which later ones begin small.
"""

from __future__ import annotations

import re
import zlib
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from mktts.audio import from_pcm16
from mktts.model.tokenizer import TextTokenizer
from mktts.spec import ModelConfig
from mktts.training.codec.model import Codec, encoded
from mktts.training.data.audio import read_shard, shard_paths
from mktts.training.data.texts import is_held_out, normal

LANGUAGE = "english"
NO_TARGET = -100  # what cross_entropy ignores
_PROMPT_ROWS = 12  # at most, beside text and frames
_STEP = 16  # batches are padded to multiples of it
_HELD_OUT_ONE_IN = 100  # texts, by the checksum of their words: all clips of a text are on one side


def _small(text: str) -> str:
    """With a small letter first, as the rest of a sentence begins; a letter that is said by itself stays."""
    return re.sub(r"^[A-Z](?=[a-z])|^A(?= )", lambda match: match[0].lower(), text)


# Form and how often it is drawn: as the front end gives it, without its end, later in a sentence, without commas, bare.
FORMS: tuple[tuple[Callable[[str], str], float], ...] = (
    (str, 0.84),
    (lambda text: text.rstrip(".!?,;: ") or text, 0.05),
    (_small, 0.03),
    (lambda text: re.sub(r"[,;](?=\s)", "", text), 0.05),
    (lambda text: _small(" ".join(re.sub(r"[^\w\s'-]", " ", text).split())) or text, 0.03),
)


@dataclass(frozen=True)
class Clips:
    """Texts, speakers (names) and codes of all clips; clip i is codes[starts[i] : starts[i + 1]]."""

    texts: list[str]  # as the front end gives them
    speakers: list[str]
    codes: Tensor  # (frames, 16) uint8
    starts: np.ndarray  # (clips + 1,) int64


@dataclass(frozen=True)
class Batch:
    """Sequences padded on the right, on one device. Shapes depend on the number and the longest of the clips only."""

    text: Tensor  # (B, T) int64
    control: Tensor  # (B, T) int64, -1 for none
    previous: Tensor  # (B, T, 16) int64: the frame that a row carries, -1 for none
    target: Tensor  # (B * T,) int64: code 0 that comes after a row, or end of speech; NO_TARGET for none
    rows: Tensor  # (P,) int64: rows of (B * T) whose next frame the predictor is trained on, drawn at random
    codes: Tensor  # (P, 16) int64: those frames


def read_clips(folder: Path, codec: Codec) -> Clips:
    """All of a folder's audio shards as codes. Raises AudioError for a folder without any."""
    texts: list[str] = []
    speakers: list[str] = []
    codes: list[Tensor] = []
    for path in shard_paths(folder):
        shard = read_shard(path)
        codes += encoded(codec, [torch.from_numpy(from_pcm16(shard.clip(i))) for i in range(len(shard.texts))])
        texts += shard.texts
        speakers += shard.speakers
    starts = np.concatenate(([0], np.cumsum([len(clip) for clip in codes], dtype=np.int64)))
    return Clips(texts, speakers, torch.cat(codes), starts)


def held_out(text: str) -> bool:
    """Whether a text is kept for the evaluation loss; what the voice is judged by always is."""
    return is_held_out(text) or zlib.crc32(normal(text).encode()) % _HELD_OUT_ONE_IN == 0


class Sequences:
    """Clips as training sequences, each a pair of numbers: of the clip, and of the form of its text (in FORMS)."""

    def __init__(self, clips: Clips, config: ModelConfig, tokenizer: TextTokenizer, device: torch.device | str) -> None:
        self.clips, self.config, self.device = clips, config, torch.device(device)
        self.codes, self.frames = clips.codes.to(device), np.diff(clips.starts)
        self._tokens = [tokenizer.encode_all([form(text.strip()) for text in clips.texts]) for form, _ in FORMS]
        self._said = np.array([[len(ids) for ids in texts] for texts in self._tokens])  # (forms, clips)
        self._role = [config.text_ids.im_start, config.text_ids.assistant, *tokenizer.encode("\n")]

    @property
    def spoken(self) -> np.ndarray:
        """bool (clips,): those that have both text and frames."""
        return (self.frames > 0) & (self._said[0] > 0)

    def rows(self, clip: int, whole: bool, language: bool, form: int = 0) -> tuple[list[int], list[int]]:
        """Text and control ids of the rows of one clip: the prompt, then one row per frame (control -1)."""
        text, codec, config = self.config.text_ids, self.config.codec_ids, self.config
        tags = [codec.nothink, codec.think_bos, codec.think_eos]
        if language:
            tags = [codec.think, codec.think_bos, config.languages[LANGUAGE], codec.think_eos]
        control = [*tags, config.speakers[self.clips.speakers[clip]], codec.pad]
        words = [*self._role, *[text.tts_pad] * (len(control) - 1), text.tts_bos]
        control = [-1] * len(self._role) + control
        frames, said = int(self.frames[clip]), [*self._tokens[form][clip], text.tts_eos]
        if whole:
            words += [*said, text.tts_pad] + [text.tts_pad] * frames
            control += [codec.pad] * len(said) + [codec.bos]
        else:
            words += (said + [text.tts_pad] * frames)[: frames + 1]
            control += [codec.bos]
        return words, control + [-1] * frames

    def batch(
        self, clips: np.ndarray, generator: np.random.Generator, share: float = 0.5, whole: bool | None = None
    ) -> Batch:
        """Layout (unless `whole` says) and language tag of every clip are drawn evenly.

        clips: (n, 2) clips and forms, as `epoch` deals them. share: of the padded rows, so many frames for the
        predictor.
        """
        clips, forms = clips.T
        rows = [
            self.rows(int(c), bool(w) if whole is None else whole, bool(tag), int(form))
            for c, form, (w, tag) in zip(clips, forms, generator.integers(0, 2, (len(clips), 2)), strict=True)
        ]
        longest = int(self._steps(clips, forms).max()) * _STEP
        text = np.full((len(rows), longest), self.config.text_ids.tts_pad, np.int64)
        control, frame = np.full((2, len(rows), longest), -1, np.int64)  # frame: which one a row carries
        ends = []
        for i, (words, tags) in enumerate(rows):
            text[i, : len(words)], control[i, : len(words)] = words, tags
            first, end = self.clips.starts[clips[i] : clips[i] + 2]
            frame[i, len(words) - (end - first) : len(words)] = np.arange(first, end)
            ends.append(i * longest + len(words) - 1)
        flat = frame.reshape(-1)
        carrying = np.flatnonzero(flat >= 0)
        drawn = generator.choice(carrying, max(1, int(share * len(flat))), replace=True)
        frames_at, chosen = self._put(frame), self._put(drawn)
        previous = torch.where(frames_at[..., None] >= 0, self.codes[frames_at.clamp(min=0)].long(), -1)
        target = torch.full((len(flat),), NO_TARGET, device=self.device)
        at = self._put(carrying)
        target[at - 1] = previous.flatten(0, 1)[at, 0]
        target[self._put(np.array(ends))] = self.config.codec_ids.eos
        codes = self.codes[frames_at.flatten()[chosen]].long()
        return Batch(self._put(text), self._put(control), previous, target, chosen - 1, codes)

    def epoch(self, clips: np.ndarray, rows: int, generator: np.random.Generator) -> list[np.ndarray]:
        """`clips` (n,) dealt out to batches of like lengths, in random order: (clips of a batch, 2), clip and form.

        A batch has as many clips as fit `rows` padded rows at its length; the last one of a length is filled up with
        others again (where all are too few for one, up to a power of two), so that few shapes occur.
        """
        forms = generator.choice(len(FORMS), len(clips), p=[share for _, share in FORMS])
        steps, pairs, batches = self._steps(clips, forms), np.stack((clips, forms), 1), []
        for step in np.unique(steps):
            members = generator.permutation(pairs[steps == step])
            size = min(max(1, rows // int(step * _STEP)), 1 << (len(members) - 1).bit_length())
            missing = -len(members) % size
            members = np.concatenate((members, members[generator.integers(len(members), size=missing)]))
            batches += list(members.reshape(-1, size, 2))
        return [batches[i] for i in generator.permutation(len(batches))]

    def _steps(self, clips: np.ndarray, forms: np.ndarray) -> np.ndarray:
        """Rows of whole sequences, in steps of 16."""
        return -(-(self._said[forms, clips] + self.frames[clips] + _PROMPT_ROWS) // _STEP)

    def _put(self, array: np.ndarray) -> Tensor:
        return torch.from_numpy(array).to(self.device, non_blocking=True)
