"""qwen-tts 0.1.1 as it is: the reference of the parity tests, and the fallback backend. Its wrapper methods run
unchanged; hooks read what they hand to talker and codec. It is imported on first use."""

from __future__ import annotations

import contextlib
import importlib
import io
import logging
import shutil
import sys
import time
import types
from collections import defaultdict, deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, partial
from importlib.machinery import ModuleSpec
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor

from mktts.codec.decoder import PendingPcm
from mktts.common import checked_int
from mktts.engine.lanes import Made, OneLane
from mktts.engine.options import FinishReason, GuardState
from mktts.engine.scheduler import Tick
from mktts.engine.stream import Segment
from mktts.errors import BackendUnavailable, CapacityError, MkttsError, PromptError
from mktts.model.prompt import Request
from mktts.model.sampling import Sampling
from mktts.model.tokenizer import TextTokenizer
from mktts.model.voice import Voice
from mktts.spec import MODEL_TYPES, NUM_CODEBOOKS, SAMPLE_RATE_HZ, SAMPLES_PER_FRAME

if TYPE_CHECKING:
    from mktts.checkpoint import Checkpoint


# What qwen_tts imports for its 25 Hz tokenizer only (qwen_tts/core/tokenizer_25hz/vq/speech_vq.py).
_ONLY_25HZ = {"torchaudio": ("compliance", "compliance.kaldi"), "sox": (), "onnxruntime": ()}


class _LeaveUpstream(Exception):
    """Raised in a hook to leave upstream's generation."""


def install_shim() -> None:
    """Puts stand-ins for torchaudio, sox and onnxruntime where the real ones cannot load, so that qwen_tts imports; the
    12 Hz models use none of them. Any use of a stand-in raises an AttributeError that says why it is there."""
    for name, children in _ONLY_25HZ.items():
        if isinstance(sys.modules.get(name), _StandIn):
            continue
        modules = [name, *(f"{name}.{child}" for child in children)]
        try:
            if name == "sox" and shutil.which("sox") is None:
                raise FileNotFoundError("the sox program is not installed")
            for module in modules:
                importlib.import_module(module)
        except Exception as error:  # noqa: BLE001  any failure to load means the same: it cannot be used here
            for loaded in [m for m in sys.modules if m == name or m.startswith(f"{name}.")]:
                del sys.modules[loaded]
            for module in modules:
                sys.modules[module] = _StandIn(module, f"{type(error).__name__}: {error}")
                parent, _, leaf = module.rpartition(".")
                if parent:
                    setattr(sys.modules[parent], leaf, sys.modules[module])


class _StandIn(types.ModuleType):
    def __init__(self, name: str, reason: str) -> None:
        super().__init__(name)
        self.reason, self.__path__ = reason, []
        self.__spec__ = ModuleSpec(name, loader=None)

    def __getattr__(self, attribute: str) -> Any:
        raise AttributeError(f"{self.__name__}.{attribute}: only a stand-in is loaded, because {self.reason}")


def import_upstream() -> types.ModuleType:
    """The qwen_tts package. Raises BackendUnavailable where it, or something it needs, cannot be imported."""
    if sys.modules.get("qwen_tts") is not None:
        return sys.modules["qwen_tts"]
    install_shim()
    try:
        with contextlib.redirect_stdout(io.StringIO()):  # a banner about flash-attn, which only the 25 Hz model uses
            return importlib.import_module("qwen_tts")
    except Exception as error:
        why = f"{type(error).__name__}: {error}. Install requirements.txt, or choose backend='torch'"
        needed = "the upstream package qwen-tts (0.1.1, with transformers 4.57.3) is needed here"
        raise BackendUnavailable(f"{needed} and cannot be imported: {why}") from error


def load_upstream(
    checkpoint: Checkpoint | str | Path, dtype: torch.dtype = torch.bfloat16, device: str | torch.device = "cpu"
) -> Any:
    """Loads a checkpoint folder into qwen_tts.Qwen3TTSModel: talker and predictor in `dtype`, codec in float32.

    For a local folder transformers 4.57.3 takes Mistral's pre-tokenizer in place of Qwen's ("iPhone" becomes "i",
    "Phone"), because upstream passes fix_mistral_regex=True; the tokenizer is loaded again without that, so that text
    becomes the ids of the Hub checkpoint. Raises BackendUnavailable without qwen-tts."""
    qwen_tts = import_upstream()
    folder = str(getattr(checkpoint, "folder", checkpoint))
    placed = {} if str(device) == "cpu" else {"device_map": str(device)}
    with _quiet():
        model = qwen_tts.Qwen3TTSModel.from_pretrained(folder, dtype=dtype, **placed)
        if dtype != torch.float32:  # upstream hands dtype on to the codec, whose weights are float32
            codec = qwen_tts.Qwen3TTSTokenizer.from_pretrained(
                f"{folder}/speech_tokenizer", dtype=torch.float32, **placed
            )
            model.model.load_speech_tokenizer(codec)
        model.processor.tokenizer = type(model.processor.tokenizer).from_pretrained(folder)
    return model


def generate_codes(
    model: Any,
    request: Request,
    sampling: Sampling,
    seed: int | None,
    max_frames: int,
    cancelled: Callable[[], bool] = lambda: False,
    on_frame: Callable[[Tensor], None] = lambda codes: None,
) -> Tensor:
    """Upstream's own generate: codes (T, 16) int64 on the CPU, T <= max_frames, without reference frames.

    Every draw comes from torch's global generator seeded with `seed` (None: a fresh one), whose state is restored.
    cancelled: called once a frame; True ends the run with the frames so far. on_frame: gets each frame's codes (16,).
    Not re-entrant on one model. Raises PromptError for what upstream refuses, CapacityError for max_frames < 1."""
    checked_int("max_frames", max_frames, 1, error=CapacityError)
    frames: list[Tensor] = []

    def before(module: Any, arguments: Any) -> None:
        if cancelled():
            raise _LeaveUpstream

    def after(module: Any, arguments: Any, output: Any) -> None:
        if output.hidden_states[-1] is not None:  # None: the prompt's own pass
            frames.append(output.hidden_states[-1][0].to("cpu", copy=True))
            on_frame(frames[-1])

    talker = model.model.talker
    hooks = (talker.register_forward_pre_hook(before), talker.register_forward_hook(after))
    cuda = [talker.device] if talker.device.type == "cuda" else []
    settings = sampling.upstream() | {"max_new_tokens": max_frames + 1}  # the last one's frame is dropped
    try:
        with _quiet(), _no_codec(model), torch.random.fork_rng(devices=cuda):
            torch.seed() if seed is None else torch.manual_seed(seed)
            _call(model, request, settings)
    except _LeaveUpstream:
        pass
    finally:
        for hook in hooks:
            hook.remove()
    return torch.stack(frames) if frames else torch.empty(0, NUM_CODEBOOKS, dtype=torch.int64)


def prompt_embeds(model: Any, request: Request) -> tuple[Tensor, Tensor, Tensor]:
    """What upstream hands its talker: prompt (L, H), trailing text rows (N, H), padding row (H,), model dtype."""
    talker = model.model.talker

    def capture(**arguments: Any) -> None:
        raise _LeaveUpstream(arguments)

    talker.generate = capture
    try:
        with _quiet():
            _call(model, request, {})
    except _LeaveUpstream as left:
        given = left.args[0]
        return given["inputs_embeds"][0], given["trailing_text_hidden"][0], given["tts_pad_embed"][0, 0]
    finally:
        del talker.generate
    raise MkttsError("qwen-tts did not reach its talker: this version is not 0.1.1")


def decode_codes(model: Any, codes: Tensor, reference: Tensor | None = None) -> np.ndarray:
    """Upstream's codec on `codes` (T, 16), behind those of `reference` (R, 16): PCM (T * 1920,) float32."""
    whole = codes if reference is None else torch.cat([reference.to(codes.device), codes])
    waves, rate_hz = model.model.speech_tokenizer.decode([{"audio_codes": whole}])
    assert rate_hz == SAMPLE_RATE_HZ
    start = 0 if reference is None else int(len(reference) / len(whole) * len(waves[0]))
    return waves[0][start:]


def clone_prompt(voice: Voice) -> Any:
    """`voice` as a qwen_tts.VoiceClonePromptItem."""
    return import_upstream().VoiceClonePromptItem(
        ref_code=voice.codes,
        ref_spk_embedding=voice.embedding,
        x_vector_only_mode=voice.codes is None,
        icl_mode=voice.codes is not None,
        ref_text=voice.transcript and voice.transcript.strip(),  # as our prompt builder does
    )


def _call(model: Any, request: Request, settings: dict[str, Any]) -> None:
    """Runs the wrapper method of the checkpoint's type. Text is stripped as our prompt builder does."""
    common: dict[str, Any] = {"text": request.text.strip(), "language": request.language, **settings}
    if request.layout is not None:
        common["non_streaming_mode"] = request.layout == "whole"
    kind = MODEL_TYPES[model.model.tts_model_type]
    if kind.speakers:
        common["speaker"] = request.speaker
    if kind.instruct_sizes:
        common["instruct"] = request.instruct
    if kind.clones:
        if request.voice is None:
            raise PromptError("a Base checkpoint needs a voice (clone_voice or Voice.load); Request.voice is None")
        common["voice_clone_prompt"] = [clone_prompt(request.voice)]
    try:
        getattr(model, kind.upstream_method)(**common)
    except MkttsError:
        raise
    except (ValueError, NotImplementedError) as error:
        raise PromptError(f"qwen-tts refuses this request: {error}") from error


@contextlib.contextmanager
def _no_codec(model: Any) -> Iterator[None]:
    """Takes the codec away, in which the wrapper methods end: here only the codes are wanted."""
    codec = model.model.speech_tokenizer
    silent = types.SimpleNamespace(decode=lambda items: ([np.zeros(0, np.float32) for _ in items], SAMPLE_RATE_HZ))
    model.model.speech_tokenizer = silent
    try:
        yield
    finally:
        model.model.speech_tokenizer = codec


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    """Holds back transformers' per-call advice (padding id, unused flags, the Mistral regex) while upstream runs."""
    logger = logging.getLogger("transformers")
    level = logger.level
    logger.setLevel(logging.ERROR)
    try:
        yield
    finally:
        logger.setLevel(level)


@dataclass(eq=False)
class UpstreamPrompt:
    """A request as qwen-tts takes it, with the interface of a prompt. Text that is fed is collected, since qwen-tts
    begins with the whole of it. Its rows are qwen-tts's own: here one stands for all of them."""

    request: Request
    tokenizer: TextTokenizer
    text_ended: bool = True
    embeds, prefix_rows, prefix_key = torch.zeros(1, 0), 0, None

    @property
    def ready(self) -> bool:
        return self.text_ended

    @cached_property
    def text_tokens(self) -> int:
        return len(self.tokenizer.encode(self.request.text))

    def push(self, text: str) -> None:
        self.request = replace(self.request, text=self.request.text + text)

    def close(self) -> None:
        self.text_ended = True

    def row(self, frame: int) -> Tensor:
        return self.embeds[0]


class UpstreamLanes(OneLane):
    """See `mktts.engine.lanes.Lanes`: qwen-tts (a qwen_tts.Qwen3TTSModel) makes a whole segment in its first tick, and
    the ticks that follow hand its frames on. All generation time shows as talker_ms."""

    name = "upstream"

    def __init__(self, upstream: Any, positions: int) -> None:
        self.upstream, self.positions = upstream, positions
        self._segments: dict[int, Segment] = {}
        self._frames: dict[int, deque[Tensor]] = defaultdict(deque)  # made, but not handed on yet
        self._pcm: dict[int, np.ndarray] = defaultdict(partial(np.zeros, 0, np.float32))  # not in chunks yet

    def forget(self, voice: Voice) -> None:
        """Nothing is kept here."""

    def begin(self, slot: int, segment: Segment, anew: bool = True) -> None:
        """Keeps the segment; qwen-tts hears its reference itself."""
        if anew:
            self.leave(slot)
        self._segments[slot] = segment

    def leave(self, slot: int) -> None:
        for of_slots in (self._segments, self._frames, self._pcm):
            of_slots.pop(slot, None)

    def launch(self, tick: Tick, rows: Sequence[Tensor | None]) -> Made:
        slot = int(tick.lanes[0])
        begun_s = time.perf_counter()
        if tick.new_lanes:
            self._generate(slot, self._segments[slot])
        frames = self._frames[slot]
        ended = not frames
        codes = np.zeros(NUM_CODEBOOKS, np.int64) if ended else frames.popleft().numpy()
        return Made(codes[None], np.array([ended]), None, max(time.perf_counter() - begun_s, 1e-9))

    def submit(self, slot: int, frames: list[Any]) -> PendingPcm:
        samples = len(frames) * SAMPLES_PER_FRAME
        pcm, self._pcm[slot] = self._pcm[slot][:samples], self._pcm[slot][samples:]
        return PendingPcm(torch.from_numpy(pcm))

    def _generate(self, slot: int, segment: Segment) -> None:
        stream, request = segment.stream, segment.prompt.request
        guard = GuardState(stream.plan.options.guard, segment.max_frames)
        limit: FinishReason | None = None

        def on_frame(codes: Tensor) -> None:
            nonlocal limit
            limit = guard.count(codes, segment.prompt.text_tokens)

        codes = generate_codes(
            self.upstream,
            request,
            segment.sampling,
            segment.seed,
            segment.max_frames,
            cancelled=lambda: stream.cancelled or limit is not None,
            on_frame=on_frame,
        )
        if stream.cancelled or not len(codes):
            return
        reference = None if request.voice is None else request.voice.codes
        pcm = decode_codes(self.upstream, codes, reference)
        self._pcm[slot] = np.concatenate((self._pcm[slot], pcm.astype(np.float32)))
        self._frames[slot].extend(codes)
