"""Talker and code predictor in plain PyTorch, for one stream and for many. On a CPU its codes equal those of upstream
qwen-tts, so it is the reference (oracle) for every faster implementation.

One frame, as the released model defines it: the talker's hidden state gives code 0; the predictor takes two rows
(hidden state, embedding of code 0) and then one row per code, and gives codes 1-15, each with its own head; the
sum of the sixteen embeddings plus the next text embedding is the talker's next input."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from mktts.errors import CapacityError, PromptError
from mktts.model.backend import CODE_EMBEDDINGS, Frame, PromptRows, no_number
from mktts.model.qwen3 import KVCache, Qwen3Stack
from mktts.model.sampling import ChoiceRows, FrameNoise, RestrictedRows, Sampling, check_start
from mktts.model.voice import Voice
from mktts.spec import NUM_CODEBOOKS, ModelConfig


@dataclass
class TorchStream:
    """The state of one utterance; `copy()` forks it."""

    cache: KVCache
    prompt: Tensor | None  # (L, H); None once the talker has read it
    seen: Tensor  # (V,) bool: the codes 0 of all frames so far
    sampling: Sampling
    seed: int
    generator: torch.Generator | None  # for rng="torch"; Philox draws depend on the seed and the frame only
    max_frames: int | None
    head_rows: Tensor | None = None  # (rows, H), normed: input of the code-0 head; its last row gives the next code 0
    frames: int = 0
    codes: Tensor | None = None  # (16,) int64 of the newest frame, on the device
    ended: bool = False

    def copy(self) -> TorchStream:
        generator = None if self.generator is None else self.generator.clone_state()
        cache = replace(self.cache, memory=self.cache.memory.clone())
        return replace(self, cache=cache, seen=self.seen.clone(), generator=generator)


_FAILED = -1  # code 0 of a stream without a finite logit


class TorchBackend:
    """A `mktts.model.backend.Backend`; `tick` makes a frame of many streams. `tensors` is keyed by Hub names."""

    name = "torch"

    def __init__(
        self,
        config: ModelConfig,
        tensors: Mapping[str, Tensor],
        device: torch.device | str = "cpu",
        dtype: torch.dtype = torch.bfloat16,
        *,
        stacks: type[Qwen3Stack] = Qwen3Stack,
    ) -> None:
        """device, dtype: of weights and activations. stacks: the class of the talker's and the predictor's stack."""
        self.config, self.device, self.dtype = config, torch.device(device), dtype

        def get(name: str) -> Tensor:
            return tensors[name].to(self.device, dtype)

        self.talker = stacks(config.talker, tensors, "talker.model.", self.device, dtype)
        self.predictor = stacks(config.predictor, tensors, "talker.code_predictor.model.", self.device, dtype)
        linear, predictor = self.talker.linear, "talker.code_predictor."
        self.codec_head = linear(get("talker.codec_head.weight"))
        self.embeddings = {name: get(name) for name in CODE_EMBEDDINGS}
        # code_tables[g] holds the embeddings of codebook g; heads[g] is the predictor head that gives codebook g + 1
        self.code_tables = list(self.embeddings.values())
        self.heads = [linear(get(f"{predictor}lm_head.{g}.weight")) for g in range(NUM_CODEBOOKS - 1)]
        projection = [f"{predictor}small_to_mtp_projection.{part}" for part in ("weight", "bias")]
        self.projection = linear(*map(get, projection)) if projection[0] in tensors else None
        self._noise = FrameNoise(config)
        self._limits = RestrictedRows(config.talker.vocab_size, config.codec_ids.eos, self.device)

    def forget(self, voice: Voice) -> None:
        """Does nothing: this backend caches nothing for a voice."""

    @torch.inference_mode()
    def start(self, prompt: PromptRows, sampling: Sampling, seed: int, max_frames: int | None = None) -> TorchStream:
        """See `Backend`. With sampling.rng="torch" a seed gives the draws that `torch.manual_seed` gives upstream.
        max_frames: None is for `tick`: the cache then grows with the frames, and the first tick prefills the prompt."""
        embeds, grows, c = prompt.embeds, max_frames is None, self.config.talker
        check_start(embeds, c.hidden_size, seed, 1 if grows else max_frames)
        cache = self.talker.new_cache(c.max_position_embeddings if grows else len(embeds) + max_frames, grows=grows)
        seen = torch.zeros(c.vocab_size, dtype=torch.bool, device=self.device)
        generator = torch.Generator(self.device).manual_seed(int(seed)) if sampling.rng == "torch" else None
        embeds = embeds.to(self.device, self.dtype)
        state = TorchStream(cache, embeds, seen, sampling, int(seed), generator, max_frames)
        if not grows:
            self._advance([state], [None])
        return state

    def step(self, state: TorchStream, row: Tensor | None) -> Frame:
        """See `Backend`. Also raises EngineError if no logit of code 0 is finite."""
        (frame,) = self.frames(state, [row])
        return frame

    @torch.inference_mode()
    def frames(self, state: TorchStream, rows: Sequence[Tensor | None]) -> Iterator[Frame]:
        """See `Backend`. Raises what `step` raises."""
        for row in rows:
            if state.ended or state.frames >= state.max_frames:
                raise CapacityError(f"the stream ended after {state.frames} of at most {state.max_frames} frames")
            if self.device.type == "cuda":
                torch.cuda.synchronize(self.device)
            started_s = time.perf_counter()
            if row is not None:
                self._advance([state], [row])
            code0, noise = self._code0([state])  # waits for the device
            if int(code0) == _FAILED:
                raise no_number()
            talker_s = time.perf_counter()
            talker_ms = 1e3 * (talker_s - started_s)
            if state.ended:
                yield Frame(None, talker_ms, predictor_ms=0.0)
                return
            codes = self.later_codes([state], code0, noise)[0].cpu()
            yield Frame(codes, talker_ms, predictor_ms=1e3 * (time.perf_counter() - talker_s))

    @torch.inference_mode()
    def tick(self, streams: Sequence[TorchStream], rows: Sequence[Tensor | None]) -> Tensor:
        """Makes one frame of each stream -> codes (B, 16) int64. The codes of a stream that has `ended` are undefined;
        code 0 is -1 for a stream without a finite logit. rows: text embeddings (H,), None exactly for streams whose
        prompt is still to be read; otherwise raises PromptError before any state changes."""
        if [row is None for row in rows] != [stream.prompt is not None for stream in streams]:
            raise PromptError("expected no row at a stream's first tick and one at every later tick")
        self._advance(streams, rows)
        return self.later_codes(streams, *self._code0(streams))

    def code0_logits(self, state: TorchStream) -> Tensor:
        """Raw talker logits for the next code 0: (vocabulary,) fp32."""
        return self.codec_head(state.head_rows)[-1].float()

    def _advance(self, streams: Sequence[TorchStream], rows: Sequence[Tensor | None]) -> None:
        """Runs the talker over the newest row of each stream, or over its prompt."""
        speaking, inputs = [i for i, row in enumerate(rows) if row is not None], [stream.prompt for stream in streams]
        for stream in streams:
            stream.prompt = None
        if speaking:
            codes = torch.stack([streams[i].codes for i in speaking], 1)
            parts = [table.index_select(0, codes[g]) for g, table in enumerate(self.code_tables)]
            embedding = torch.stack(parts, 1).sum(1)  # one rounding after an fp32 sum, as upstream
            embedding = embedding + torch.stack([rows[i] for i in speaking]).to(self.device, self.dtype)
            for i, row in zip(speaking, embedding.split(1), strict=True):
                inputs[i] = row
        counts = [some.shape[0] for some in inputs]
        hidden = self.talker.advance(torch.cat(inputs), [stream.cache for stream in streams], counts)
        for stream, some in zip(streams, hidden.split_with_sizes(counts), strict=True):
            # Upstream projects every prompt row; one row alone may round differently in bf16.
            stream.head_rows = some if self.talker.exact else some[-1:]

    def _code0(self, streams: Sequence[TorchStream]) -> tuple[Tensor, Tensor | torch.Generator | None]:
        """Code 0 of the frame, (B,), -1 without a finite logit; and the randomness of its later codes: noise
        (B, 15, V) if any stream samples, or for rng="torch" the generator of the only stream."""
        logits = self.codec_head(torch.cat([stream.head_rows for stream in streams])).float()
        if logits.shape[0] > len(streams):
            logits = logits[torch.tensor([stream.head_rows.shape[0] for stream in streams]).cumsum(0) - 1]
        made = [stream.frames for stream in streams]
        seen = torch.stack([stream.seen for stream in streams])
        logits = self._limits.restrict(logits, seen, [stream.sampling.repetition_penalty for stream in streams], made)
        noise = later = streams[0].generator
        if noise is None and any(s.sampling.talker.do_sample or s.sampling.predictor.do_sample for s in streams):
            drawn = self._noise.draw([stream.seed for stream in streams], made)
            noise, later = (part.to(self.device) for part in drawn)
        choices = ChoiceRows.of(tuple(stream.sampling.talker for stream in streams), self.device)
        code0 = choices.choose(logits, noise)
        code0 = torch.where((logits > -torch.inf).any(1), code0, _FAILED)
        for stream, code in zip(streams, code0.tolist(), strict=True):
            stream.seen[code] = True
            stream.ended = code == self.config.codec_ids.eos
        return code0, later

    def later_codes(
        self,
        streams: Sequence[TorchStream],
        code0: Tensor,
        noise: Tensor | torch.Generator | None,
        draw: Callable[[int, Tensor], Tensor] | None = None,
    ) -> Tensor:
        """Completes the frame and returns all its codes, (B, 16) int64. code0, noise: as returned by `_code0`. draw:
        (codebook, logits (B, V) fp32) -> codes (B,) of that codebook, in place of the streams' own sampling."""
        count = len(streams)
        choices = ChoiceRows.of(tuple(stream.sampling.predictor for stream in streams), self.device)
        of_book = noise.unbind(1) if isinstance(noise, Tensor) else [noise] * len(self.heads)
        hidden, codes = torch.cat([stream.head_rows[-1:] for stream in streams]), [code0.clamp(min=0)]
        frame = self.predictor.new_cache(NUM_CODEBOOKS, count)
        x = torch.stack((hidden, self.code_tables[0][codes[0]]), 1).flatten(0, 1)
        for book, (head, table) in enumerate(zip(self.heads, self.code_tables[1:], strict=True), 1):
            if self.projection is not None:
                x = self.projection(x)
            new = len(x) // count  # rows of each stream: two, then one
            logits = head(self.predictor.advance(x, [frame], [new]))[new - 1 : new * count : new].float()
            codes.append(choices.choose(logits, of_book[book - 1]) if draw is None else draw(book, logits))
            x = table.index_select(0, codes[-1])
        made = torch.stack(codes, 1)
        for stream, its_codes in zip(streams, made, strict=True):
            stream.codes = its_codes
            stream.frames += not stream.ended
        return torch.cat((code0[:, None], made[:, 1:]), 1)
