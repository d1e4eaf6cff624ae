"""The oracle: talker and code predictor in plain PyTorch, code for code equal to upstream qwen-tts on CPU.

One frame (spec of the released model): the talker's hidden state gives code 0; the predictor takes two rows
(hidden state, embedding of code 0) and then one row per code to give codes 1-15, each from its own head; the
sum of the sixteen embeddings plus the next text embedding is the talker's next input.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

import torch
import torch.nn.functional as F
from torch import Tensor

from mktts.errors import CapacityError
from mktts.model.backend import CODE_EMBEDDINGS, Frame, PromptRows, check_start, no_number
from mktts.model.qwen3 import KVCache, Qwen3Stack
from mktts.model.sampling import Choice, Sampling, checked_seed, choose, gumbel, restrict
from mktts.model.voice import Voice
from mktts.spec import NUM_CODEBOOKS, ModelConfig


@dataclass
class TorchStream:
    """Everything one utterance owns; `copy()` forks it."""

    cache: KVCache
    hidden: Tensor  # (1, 1, H) after the final norm, of the newest position
    head_rows: Tensor  # (1, rows, H): the rows the next code-0 logits are computed with; the last one counts
    history: Tensor  # (max_frames + 1,) int64, code 0 of every frame so far
    sampling: Sampling
    seed: int
    generator: torch.Generator | None  # of rng="torch"; Philox's draws follow from the seed and the frame
    max_frames: int
    frames: int = 0
    codes: Tensor | None = None  # (16,) int64 of the newest frame, on the device
    ended: bool = False

    def copy(self) -> TorchStream:
        generator = self.generator
        if generator is not None:
            generator = torch.Generator(self.generator.device)
            generator.set_state(self.generator.get_state())
        return replace(self, cache=self.cache.copy(), history=self.history.clone(), generator=generator)


class TorchBackend:
    """A `mktts.model.backend.Backend`. `tensors` carries the Hub's names; device, dtype: of the products."""

    name = "torch"

    def __init__(
        self,
        config: ModelConfig,
        tensors: Mapping[str, Tensor],
        device: torch.device | str = "cpu",
        dtype: torch.dtype = torch.bfloat16,
    ) -> None:
        self.config = config
        self.device = torch.device(device)
        self.dtype = dtype

        def get(name: str) -> Tensor:
            return tensors[name].to(self.device, dtype)

        self.talker = Qwen3Stack(config.talker, tensors, "talker.model.", self.device, dtype)
        self.predictor = Qwen3Stack(config.predictor, tensors, "talker.code_predictor.model.", self.device, dtype)
        self.codec_head = get("talker.codec_head.weight")
        self.embeddings = {name: get(name) for name in CODE_EMBEDDINGS}
        # code_tables[g] holds the embeddings of codebook g; heads[g] is the predictor head that gives codebook g + 1
        self.code_tables = list(self.embeddings.values())
        self.heads = [get(f"talker.code_predictor.lm_head.{g}.weight") for g in range(NUM_CODEBOOKS - 1)]
        projection = "talker.code_predictor.small_to_mtp_projection."
        self.projection = (
            (get(projection + "weight"), get(projection + "bias")) if projection + "weight" in tensors else None
        )

    def forget(self, voice: Voice) -> None:
        """Nothing is kept here."""

    @torch.inference_mode()
    def start(self, prompt: PromptRows, sampling: Sampling, seed: int | None, max_frames: int) -> TorchStream:
        """With sampling.rng="torch" a seed gives the draws that `torch.manual_seed` gives upstream."""
        embeds = prompt.embeds
        check_start(embeds, self.config.talker.hidden_size, max_frames)
        seed = checked_seed(seed)
        generator = torch.Generator(self.device).manual_seed(seed) if sampling.rng == "torch" else None
        cache = self.talker.new_cache(len(embeds) + max_frames)
        hidden = self.talker.forward(embeds.to(self.device, self.dtype)[None], cache)
        # Upstream projects every prompt row; one row alone may round differently in bf16, so keep them for the head.
        return TorchStream(
            cache=cache,
            hidden=hidden[:, -1:],
            head_rows=hidden,
            history=torch.empty(max_frames + 1, dtype=torch.int64, device=self.device),
            sampling=sampling,
            seed=seed,
            generator=generator,
            max_frames=max_frames,
        )

    def frames(self, state: TorchStream, rows: Sequence[Tensor | None]) -> Iterator[Frame]:
        for row in rows:
            yield self.step(state, row)
            if state.ended:
                return

    @torch.inference_mode()
    def step(self, state: TorchStream, row: Tensor | None) -> Frame:
        """Raises EngineError where the logits of code 0 are no numbers, else as `Backend.step`."""
        if state.ended or state.frames >= state.max_frames:
            raise CapacityError(f"the stream ended after {state.frames} of at most {state.max_frames} frames")
        started_s = self._clock()
        if row is not None:
            self._advance(state, row)
        code0 = self._code0(state)
        if int(code0) == self.config.codec_ids.eos:
            state.ended = True
            return Frame(None, talker_ms=1e3 * (self._clock() - started_s), predictor_ms=0.0)
        talker_s = self._clock()
        state.codes = self._predict(state, code0)
        state.frames += 1
        codes = state.codes.cpu()
        return Frame(codes, talker_ms=1e3 * (talker_s - started_s), predictor_ms=1e3 * (self._clock() - talker_s))

    def code0_logits(self, state: TorchStream) -> Tensor:
        """Raw talker logits for the next code 0: (vocabulary,) fp32."""
        return F.linear(state.head_rows, self.codec_head)[0, -1].float()

    def _advance(self, state: TorchStream, row: Tensor) -> None:
        assert state.codes is not None, "the first step takes no text: its talker input was the prompt"
        codes = [table[state.codes[g : g + 1]] for g, table in enumerate(self.code_tables)]
        embedding = torch.cat(codes)[None].sum(1, keepdim=True)  # one rounding after an fp32 sum, as upstream
        embedding = embedding + row.to(self.device, self.dtype)
        state.hidden = state.head_rows = self.talker.forward(embedding, state.cache)

    def _code0(self, state: TorchStream) -> Tensor:
        sampling, history = state.sampling, state.history[: state.frames]
        logits = restrict(self.code0_logits(state), history, sampling.repetition_penalty, self.config.codec_ids.eos)
        if not (logits > -torch.inf).any():
            raise no_number()
        (randomness,) = self._randomness(state, sampling.talker, range(1), len(logits))
        code0 = choose(logits, sampling.talker, randomness)
        state.history[state.frames] = code0
        return code0

    def _randomness(
        self, state: TorchStream, choice: Choice, books: range, size: int
    ) -> Sequence[Tensor | torch.Generator | None]:
        """What `choose` draws with in each codebook of this frame; noise is made for all of them at once."""
        if not choice.do_sample or state.generator is not None:
            return [state.generator] * len(books)
        return torch.from_numpy(gumbel(state.seed, state.frames, books, size)).to(self.device).unbind()

    def _predict(self, state: TorchStream, code0: Tensor) -> Tensor:
        cache = self.predictor.new_cache(NUM_CODEBOOKS)
        codes = [code0]
        x = torch.cat((state.hidden, self.code_tables[0][code0][None, None]), 1)
        choice, groups = state.sampling.predictor, range(1, NUM_CODEBOOKS)
        randomness = self._randomness(state, choice, groups, self.config.predictor.vocab_size)
        for group, head, random in zip(groups, self.heads, randomness, strict=True):
            if self.projection is not None:
                x = F.linear(x, *self.projection)
            logits = F.linear(self.predictor.forward(x, cache), head)[0, -1].float()
            codes.append(choose(logits, choice, random))
            x = self.code_tables[group][codes[-1]][None, None]
        return torch.stack(codes)

    def _clock(self) -> float:
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)
        return time.perf_counter()
