"""Codes shards in memory, and batches of whole training sequences by the rules of `mktts.model.prompt`.

A shard is what `mktts.training.data.encode` writes: `codes` uint8 (frames, 16), `frames` (clips,), `speaker` and `text`
(clips,). Speakers are names, or indices into `sizes.SPEAKERS`. Texts are the words of the text front end, which those
of a shard without `front_end` are put through here. Every text is kept in all its forms (`mktts.training.data.forms`).
"""

from __future__ import annotations

import zlib
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from mktts.errors import CheckpointError
from mktts.model.tokenizer import TextTokenizer
from mktts.spec import NUM_CODEBOOKS, ModelConfig
from mktts.training.data.as_spoken import as_spoken
from mktts.training.data.codec_data import shard_paths
from mktts.training.data.forms import FORMS, drawn
from mktts.training.data.held_out import is_held_out, normal
from mktts.training.talker.sizes import LANGUAGE, SPEAKERS

NO_TARGET = -100  # what cross_entropy ignores
_PROMPT_ROWS = 12  # at most, beside text and frames
_STEP = 16  # batches are padded to multiples of it
_HELD_OUT_ONE_IN = 100  # texts, by the checksum of their words: all clips of a text are on one side


@dataclass(frozen=True)
class Clips:
    """Texts, speakers (names) and codes of all clips; clip i is codes[starts[i] : starts[i + 1]]."""

    texts: list[str]  # as the front end gives them
    speakers: list[str]
    codes: Tensor  # (frames, 16) uint8
    starts: np.ndarray  # (clips + 1,) int64


@dataclass(frozen=True)
class Batch:
    """Sequences padded on the right, on one device; see `TalkerModel.hidden`.

    Shapes depend on the number and the longest of the clips only, so that few different ones occur (`epoch`).
    """

    text: Tensor  # (B, T) int64
    control: Tensor  # (B, T) int64, -1 for none
    previous: Tensor  # (B, T, 16) int64: the frame that a row carries, -1 for none
    target: Tensor  # (B * T,) int64: code 0 that comes after a row, or end of speech; NO_TARGET for none
    rows: Tensor  # (P,) int64: rows of (B * T) whose next frame the predictor is trained on, drawn at random
    codes: Tensor  # (P, 16) int64: those frames


class Following:
    """Clips of the shards that a folder has got since the last call; the first call's are all."""

    def __init__(self, folder: Path) -> None:
        self.folder, self._known = folder, set[Path]()

    def __call__(self) -> Clips:
        """Raises AudioError for an empty folder, CheckpointError for a shard of another shape, TextError for a text
        that the front end cannot read."""
        new = [path for path in shard_paths(self.folder) if path not in self._known]
        self._known.update(new)
        return _clips(new)


def noise_books(folder: Path) -> int:
    """How many of the codec's last books carry noise, as a folder's first shard says; 0 where it says nothing.

    Raises AudioError for an empty folder.
    """
    with np.load(shard_paths(folder)[0], allow_pickle=False) as file:
        return int(file["noise_books"]) if "noise_books" in file else 0


def _clips(shards: list[Path]) -> Clips:
    texts: list[str] = []
    speakers: list[str] = []
    codes, frames = [np.empty((0, NUM_CODEBOOKS), np.uint8)], [np.empty(0, np.int64)]
    for path in shards:
        with np.load(path, allow_pickle=False) as file:
            missing = {"codes", "frames", "speaker", "text"} - set(file)
            if missing or file["codes"].dtype != np.uint8 or file["codes"].shape[1:] != (NUM_CODEBOOKS,):
                raise CheckpointError(f"{path}: expected codes uint8 (frames, {NUM_CODEBOOKS}), frames, speaker, text")
            codes.append(file["codes"])
            frames.append(file["frames"])
            read = str if "front_end" in file else as_spoken
            texts += [read(str(t)) for t in file["text"]]
            speakers += [SPEAKERS[int(s)] if (s := str(v)).isdigit() else s for v in file["speaker"]]
    starts = np.concatenate(([0], np.cumsum(np.concatenate(frames), dtype=np.int64)))
    return Clips(texts, speakers, torch.from_numpy(np.concatenate(codes)), starts)


def held_out(text: str) -> bool:
    """Whether a text is kept for the evaluation loss; what the voice is judged by always is."""
    return is_held_out(text) or zlib.crc32(normal(text).encode()) % _HELD_OUT_ONE_IN == 0


class _Tokens:
    """Token ids of many texts, end to end."""

    def __init__(self) -> None:
        self._ids, self._starts = np.empty(0, np.int32), np.zeros(1, np.int64)

    def add(self, texts: list[list[int]]) -> None:
        ends = self._starts[-1] + np.cumsum([len(ids) for ids in texts], dtype=np.int64)
        self._starts = np.concatenate((self._starts, ends))
        self._ids = np.concatenate((self._ids, np.array([i for ids in texts for i in ids], np.int32)))

    def __getitem__(self, text: int) -> list[int]:
        return self._ids[self._starts[text] : self._starts[text + 1]].tolist()

    @property
    def lengths(self) -> np.ndarray:
        return np.diff(self._starts)


class Sequences:
    """Clips as training sequences; the codes lie on `device`, a batch takes them from there.

    A sequence is named by a pair: the clip's number, and the form of its text (an index into `forms.FORMS`).
    """

    def __init__(self, clips: Clips, config: ModelConfig, tokenizer: TextTokenizer, device: torch.device | str) -> None:
        self.config, self.tokenizer, self.device = config, tokenizer, torch.device(device)
        self.clips = Clips([], [], clips.codes[:0], np.zeros(1, np.int64))
        self.codes, self.frames = self.clips.codes.to(device), np.empty(0, np.int64)
        self._tokens = [_Tokens() for _ in FORMS]
        self.add(clips)
        newline = tokenizer.encode("\n")
        self._role = [config.text_ids.im_start, config.text_ids.assistant, *newline]

    def add(self, clips: Clips) -> None:
        """More clips, numbered after those that are there."""
        ours = self.clips
        codes = torch.cat((ours.codes, clips.codes))
        starts = np.concatenate((ours.starts, ours.starts[-1] + clips.starts[1:]))
        self.clips = Clips(ours.texts + clips.texts, ours.speakers + clips.speakers, codes, starts)
        self.codes = torch.cat((self.codes, clips.codes.to(self.device)))
        for tokens, (form, _) in zip(self._tokens, FORMS, strict=True):
            tokens.add(self.tokenizer.encode_all([form(text.strip()) for text in clips.texts]))
        self._said = np.stack([tokens.lengths for tokens in self._tokens])  # (forms, clips)
        self.frames = np.diff(starts)

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

        clips: (n, 2) clips and forms, as `epoch` deals them, or (n,) clips with their texts as they stand.
        share: of the batch's padded rows, that many frames for the predictor; less than a third of them are prompt or
        padding as a rule, so 0.5 is most frames.
        """
        clips, forms = clips.T if clips.ndim == 2 else (clips, np.zeros_like(clips))
        rows = [
            self.rows(int(c), bool(w) if whole is None else whole, bool(tag), int(form))
            for c, form, (w, tag) in zip(clips, forms, generator.integers(0, 2, (len(clips), 2)), strict=True)
        ]
        longest = int(self._steps(clips, forms).max()) * _STEP
        text = np.full((len(rows), longest), self.config.text_ids.tts_pad, np.int64)
        control = np.full((len(rows), longest), -1, np.int64)
        frame = np.full((len(rows), longest), -1, np.int64)  # which frame a row carries
        ends = []
        for i, (words, tags) in enumerate(rows):
            text[i, : len(words)], control[i, : len(words)] = words, tags
            first, last = self.clips.starts[clips[i]], len(words) - 1
            frames = int(self.frames[clips[i]])
            frame[i, last - frames + 1 : last + 1] = np.arange(first, first + frames)
            ends.append(i * longest + last)
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
        others again (where all are too few for a batch, up to a power of two). So there are about as many shapes as
        lengths in steps of 16, the same ones in every epoch.
        """
        forms = drawn(len(clips), generator)
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
