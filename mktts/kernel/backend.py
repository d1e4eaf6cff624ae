"""The CUDA backend: one launch of csrc's persistent kernel makes one frame or several, in bfloat16 only. After the
prompt, the host only launches and reads codes, which the kernel writes to pinned host memory frame by frame."""

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from mktts.errors import CapacityError, PromptError, SamplingError
from mktts.kernel import launch
from mktts.kernel.build import Card, card_of
from mktts.kernel.grid import choose_shape
from mktts.kernel.launch import Launcher, Params, check_device, fill_pointers, params_of, pinned_words, set_choice
from mktts.kernel.prefill import Prefill, copy_into_cache
from mktts.kernel.tape import TapeStack, model_weights
from mktts.model.backend import CODE_EMBEDDINGS, Frame, PromptRows, no_number
from mktts.model.sampling import Sampling, check_start
from mktts.model.voice import Voice
from mktts.spec import MIN_NEW_FRAMES, NUM_CODEBOOKS, SUPPRESSED_TAIL, ModelConfig

MAX_FRAMES_A_LAUNCH = 8  # the capacity of a stream's pinned memory; the synthesizer asks for fewer
_POLL_S = 20e-6  # between polls of the frame count, while the launch is to make more frames
# Up to this many rows, the kernel's own steps (0.34 ms a row at 0.6B, H200) are faster than a prefill graph (0.9 ms).
_KERNEL_ROWS = 2


@dataclass
class MegakernelStream:
    """The state of one utterance, on the device except for the counters and `out`."""

    kv: Tensor  # (layers, kv heads, blocks of a group, slots, 2, head_dim) bf16
    hidden: Tensor  # (H,) bf16: normed talker state of the newest position
    sum: Tensor  # (H,) bf16: embedding sum of the newest frame
    seen: Tensor  # (vocabulary / 32,) int32: bitmap of the codes 0 so far
    out: Tensor  # pinned int32: status words, then a launch's frames
    words: np.ndarray  # view of `out`
    params: Params  # of its launches
    prompt_rows: int
    max_frames: int
    frames: int = 0
    ended: bool = False
    done: torch.cuda.Event | None = None  # recorded after its newest launch of frames; launches never overlap


@dataclass(frozen=True)
class Debug:
    """Internal values that a step writes for debugging, on the device."""

    logits: Tensor  # (16, talker vocabulary) bf16, raw output of the heads; codes 1 to 15 use only their vocabulary
    hidden: Tensor  # (talker layers, H) bf16: the residual stream after every layer; not written by the first frame


class MegakernelBackend:
    """Implements `mktts.model.backend.Backend` on one CUDA device. Raises BackendUnavailable if the device, the
    compiler or the checkpoint's dimensions do not support it."""

    name = "megakernel"

    def __init__(
        self,
        config: ModelConfig,
        tensors: Mapping[str, Tensor],
        device: torch.device | str = "cuda",
        dtype: torch.dtype = torch.bfloat16,
        card: Card | None = None,
    ) -> None:
        """card: build for this card, smaller or older than the device, which then runs its grid and its PTX."""
        self.config, self.device, self.dtype = config, torch.device(device), dtype
        check_device(self.device, dtype)
        card = card_of(self.device) if card is None else card
        self.shape = choose_shape(config, card.multiprocessors)
        self._launcher = Launcher("frame.cu", "mktts_frames", self.shape.defines, self.device, card)
        layers = config.talker.num_hidden_layers + (NUM_CODEBOOKS - 1) * config.predictor.num_hidden_layers
        # The exchanges of the layers, one for each head, the projection, the host's answer.
        self._tags_per_frame = self._launcher.layer_exchanges * layers + NUM_CODEBOOKS + 2
        self._weights = model_weights(self.shape, lambda name: tensors[name].to(self.device, dtype))
        self._prefill = Prefill(TapeStack(self.shape, self._weights))
        tables = self._weights["embeddings0"], *self._weights["embeddings"]
        self.embeddings = dict(zip(CODE_EMBEDDINGS, tables, strict=True))
        self._fixed = self._fixed_params()

    @torch.inference_mode()
    def start(self, prompt: PromptRows, sampling: Sampling, seed: int, max_frames: int) -> MegakernelStream:
        """See `Backend`. Raises SamplingError for rng="torch"."""
        talker, embeds, prefix_rows = self.config.talker, prompt.embeds, prompt.prefix_rows
        check_start(embeds, talker.hidden_size, seed, max_frames)
        if sampling.rng != "philox":
            raise SamplingError("the megakernel draws by Philox: for rng='torch' pass backend='torch'")
        rows = len(embeds)
        if rows + max_frames > talker.max_position_embeddings:
            raise CapacityError(f"{rows} prompt rows and {max_frames} frames exceed the model's positions")
        state = self._new_stream(sampling, int(seed), rows, max_frames)
        embeds = embeds.to(self.device, self.dtype).contiguous()
        if rows - prefix_rows > _KERNEL_ROWS:
            state.hidden.copy_(self._prefill.fill(embeds, state.kv, prefix_rows, prompt.prefix_key))
            return state
        if prefix_rows:
            copy_into_cache(self._prefill.prefix(embeds[:prefix_rows], prompt.prefix_key), state.kv)
        self.put_rows(state, embeds[prefix_rows:], prefix_rows)
        return state

    def forget(self, voice: Voice) -> None:
        self._prefill.forget(voice)

    def put_rows(self, state: MegakernelStream, rows: Tensor, position: int) -> torch.cuda.Event:
        """Prefills prompt rows (n, H), on the device, at positions [position, position + n), one by one; returns the
        event recorded after it. n times the exchanges of all layers must stay below 2^16, the range of their tags."""
        params = self._params(state, rows)
        params.prefill, params.frames, params.stream.position = 1, len(rows), position
        layers = len(rows) * self.config.talker.num_hidden_layers
        return self._launcher.launch(params, layers * self._launcher.layer_exchanges)

    def step(
        self,
        state: MegakernelStream,
        row: Tensor | None,
        debug: Debug | None = None,
        meanwhile: Callable[[], None] | None = None,
    ) -> Frame:
        """See `Backend`. Times are measured by the kernel; launch and transfer count as talker_ms."""
        (frame,) = self.frames(state, [row], debug, meanwhile)
        return frame

    def codes_to_come(self, state: MegakernelStream) -> Tensor:
        """Pinned memory, (16,) int32, for the codes of the next launch's first frame; work queued later can read it."""
        return state.out[launch.STATUS_WORDS : launch.STATUS_WORDS + NUM_CODEBOOKS]

    def frames(
        self,
        state: MegakernelStream,
        rows: Sequence[Tensor | None],
        debug: Debug | None = None,
        meanwhile: Callable[[], None] | None = None,
    ) -> Iterator[Frame]:
        """Runs up to MAX_FRAMES_A_LAUNCH steps in one launch and yields each frame as soon as the host has it; ends
        early after end-of-speech (a Frame without codes). meanwhile: called while the kernel works. Closing the
        iterator stops the kernel within one frame; the frames made until then count. Raises EngineError if a wait in
        the kernel timed out."""
        self._check(state, rows)
        begun_s, words = time.perf_counter(), state.words
        done = self._launch(state, rows, debug)
        before, made_ms, over = state.frames, 0.0, False
        try:
            if meanwhile is not None:
                meanwhile()
            for index in range(len(rows)):
                last = index + 1 == len(rows)
                if last:
                    done.synchronize()
                while words[launch.MADE] <= index and not done.query():  # later frames are made during these pauses
                    time.sleep(_POLL_S)
                over = last or words[launch.MADE] <= index  # whether the launch is known to have ended
                if words[launch.MADE] <= index:
                    break
                # The part of the first frame's time not spent in the kernel is launch and transfer.
                frame = frame_of(words, index, 0.0 if index else 1e3 * (time.perf_counter() - begun_s))
                state.frames = before + index + 1
                made_ms += frame.talker_ms + frame.predictor_ms
                yield frame
        finally:
            if not over:
                words[launch.STOP] = 1
                done.synchronize()
            state.frames = before + int(words[launch.MADE])
            state.ended = bool(words[launch.ENDED])
        if state.ended:
            yield Frame(None, max(0.0, 1e3 * (time.perf_counter() - begun_s) - made_ms), 0.0)
        elif state.frames < before + len(rows):
            state.ended = True
            raise self._launcher.failure()

    @torch.inference_mode()
    def new_debug(self) -> Debug:
        """Allocates a `Debug`, to be passed to `step`."""
        talker = self.config.talker
        logits = torch.zeros(NUM_CODEBOOKS, talker.vocab_size, dtype=self.dtype, device=self.device)
        return Debug(logits, logits.new_zeros(talker.num_hidden_layers, talker.hidden_size))

    def _new_stream(self, sampling: Sampling, seed: int, rows: int, max_frames: int) -> MegakernelStream:
        """Allocates a stream. rows: of its prompt."""
        talker = self.config.talker
        hidden, newest = torch.zeros(2, talker.hidden_size, dtype=self.dtype, device=self.device)
        tensors = {
            "kv": torch.empty(self.shape.cache(rows + max_frames), dtype=self.dtype, device=self.device),
            "hidden": hidden,
            "sum": newest,
            "seen": torch.zeros(talker.vocab_size // 32, dtype=torch.int32, device=self.device),
            "out": pinned_words(MAX_FRAMES_A_LAUNCH),
        }
        params = params_of(self._fixed, seed, **tensors)
        params.stream.penalty = sampling.repetition_penalty
        set_choice(params.stream, sampling.talker, True)
        set_choice(params.stream, sampling.predictor, False)
        words = tensors["out"].numpy()
        return MegakernelStream(**tensors, words=words, params=params, prompt_rows=rows, max_frames=max_frames)

    def _check(self, state: MegakernelStream, rows: Sequence[Tensor | None]) -> None:
        if not 1 <= len(rows) <= MAX_FRAMES_A_LAUNCH:
            raise CapacityError(f"a launch makes 1 to {MAX_FRAMES_A_LAUNCH} frames, got {len(rows)}")
        if state.ended or state.frames + len(rows) > state.max_frames:
            stands = f"{'ended' if state.ended else 'is'} after {state.frames} of at most {state.max_frames} frames"
            raise CapacityError(f"the stream {stands}: {len(rows)} more were asked for")
        width = self.config.talker.hidden_size
        for index, row in enumerate(rows):
            if (row is None) != (state.frames + index == 0):
                raise PromptError("the text row is None exactly on the first step of a stream")
            if row is not None and row.shape != (width,):
                raise PromptError(f"a text row must be ({width},), got {tuple(row.shape)}")

    def _launch(self, state: MegakernelStream, rows: Sequence[Tensor | None], debug: Debug | None) -> torch.cuda.Event:
        inputs = [state.sum if row is None else row.to(self.device, self.dtype) for row in rows]
        stacked = torch.stack(inputs) if len(inputs) > 1 else inputs[0].contiguous()
        params = self._params(state, stacked)
        params.frames = len(rows)
        if debug is not None:
            fill_pointers(params, {"debug_logits": debug.logits, "debug_hidden": debug.hidden})
        state.words[: launch.STATUS_WORDS] = 0
        state.done = self._launcher.launch(params, len(rows) * self._tags_per_frame, state.done)
        return state.done

    def _params(self, state: MegakernelStream, rows: Tensor) -> Params:
        """The stream's parameters for its next frames, of which only those that change are set: filling all fields took
        25 us a launch. Resets what `put_rows` and a step with debug set for their own launches."""
        params = state.params
        params.prefill, params.debug_logits, params.debug_hidden = 0, None, None
        stream = params.stream
        stream.rows, stream.frame = rows.data_ptr(), state.frames
        stream.position = state.prompt_rows + state.frames - 1
        return params

    def _fixed_params(self) -> Params:
        params = Params()
        fill_pointers(params, self._weights)
        params.ends[:] = [self.config.codec_ids.eos, -1, -1, -1]
        params.min_frames = MIN_NEW_FRAMES
        params.suppress_from = self.config.talker.vocab_size - SUPPRESSED_TAIL
        return params


def frame_of(words: np.ndarray, index: int, least_ms: float) -> Frame:
    """Reads frame `index`, whose time is at least `least_ms`. Raises EngineError if a code had no finite logit."""
    first = launch.STATUS_WORDS + index * launch.FRAME_WORDS
    codes = torch.from_numpy(words[first : first + NUM_CODEBOOKS].astype(np.int64))
    talker_ns, predictor_ns, not_numbers = words[first + NUM_CODEBOOKS : first + NUM_CODEBOOKS + 3].tolist()
    if not_numbers:
        raise no_number()
    predictor_ms = 1e-6 * predictor_ns
    return Frame(codes, max(1e-6 * talker_ns, least_ms - predictor_ms), predictor_ms)
