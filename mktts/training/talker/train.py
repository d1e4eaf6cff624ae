"""Trains talker and code predictor: `python -m mktts train talker`.

Speech is encoded at the start of a run, so codes need not be stored. Sequences follow the rules of
`mktts.model.prompt`; every text, in the words of the text front end, is trained in several forms, because people omit
commas, and later segments of a sentence begin in lower case. Batches, noise and dropout depend on seed and step."""

import argparse
import re
import shutil
import zlib
from collections.abc import Callable
from copy import deepcopy
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from mktts.checkpoint import Checkpoint, open_checkpoint
from mktts.checkpoint.open import SMALL
from mktts.errors import CheckpointError
from mktts.model.backend import device_named
from mktts.model.prompt import language_tags
from mktts.model.tokenizer import TextTokenizer
from mktts.spec import FRAME_RATE_HZ, NUM_CODEBOOKS, ModelConfig
from mktts.training.codec.model import Codec, encoded, load_codec
from mktts.training.data.audio import clips_in
from mktts.training.data.texts import is_held_out, normal
from mktts.training.state import Trainer, adam, add_training_arguments, train_as_asked
from mktts.training.talker.model import SIZES, TalkerModel, TalkerSizes, model_config, write_checkpoint

LANGUAGE = "english"
NO_TARGET = -100  # ignored by cross_entropy
_PROMPT_ROWS = 12  # most rows besides text and frames
_STEP = 16  # batches are padded to multiples of this
_HELD_OUT_ONE_IN = 100  # texts, by the checksum of their words, so that all clips of a text are held out together


def _small(text: str) -> str:
    """Puts the first letter in lower case, as in the rest of a sentence; a single letter is kept."""
    return re.sub(r"^[A-Z](?=[a-z])|^A(?= )", lambda match: match[0].lower(), text)


# Form and its probability: unchanged, without final mark, as the rest of a sentence, without commas, without any marks.
FORMS: tuple[tuple[Callable[[str], str], float], ...] = (
    (str, 0.84),
    (lambda text: text.rstrip(".!?,;: ") or text, 0.05),
    (_small, 0.03),
    (lambda text: re.sub(r"[,;](?=\s)", "", text), 0.05),
    (lambda text: _small(" ".join(re.sub(r"[^\w\s'-]", " ", text).split())) or text, 0.03),
)


class Clips(NamedTuple):
    """Texts, speakers (names) and codes of all clips; clip i is codes[starts[i] : starts[i + 1]]."""

    texts: list[str]  # in the words of the front end
    speakers: list[str]
    codes: Tensor  # (frames, 16) uint8
    starts: np.ndarray  # (clips + 1,) int64


class Batch(NamedTuple):
    """Sequences padded on the right, on one device. Shapes depend only on the number of clips and the longest one."""

    text: Tensor  # (B, T) int64
    control: Tensor  # (B, T) int64, -1 for none
    previous: Tensor  # (B, T, 16) int64: the frame that is the input of a row, -1 for none
    target: Tensor  # (B * T,) int64: code 0 after a row, or end of speech; NO_TARGET for none
    rows: Tensor  # (P,) int64: random rows of (B * T) on whose next frame the predictor is trained
    codes: Tensor  # (P, 16) int64: those frames


def read_clips(folder: Path, codec: Codec) -> Clips:
    """Reads all of a folder's audio shards as codes. Raises AudioError for a folder without shards."""
    clips = list(clips_in(folder))
    codes = encoded(codec, [clip.pcm for clip in clips])
    starts = np.concatenate(([0], np.cumsum([len(clip) for clip in codes], dtype=np.int64)))
    return Clips([clip.text for clip in clips], [clip.speaker for clip in clips], torch.cat(codes), starts)


def held_out(text: str) -> bool:
    """Whether a text is held out for the evaluation loss; evaluation sentences always are."""
    return is_held_out(text) or zlib.crc32(normal(text).encode()) % _HELD_OUT_ONE_IN == 0


class Sequences:
    """Clips as training sequences; each is given by the index of the clip and of the form of its text in FORMS."""

    def __init__(self, clips: Clips, config: ModelConfig, tokenizer: TextTokenizer, device: torch.device | str) -> None:
        self.clips, self.config, self.device = clips, config, torch.device(device)
        self.codes, self.frames = clips.codes.to(device), np.diff(clips.starts)
        self._tokens = [tokenizer.encode_all([form(text.strip()) for text in clips.texts]) for form, _ in FORMS]
        self._said = np.array([[len(ids) for ids in texts] for texts in self._tokens])  # (forms, clips)
        self._role = [config.text_ids.im_start, config.text_ids.assistant, *tokenizer.encode("\n")]

    def rows(self, clip: int, whole: bool, language: bool, form: int = 0) -> tuple[list[int], list[int]]:
        """Text and control ids of the rows of one clip: the prompt, then one row per frame (control -1)."""
        text, codec, config = self.config.text_ids, self.config.codec_ids, self.config
        tags = language_tags(codec, config.languages[LANGUAGE] if language else None)
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

    def batch(self, clips: np.ndarray, generator: np.random.Generator, share: float = 0.5) -> Batch:
        """Makes a batch; layout and language tag of every clip are drawn with equal probability. clips: clips and forms
        (n, 2), from `epoch`. share: number of frames for the predictor relative to the padded rows."""
        clips, forms = clips.T
        cases = zip(clips, forms, generator.integers(0, 2, (len(clips), 2)), strict=True)
        rows = [self.rows(int(c), bool(whole), bool(tag), int(form)) for c, form, (whole, tag) in cases]
        longest = int(self._steps(clips, forms).max()) * _STEP
        text = np.full((len(rows), longest), self.config.text_ids.tts_pad, np.int64)
        control, frame = np.full((2, len(rows), longest), -1, np.int64)  # frame: index of the input frame of a row
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
        """Divides `clips` (n,) at random into batches of similar lengths, (clips of a batch, 2), clip and form, each of
        at most `rows` padded rows; a length's last batch is filled with repeated clips, so that few shapes occur."""
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
        """The number of rows of sequences, in units of 16."""
        return -(-(self._said[forms, clips] + self.frames[clips] + _PROMPT_ROWS) // _STEP)

    def _put(self, array: np.ndarray) -> Tensor:
        return torch.from_numpy(array).to(self.device, non_blocking=True)


_MEASURED_BATCHES = 8


@dataclass(frozen=True)
class TalkerRecipe:
    """Everything that determines the result, except the data."""

    seed: int = 0
    steps: int = 40_000  # over which the learning rate falls to a twentieth
    block: int = 250  # steps between measurements
    warmup_steps: int = 300
    learning_rate: float = 1.2e-3
    weight_decay: float = 0.02
    batch_rows: int = 16_384  # padded
    predictor_share: float = 0.375  # frames that the predictor is trained on in a step, relative to padded rows
    dropout: float = 0.05
    code_noise: float = 0.05  # fraction of input codes replaced at random, so that the model recovers from its errors
    frame_noise: float = 0.05  # fraction of input frames replaced completely
    ema: float = 0.9995


class TalkerTrainer(Trainer):
    """Trains talker and code predictor, and keeps the position in the data."""

    def __init__(self, recipe: TalkerRecipe, sizes: TalkerSizes, data: Sequences, graphs: bool = False) -> None:
        """Raises CheckpointError if all texts are held out."""
        super().__init__(recipe, sizes, data.device, graphs)
        self.data = data
        self.model = TalkerModel(data.config, recipe.seed, recipe.dropout).to(data.device)
        self.modules = {"model": self.model}
        matrices = [p for p in self.model.parameters() if p.dim() > 1]
        vectors = [p for p in self.model.parameters() if p.dim() == 1]
        groups = [{"params": matrices}, {"params": vectors, "weight_decay": 0.0}]
        self.optimizers["adam"] = adam(groups, data.device, betas=(0.9, 0.98), weight_decay=recipe.weight_decay)
        self.averaged = deepcopy(self.model).eval()
        self.average = {f"model.{name}": tensor for name, tensor in self.averaged.state_dict().items()}
        apart = np.array([held_out(text) for text in data.clips.texts])
        self.training, self.kept = np.flatnonzero(~apart), np.flatnonzero(apart)
        if not len(self.training):
            raise CheckpointError("expected clips to train on, found none outside the held-out texts")
        self._batches, self._ends = list[np.ndarray](), [0]  # batches of this epoch; the last step of each epoch

    def train_step(self) -> dict[str, Tensor]:
        recipe = self.recipe
        while self.step >= self._ends[-1]:  # epochs follow each other, each seeded by its number
            generator = np.random.default_rng((recipe.seed, 0, len(self._ends) - 1))
            self._batches = self.data.epoch(self.training, recipe.batch_rows, generator)
            self._ends.append(self._ends[-1] + len(self._batches))
        clips = self._batches[self.step - self._ends[-2]]
        generator = np.random.default_rng((recipe.seed, 1, self.step))
        batch = self.data.batch(clips, generator, recipe.predictor_share)
        self.begin_step(recipe.learning_rate)
        found = self.steps.run("step", self._step, *batch)
        self.step += 1
        self.follow(1 - min(recipe.ema, self.step / (self.step + 10)))  # faster at first, to forget the start
        return found

    def _step(self, *parts: Tensor) -> dict[str, Tensor]:
        """One step on the tensors of a `Batch`."""
        first, rest = self.losses(self.model, Batch(*parts))
        optimizer = self.optimizers["adam"]
        optimizer.zero_grad(set_to_none=True)
        (first + rest).backward()
        torch.nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
        optimizer.step()
        return {"code0": first.detach(), "codes": rest.detach()}

    def losses(self, model: TalkerModel, batch: Batch) -> tuple[Tensor, Tensor]:
        """Cross entropy of code 0 (with end of speech), and the mean of codes 1-15; adds noise if `model` trains."""
        recipe, size, previous = self.recipe, self.data.config.predictor.vocab_size, batch.previous
        if model.training:
            odds = torch.rand(*previous.shape[:-1], NUM_CODEBOOKS + 1, device=previous.device)
            replaced = (odds[..., 1:] < recipe.code_noise) | (odds[..., :1] < recipe.frame_noise)
            previous = torch.where(replaced & (previous >= 0), torch.randint_like(previous, size), previous)
        with self.steps.cast():
            hidden = model.hidden(batch.text, batch.control, previous).flatten(0, 1)
            first = model.w.linear("talker.codec_head", hidden)
            # not hidden[rows], whose gradient needs a sort
            rest = model.predictor_logits(torch.index_select(hidden, 0, batch.rows), batch.codes)
        code0 = F.cross_entropy(first.float(), batch.target, ignore_index=NO_TARGET)
        return code0, F.cross_entropy(rest.float().flatten(0, 1), batch.codes[:, 1:].flatten())

    @torch.no_grad()
    def measured(self) -> dict[str, float]:
        """Losses of the averaged weights on held-out texts, or on training texts if none are held out."""
        generator = np.random.default_rng(self.recipe.seed)
        chosen = self.kept if len(self.kept) else self.training
        batches = self.data.epoch(chosen, self.recipe.batch_rows, generator)[:_MEASURED_BATCHES]
        found = [torch.stack(self.losses(self.averaged, self.data.batch(clips, generator))) for clips in batches]
        first, rest = torch.stack(found).mean(0).tolist()
        return {"held_out_code0": first, "held_out_codes": rest}

    @torch.no_grad()
    def begin_from(self, voice: Checkpoint) -> None:
        """Copies another voice's weights, except those of its codes. Raises CheckpointError for other sizes."""
        weights, size = voice.files.map(), self.data.config.predictor.vocab_size
        for name, p in self.model.w.hub().items():
            given = weights.get(name, p[:0])
            if given.shape != p.shape:
                raise CheckpointError(f"{voice.folder}: expected {name} of shape {p.shape}, found {given.shape}")
            first = size if any(part in name for part in ("codec_embedding", "codec_head", "lm_head")) else 0
            p[first:] = given[first:].to(p)  # control ids follow the codes
        self.averaged.load_state_dict(self.model.state_dict())


EXAMPLES = """examples:
  python -m mktts train talker --data AUDIO --codec CODEC --out TALKER --minutes 8.5 --graphs --resume

A run can be cut anywhere and go on with --resume. TALKER/voice is the checkpoint, with the codec's decoder as it is.
The last line of standard output is JSON: what was reached."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--codec", type=Path, required=True, help="folder of `train codec`, past its joint steps")
    parser.add_argument("--fresh", action="store_true", help="random weights; without it the small voice's words")
    add_training_arguments(parser, TalkerRecipe())


def main(arguments: argparse.Namespace) -> int:
    """Trains for --minutes and writes the checkpoint. Raises CheckpointError and AudioError for invalid inputs."""
    out, device, begun = arguments.out, device_named(arguments.device), open_checkpoint(SMALL)
    recipe = TalkerRecipe(**{name: getattr(arguments, name) for name in asdict(TalkerRecipe())})
    codec = load_codec(arguments.codec, device)
    clips = read_clips(arguments.data, codec)
    speakers = tuple(dict.fromkeys(clips.speakers))
    sizes = replace(SIZES[arguments.size], codebook_size=codec.sizes.codebook_size, speakers=speakers)
    data = Sequences(clips, model_config(sizes), begun.tokenizer(), device)
    trainer = TalkerTrainer(recipe, sizes, data, arguments.graphs)
    if not arguments.fresh:
        trainer.begin_from(begun)
    train_as_asked(trainer, arguments, len(clips.codes) / FRAME_RATE_HZ / 3600)
    shutil.rmtree(out / "voice", ignore_errors=True)
    write_checkpoint(out / "voice", sizes, trainer.averaged.w.hub(), codec)
    return 0
