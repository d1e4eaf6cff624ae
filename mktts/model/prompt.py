"""Prompt layouts of every Qwen3-TTS mode, as embeddings for the talker. A row (H,) is its input at one position: the
sum of a projected text embedding and a codec embedding. Both layouts are upstream's.

    row                             text side                      codec side
    instruction, if there is one    its tokens                     -
    role                            <|im_start|>assistant\\n       -
    language                        tts_pad                        think tags with the language, or nothink
    speaker                         tts_pad                        the speaker's row, or the voice's embedding
    begin                           tts_bos                        codec_pad
    whole layout: the text          its tokens, then tts_eos       codec_pad
        the last row                tts_pad                        codec_bos
    streaming layout: the last row  the first token                codec_bos
    a frame after the prompt        tts_pad; streaming: the next   all 16 codes of the frame before it
                                    token, then tts_eos, tts_pad

For a voice with a transcript, the transcript precedes the text, and the voice's frames follow codec_bos. In the
streaming layout a `FedPrompt` accepts text that arrives later.

The prefix of a prompt is its leading rows that are bit-identical for every text: instruction, role, tags and speaker.
A transcript's rows are not: `of_checked` projects transcript and text in one matrix product, as upstream does, and its
rounding depends on the number of rows. `FedPrompt` projects row by row, so its prefix includes the transcript."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, Literal

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from mktts.common import one_of
from mktts.errors import PromptError, TextError
from mktts.model.backend import CODE_EMBEDDINGS
from mktts.model.tokenizer import IncrementalTokenizer, TextTokenizer
from mktts.model.voice import Voice
from mktts.spec import CodecIds, ModelConfig

Layout = Literal["whole", "streaming"]
_ROWS_AT_ONCE = 4_096  # rows of the text table that `SpokenRows` projects at a time
_PAGE_BYTES = 4096  # the smallest page size of any system; reading a larger page more than once is harmless
_HEADS = 64  # cached heads of prompts (instruction to speaker); one with 300 rows of instruction takes 0.7 MB


@dataclass(frozen=True)
class Request:
    """What to say and how. `layout=None` selects upstream's default: streaming for Base, whole otherwise."""

    text: str
    language: str = "auto"
    speaker: str | None = None
    instruct: str | None = None
    voice: Voice | None = None
    layout: Layout | None = None


@dataclass(eq=False)
class Prompt:
    """Talker input of one utterance whose text is complete."""

    text_ended = True
    embeds: Any  # Tensor (L, H), or the AddressedRows of `SpokenRows`
    rest: Tensor | Callable[[], Tensor]  # text rows after the prompt (N, H), or a function that computes them on demand
    pad: Tensor  # (H,)
    text_tokens: int
    prefix_rows: int = 0  # leading rows of `embeds` that do not depend on the text, fewer than L
    prefix_key: Hashable | None = None  # for one checkpoint, device and dtype: equal keys mean equal prefix rows

    def row(self, frame: int) -> Tensor:
        """The text embedding (H,) that is added to the code embeddings of frame `frame` (0-based)."""
        if callable(self.rest):
            self.rest = self.rest()
        return self.rest[frame] if frame < len(self.rest) else self.pad


class PromptBuilder:
    """Builds prompts for one checkpoint, on `device`. The text table (V, E) is not copied; it normally stays in the
    mapped file: on a GPU it would take 0.6 GB, of which a prompt reads a few rows of 4 KB. tensors: by Hub name."""

    def __init__(
        self,
        config: ModelConfig,
        tensors: Mapping[str, Tensor],
        tokenizer: TextTokenizer,
        device: torch.device | str = "cpu",
        dtype: torch.dtype = torch.bfloat16,
    ) -> None:
        self.config, self.tokenizer = config, tokenizer
        self.device, self.dtype = torch.device(device), dtype

        def get(name: str) -> Tensor:
            return tensors[name].to(self.device, dtype)

        self._table = table = tensors["talker.model.text_embedding.weight"]
        self._uploads = table.device.type == "cpu" and self.device.type == "cuda"
        if self._uploads:
            # Read one value of every page of the mapped table, so that a word's first use does not wait for the disk.
            table.flatten()[:: _PAGE_BYTES // table.itemsize].sum()
            self._numbers = numbers(table)
        projection = "talker.text_projection.linear_fc"
        self._projection = [(get(f"{projection}{n}.weight"), get(f"{projection}{n}.bias")) for n in (1, 2)]
        self._codec_tables = [get(name) for name in CODE_EMBEDDINGS]
        self._heads: OrderedDict[Hashable, Tensor] = OrderedDict()
        self._newline = tokenizer.encode("\n")
        if len(self._newline) != 1:
            raise PromptError(f'the tokenizer must encode "\\n" as one token, it gives {self._newline}')
        text, codec = config.text_ids, config.codec_ids
        # Rows that occur in every prompt, (1, H) each except the role's. Some are projected together, as upstream does,
        # because a product with a single row may round differently.
        self._role = self.text_rows([text.im_start, text.assistant, *self._newline])
        self._bos, self._eos, self._pad = self.text_rows([text.tts_bos, text.tts_eos, text.tts_pad]).split(1)
        self._codec_pad, self._codec_bos = self._codec_rows(codec.pad), self._codec_rows(codec.bos)
        self._whole_end = torch.cat((self._eos + self._codec_pad, self._codec_bos + self._pad))  # (2, H)
        self._pad_row = self._pad[0]  # (H,): one object for all prompts, which lanes recognise by identity
        self.fed_pad, self.fed_eos = (self.text_rows([id_])[0] for id_ in (text.tts_pad, text.tts_eos))

    def check(self, request: Request) -> Request:
        """Validates a request for `of_checked`: names in the checkpoint's spelling, the text stripped, defaults filled
        in; the default speaker is the checkpoint's first. Raises PromptError or TextError."""
        config, kind = self.config, self.config.type.name
        if not isinstance(request.text, str):
            raise TextError(f"text must be a str, got {type(request.text).__name__}")
        one_of("layout", request.layout, (None, "whole", "streaming"), PromptError)
        language = str(request.language or "auto").lower()
        one_of("language", language, config.spoken_languages, PromptError)
        speaker = str(request.speaker or "").lower() or None
        if speaker is not None and speaker not in config.speakers:
            known = sorted(config.speakers) or f"none: a {kind} checkpoint has no built-in speakers"
            raise PromptError(f"speaker must be one of {known}, got {request.speaker!r}")
        if config.type.speakers and speaker is None:
            speaker = config.default_speaker
            if speaker is None:
                raise PromptError(f"this {kind} checkpoint names no speakers in its config.json: it cannot speak")
        instruct = request.instruct or None
        if instruct and not config.takes_instruct:
            why = f"this {kind} checkpoint ({config.model_size}) takes no instructions (upstream drops them silently)"
            raise PromptError(f"{why}: leave instruct out, or use a VoiceDesign or 1.7B CustomVoice checkpoint")
        voice, width = request.voice, config.talker.hidden_size
        if voice is not None and not config.type.clones:
            raise PromptError(f"only base checkpoints clone voices, this one is {kind}: leave voice out")
        if config.type.clones and not isinstance(voice, Voice):
            wanted = "pass voice=clone_voice(...) or Voice.load(path)"
            raise PromptError(f"a {kind} checkpoint clones a voice: {wanted}, got {voice!r}")
        if voice is not None and voice.embedding.numel() != width:
            sizes = f"the voice's speaker embedding has {voice.embedding.numel()} values, this checkpoint takes {width}"
            raise PromptError(f"{sizes}: make the voice with the same checkpoint")
        layout = request.layout or config.type.layout
        text = request.text.strip()  # a leading newline would merge with the role's and leave the trained layout
        return replace(request, text=text, language=language, speaker=speaker, instruct=instruct, layout=layout)

    def build(self, request: Request) -> Prompt:
        return self.of_checked(self.check(request))

    def of_checked(self, request: Request, spoken: SpokenRows | None = None) -> Prompt:
        """Builds the prompt of a complete text, bit-equal to upstream's. request: from `check`. spoken: projected text
        rows for the whole layout, which may round differently. Raises TextError if the text has no tokens."""
        ids = self.tokenizer.encode(request.text)
        if not ids:
            raise TextError("expected text to speak, got an empty text")
        head = self._head(request)
        # In-context cloning (upstream: ICL) continues the reference recording; otherwise only the x-vector is used.
        in_context = getattr(request.voice, "codes", None) is not None
        text_ids = self.reference_ids(request) + ids if in_context else ids  # projected in one matrix product
        trailing: Tensor | Callable[[], Tensor] = self._pad[:0]
        if request.layout == "whole" and spoken is not None and not in_context:
            embeds = spoken.prompt(head, ids)
        elif request.layout == "whole":
            # All text rows plus codec_pad, then the codec side, including reference frames, plus tts_pad.
            text_end, codec = self._whole_end.split(1)
            codec = self._codec_side(request) + self._pad if in_context else codec
            embeds = torch.cat((head, self.text_rows(text_ids) + self._codec_pad, text_end, codec))
        elif in_context:
            body, trailing = self._streaming_body(request, torch.cat((self.text_rows(text_ids), self._eos)))
            embeds = torch.cat((head, body))
        else:
            # The first token's row and the remaining ones are projected in two products, as upstream does.
            embeds = torch.cat((head, self.text_rows(ids[:1]) + self._codec_bos))
            trailing = partial(self._rest, ids[1:])
        return Prompt(embeds, trailing, self._pad_row, len(ids), len(head), self._prefix_key(request))

    @torch.inference_mode()
    def text_rows(self, ids: Sequence[int]) -> Tensor:
        """Projected text embeddings (N, H), N > 0: fc2(SiLU(fc1(embedding))). The rounding may depend on N.
        Raises IndexError for an id that is not in the table."""
        table, ((w1, b1), (w2, b2)) = self._table, self._projection
        if self._uploads:  # from pinned memory, which torch caches, so that the copy waits for no other stream's work
            pinned = torch.empty(len(ids), table.shape[1], dtype=table.dtype, pin_memory=True)
            gather(self._numbers, ids, numbers(pinned))
            rows = pinned.to(self.device, non_blocking=True)
        else:
            rows = table[torch.tensor(list(ids), dtype=torch.int64, device=table.device)].to(self.device)
        return F.linear(F.silu(F.linear(rows.to(self.dtype), w1, b1)), w2, b2)

    def _codec_rows(self, *ids: int) -> Tensor:
        """Codec embeddings of tags, speakers and special ids, read one by one: an uploaded index would stall a GPU."""
        return torch.stack([self._codec_tables[0][id_] for id_ in ids])

    def _prefix_key(self, request: Request, fed: bool = False) -> tuple[Hashable, ...]:
        """Everything the prefix depends on: speaker, id of the language or of the speaker's dialect, instruction,
        voice, and `fed`: whether it includes the transcript."""
        voice = None if request.voice is None else request.voice.digest
        language = request.language
        if language in ("auto", "chinese") and request.speaker:
            language = str(self.config.dialects.get(request.speaker) or language)
        return request.speaker, self.config.languages.get(language), request.instruct, voice, fed

    def forget(self, voice: Voice) -> None:
        for key in [key for key in self._heads if is_of_voice(key, voice)]:
            del self._heads[key]

    def _head(self, request: Request) -> Tensor:
        """Rows of instruction, role, tags and speaker, from a cache of those used last."""
        text, key = self.config.text_ids, self._prefix_key(request)
        if key in self._heads:
            self._heads.move_to_end(key)
            return self._heads[key]
        rows = [self._codec_rows(*language_tags(self.config.codec_ids, key[1]))]
        if request.speaker is not None:
            rows.append(self._codec_rows(self.config.speakers[request.speaker]))
        elif request.voice is not None:
            rows.append(request.voice.embedding.to(self.device, self.dtype).view(1, -1))
        codec_side = torch.cat([*rows, self._codec_pad])
        text_side = torch.cat((self._pad.expand(len(codec_side) - 1, -1), self._bos))
        parts = [self._role, text_side + codec_side]
        if request.instruct:
            turn = self.tokenizer.encode(f"user\n{request.instruct}")
            parts.insert(0, self.text_rows([text.im_start, *turn, text.im_end, *self._newline]))
        self._heads[key] = head = torch.cat(parts)
        if len(self._heads) > _HEADS:
            self._heads.popitem(last=False)
        return head

    def reference_ids(self, request: Request) -> list[int]:
        """Tokens of an in-context voice's transcript, which precedes the text."""
        return self.tokenizer.encode(request.voice.transcript.strip())

    @torch.inference_mode()
    def _rest(self, ids: list[int]) -> Tensor:
        """The text rows of `ids`, the tokens after the first, and of the end of the text."""
        return torch.cat((self.text_rows(ids), self._eos)) if ids else self._eos

    def _streaming_body(self, request: Request, text: Tensor) -> tuple[Tensor, Tensor]:
        """Sums of codec side and text, row by row, a shorter text being padded; and the remaining text rows."""
        codec = self._codec_side(request)
        missing = max(0, len(codec) - len(text))
        padded = torch.cat((text, self._pad.expand(missing, -1)))
        return padded[: len(codec)] + codec, padded[len(codec) :]

    def _codec_side(self, request: Request) -> Tensor:
        codes = getattr(request.voice, "codes", None)
        if codes is None:
            return self._codec_bos
        codes = codes.to(self.device)
        frames = torch.stack([table[codes[:, g]] for g, table in enumerate(self._codec_tables)], 1).sum(1)
        return torch.cat((self._codec_bos, frames))


class FedPrompt:
    """Talker input of one utterance whose text arrives piece by piece, in the streaming layout. `row` returns None
    while the token it needs has not arrived and the text is open."""

    embeds: Tensor | None = None  # (L, H); set, like the next two, once enough text has arrived to prefill
    prefix_rows = 0
    prefix_key: Hashable | None = None

    def __init__(self, builder: PromptBuilder, request: Request) -> None:
        """request: from `PromptBuilder.check`; its text is the first piece. Raises PromptError for a whole layout."""
        if request.layout != "streaming":
            raise PromptError(f"text that arrives later needs the streaming layout, got layout={request.layout!r}")
        self._builder, self._request = builder, request
        self._tokens = IncrementalTokenizer(builder.tokenizer)
        self.text_tokens, self.text_ended = 0, False
        # Rows (H,): the transcript of an in-context voice, then one per text token, then end-of-text; and how many of
        # these rows the prompt holds at most.
        self._rows, self._in_prompt = [], 1
        if getattr(request.voice, "codes", None) is not None:
            self._rows += builder.text_rows(builder.reference_ids(request))
            self._in_prompt += len(request.voice.codes)
        self._reference_rows = len(self._rows)
        self.push(request.text)

    @property
    def ready(self) -> bool:
        """Whether enough text has arrived to prefill."""
        return self.embeds is not None

    def push(self, text: str) -> None:
        """Appends text. Raises TextError after `close`, or if `text` is not a string."""
        self._take(self._tokens.push(text))

    def close(self) -> None:
        """Marks the text as complete. Raises TextError if it has no tokens."""
        if self.text_ended:
            return
        self._take(self._tokens.finish())
        if not self.text_tokens:
            raise TextError("expected some text before the end of the feed, got none")
        self.text_ended = True
        self._add([self._builder.fed_eos])

    def row(self, frame: int) -> Tensor | None:
        """As `Prompt.row`, or None: wait for more text."""
        index = self._in_prompt + frame
        if index < len(self._rows):
            return self._rows[index]
        return self._builder.fed_pad if self.text_ended else None

    def _take(self, ids: Sequence[int]) -> None:
        self.text_tokens += len(ids)
        # Projected one token at a time, so that the rows do not depend on how the text was split into pieces.
        self._add([self._builder.text_rows([i])[0] for i in ids])

    def _add(self, rows: Sequence[Tensor]) -> None:
        self._rows += rows
        if self.embeds is None and (self.text_ended or len(self._rows) >= self._in_prompt):
            builder, request, in_transcript = self._builder, self._request, self._reference_rows
            body, _ = builder._streaming_body(request, torch.stack(self._rows))
            self.embeds = torch.cat((builder._head(request), body))
            # A transcript with more tokens than its recording has frames fills the prompt: leave one row to compute.
            self.prefix_rows = min(len(self.embeds) - len(body) + in_transcript, len(self.embeds) - 1)
            self.prefix_key = builder._prefix_key(request, fed=in_transcript > 0)


def language_tags(ids: CodecIds, language: int | None) -> list[int]:
    """The codec ids that state the language of a prompt; None leaves it to the model."""
    if language is None:
        return [ids.nothink, ids.think_bos, ids.think_eos]
    return [ids.think, ids.think_bos, language, ids.think_eos]


def numbers(table: Tensor) -> np.ndarray:
    """The memory of a table (V, E) on the CPU as an array of bytes, row by row, because numpy has no bfloat16."""
    return table.view(torch.uint8).numpy()


def gather(table: np.ndarray, ids: Sequence[int], out: np.ndarray) -> None:
    """Copies rows `ids` of a table (V, E) to `out` (N, E), N > 0, in the calling thread: torch's operator wakes its
    whole thread pool, which takes longer than the copy. Raises IndexError for an id that is not in the table."""
    if min(ids) < 0 or max(ids) >= len(table):
        raise IndexError(f"ids must be 0 to {len(table) - 1}, got {min(ids)} to {max(ids)}")
    np.take(table, np.array(ids, np.int64), axis=0, out=out, mode="clip")  # "raise" would copy twice


@dataclass(frozen=True, eq=False)
class AddressedRows:
    """A prompt (L, H) given by the addresses of its rows. addresses: (L,) int64. like: a tensor of the rows' width,
    dtype and device. kept: the tensors that own the rows."""

    addresses: np.ndarray
    like: Tensor
    kept: tuple[Tensor, ...]

    def __len__(self) -> int:
        return len(self.addresses)

    @property
    def shape(self) -> tuple[int, int]:
        return len(self.addresses), self.like.shape[-1]

    @classmethod
    def of(cls, rows: Tensor) -> AddressedRows:
        """Addresses of the rows of a tensor (L, H), each of which is contiguous."""
        places = rows.stride(0) * rows.element_size() * np.arange(len(rows), dtype=np.int64)
        return cls(rows.data_ptr() + places, rows, (rows,))


class SpokenRows:
    """The prompt rows of all text ids in the whole layout, plus codec_pad: (V, H), 0.3 GB at 0.6B in bfloat16."""

    @torch.inference_mode()
    def __init__(self, prompts: PromptBuilder) -> None:
        codec_pad = prompts._codec_pad
        table = codec_pad.new_empty(len(prompts._table), codec_pad.shape[1])
        for start in range(0, len(table), _ROWS_AT_ONCE):
            part = table[start : start + _ROWS_AT_ONCE]
            part.copy_(prompts.text_rows(range(start, start + len(part))) + codec_pad)
        self._table, self._end = AddressedRows.of(table), AddressedRows.of(prompts._whole_end)

    def prompt(self, head: Tensor, ids: Sequence[int]) -> AddressedRows:
        """The prompt of rows `head`, the rows of the text `ids` and those that end it."""
        parts = AddressedRows.of(head).addresses, self._table.addresses[list(ids)], self._end.addresses
        return AddressedRows(np.concatenate(parts), head, (head, *self._table.kept, *self._end.kept))


def is_of_voice(key: Hashable, voice: Voice) -> bool:
    """Whether a prefix key belongs to prompts with `voice`."""
    return isinstance(key, tuple) and voice.digest in key
