"""The sections of `python -m mktts bench --peers`, each a program of its own: `python -m
mktts.measure.bench.sections SECTION JSON`.

A section loads what it measures, warms it up, and prints one line of JSON a figure as soon as it is known, so that
what it measured stays when it fails later. The names are defined in mktts.measure.metrics.
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

import torch

from mktts.checkpoint import Checkpoint, open_checkpoint
from mktts.errors import MetricsError
from mktts.measure.metrics import percentiles
from mktts.model.backend import Backend, Frame
from mktts.model.prompt import Prompt, PromptBuilder, Request
from mktts.model.sampling import Sampling
from mktts.spec import CODEBOOK_SIZE, FRAME_RATE_HZ, NUM_CODEBOOKS
from mktts.speech.metrics import summarise

if TYPE_CHECKING:
    from mktts.synth.generation import StepModel

WORDS = "The quick brown fox jumps over the lazy dog and then it runs home to sleep for the rest of a long day"
CODEC_CHUNKS_FRAMES = (1, 2, 4, 8)
CODEC_WARM_UP_FRAMES = 96  # past the codec's attention window, so that every timed call does full work
_SEEDS = 50  # streams that random weights may end early before a section gives up


@dataclass(frozen=True)
class Settings:
    """What all sections measure alike.

    frames: of one utterance (RTF). context, around: frames are timed at positions [context - around, context + around).
    samples: timed frames, chunks or first chunks of one figure. peer_utterances: of upstream, which takes its time.
    """

    checkpoint: str = "random:0.6b"
    revision: str | None = None  # of the checkpoint, where it is a Hub id
    large: str = "random:1.7b"
    text_model: str = "random:0.6b"
    backend: str = "auto"
    device: str = "cuda"
    prompt_tokens: int = 12
    frames: int = round(10 * FRAME_RATE_HZ)
    context: int = 200
    around: int = 50
    samples: int = 200
    utterances: int = 10
    peer_utterances: int = 2
    open_streams: int = 4
    open_frames: int = 2_000

    @property
    def dtype(self) -> torch.dtype:
        return torch.bfloat16 if self.device.startswith("cuda") else torch.float32


def emit(name: str, values: Sequence[float], unit: str) -> None:
    """Prints the figure `name`."""
    print(json.dumps({"figures": {name: {**percentiles(values), "unit": unit}}}), flush=True)


def note(**facts: Any) -> None:
    """Prints facts that belong to the settings of the document."""
    print(json.dumps({"notes": facts}), flush=True)


def text_of(tokens: int, encode: Callable[[str], list[int]]) -> str:
    """A text of exactly `tokens` tokens: words, and letters of the next word where words alone miss the number."""
    words = WORDS.split()
    whole = [" ".join(words[:count]) for count in range(1, len(words) + 1)]
    for text in (*whole, *(WORDS[:end].strip() for end in range(1, len(WORDS) + 1))):
        if len(encode(text)) == tokens:
            return text
    raise MetricsError(
        f"no beginning of the bench's text has {tokens} tokens with this tokenizer: change prompt_tokens"
    )


def request_of(checkpoint: Checkpoint, settings: Settings) -> Request:
    """The prompt of every section: streaming layout, the checkpoint's first speaker."""
    speaker = next(iter(checkpoint.config.speakers), None)
    text = text_of(settings.prompt_tokens, checkpoint.tokenizer().encode)
    return Request(text, "auto", speaker, layout="streaming")


# ---- frames of a backend


def timed_frames(
    backend: Backend, prompt: Prompt, sampling: Sampling, settings: Settings
) -> Iterator[tuple[float, Frame]]:
    """`samples` frames around the context: wall ms of `step`, codes on the host, and the frame."""
    left = settings.samples
    last = settings.context + settings.around
    for seed in range(_SEEDS):
        state = backend.start(prompt, sampling, seed, last + 1 - len(prompt.embeds))
        for position in range(len(prompt.embeds) - 1, last):  # of the talker's input of the frame
            row = prompt.row(position - len(prompt.embeds)) if position >= len(prompt.embeds) else None
            begun_s = time.perf_counter()
            frame = backend.step(state, row)
            elapsed_ms = 1e3 * (time.perf_counter() - begun_s)
            if frame.codes is None:
                break
            if position >= settings.context - settings.around and seed > 0 and row is not None:  # seed 0 warms up
                yield elapsed_ms, frame
                left -= 1
                if left == 0:
                    return
    raise MetricsError(f"{_SEEDS} streams ended before {settings.samples} frames at context {settings.context}")


def kernel_frames(model: StepModel, prompt: Prompt, sampling: Sampling, settings: Settings) -> Iterator[Frame]:
    """`samples` frames around the context, several a launch and without the first: times of the kernel alone."""
    from mktts.kernel.backend import MAX_FRAMES_A_LAUNCH

    rows, left = len(prompt.embeds), settings.samples
    for seed in range(_SEEDS):
        state, made = model.backend.start(prompt, sampling, seed, settings.context + settings.around), 0
        while rows + made + MAX_FRAMES_A_LAUNCH < settings.context + settings.around:
            text = [prompt.row(t - 1) if t else None for t in range(made, made + MAX_FRAMES_A_LAUNCH)]
            frames = [frame for frame in model.backend.frames(state, text) if frame.codes is not None]
            if seed and rows + made > settings.context - settings.around:
                for frame in frames[1 : 1 + left]:
                    left -= 1
                    yield frame
            made += len(frames)
            if left == 0:
                return
            if len(frames) < len(text):
                break
    raise MetricsError(f"{_SEEDS} streams ended before {settings.samples} frames at context {settings.context}")


def _model(checkpoint: Checkpoint, settings: Settings) -> tuple[Checkpoint, StepModel]:
    from mktts.synth.synthesizer import _step_model

    return checkpoint, _step_model(settings.backend, checkpoint, torch.device(settings.device), settings.dtype)


def _frames_of(checkpoint: Checkpoint, model: StepModel, settings: Settings) -> list[tuple[float, Frame]]:
    prompt = model.prompts.build(request_of(checkpoint, settings))
    return list(timed_frames(model.backend, prompt, checkpoint.sampling(), settings))


def _streams(checkpoint: Checkpoint, model: StepModel, settings: Settings, suffix: str = "") -> None:
    """TTFC and RTF through the synthesizer, as its user has them."""
    from mktts.speech.guard import Guard
    from mktts.speech.options import StreamOptions
    from mktts.synth import Synthesizer

    request = request_of(checkpoint, settings)
    options = StreamOptions(guard=Guard.off())  # random weights never end; the frame count does

    def run(synthesizer: Synthesizer, seed: int, frames: int):
        said = {"speaker": request.speaker, "layout": request.layout, "seed": seed}
        return summarise(list(synthesizer.stream(request.text, **said, max_frames=frames, options=options)))

    with Synthesizer(model, checkpoint.sampling(), checkpoint, settings.device, settings.dtype) as synthesizer:
        synthesizer.warm_up()
        run(synthesizer, 0, settings.frames)
        first = [run(synthesizer, seed, 2) for seed in range(settings.samples // 2)]
        emit(f"ttfc{suffix}_ms", [metrics.ttfc_ms for metrics in first], "ms")
        whole = [run(synthesizer, seed, settings.frames) for seed in range(settings.utterances)]
        emit(f"rtf{suffix}", [metrics.rtf for metrics in whole], "compute s / audio s")
        emit(f"utterance{suffix}_s", [metrics.audio_s for metrics in whole], "s of audio")
        emit(f"underruns{suffix}", [metrics.underruns for metrics in whole], "count")


# ---- sections


def prepare(settings: Settings) -> None:
    """Makes the random checkpoints that are not in the cache yet, which may take longer than what is measured."""
    from mktts.measure.checkpoint_maker import CheckpointMaker

    speech, text = (settings.checkpoint, settings.large), (settings.text_model,)
    maker = CheckpointMaker(speech, text)
    for kind, sources in (("speech", speech), ("text", text)):
        for source in sources:
            maker.wait(source, kind)


def ours(settings: Settings) -> None:
    """Frame, its two parts, first PCM and RTF of the checkpoint."""
    checkpoint, model = _model(open_checkpoint(settings.checkpoint, settings.revision), settings)
    request = request_of(checkpoint, settings)
    note(backend=model.backend.name, text=request.text, speaker=request.speaker, random_weights=checkpoint.is_random)
    frames = _frames_of(checkpoint, model, settings)
    emit("frame_ms", [elapsed_ms for elapsed_ms, _ in frames], "ms")
    split = [frame for _, frame in frames]
    if model.backend.name == "megakernel":
        split = list(kernel_frames(model, model.prompts.build(request), checkpoint.sampling(), settings))
    emit("talker_step_ms", [frame.talker_ms for frame in split], "ms")
    emit("predictor_ms", [frame.predictor_ms for frame in split], "ms")
    _streams(checkpoint, model, settings)


def large(settings: Settings) -> None:
    """Frame, first PCM and RTF of the large checkpoint."""
    checkpoint, model = _model(open_checkpoint(settings.large), settings)
    emit("frame_1p7b_ms", [elapsed_ms for elapsed_ms, _ in _frames_of(checkpoint, model, settings)], "ms")
    _streams(checkpoint, model, settings, "_1p7b")


def codec(settings: Settings) -> None:
    """Chunks of 1 to 8 frames, codes on the host to PCM on the host, by the decoder the synthesizer uses."""
    from mktts.codec.graphs import CUDA_VARIANT

    checkpoint, model = _model(open_checkpoint(settings.checkpoint, settings.revision), settings)
    decoder = model.codec
    note(codec_variant=CUDA_VARIANT if settings.device.startswith("cuda") else "fp32")
    size = min(CODEBOOK_SIZE, checkpoint.codec_config.codebook_size)
    codes = torch.randint(size, (CODEC_WARM_UP_FRAMES, NUM_CODEBOOKS), generator=torch.Generator().manual_seed(0))
    for frames in CODEC_CHUNKS_FRAMES:
        state, times_ms = decoder.start(), []
        for start in range(0, CODEC_WARM_UP_FRAMES, frames):
            decoder.submit(codes[start : start + frames], state).result()
        for _ in range(settings.samples):
            begun_s = time.perf_counter()
            decoder.submit(codes[:frames], state).result()
            times_ms.append(1e3 * (time.perf_counter() - begun_s))
        emit(f"codec_{frames}_ms", times_ms, "ms")


def overlap(settings: Settings) -> None:
    """A chunk of 8 frames and its PCM, the codec's wait before the next frames are launched, and after."""
    checkpoint, model = _model(open_checkpoint(settings.checkpoint, settings.revision), settings)
    prompt = model.prompts.build(request_of(checkpoint, settings))
    size, chunks = 8, 24
    for name, overlapped in (("chunk_8_serial_ms", False), ("chunk_8_overlapped_ms", True)):
        state = model.backend.start(prompt, checkpoint.sampling(), 1, size * chunks)
        codec_state, pending, begun_s = model.codec.start(), None, []
        for chunk in range(chunks):
            begun_s.append(time.perf_counter())
            text = [prompt.row(t - 1) if t else None for t in range(chunk * size, (chunk + 1) * size)]
            frames = model.backend.frames(state, text)
            codes = [next(frames).codes]  # launched, and its first frame here
            if pending is not None:
                pending.result()
            codes += [frame.codes for frame in frames]
            pending = model.codec.submit(torch.stack([c for c in codes if c is not None]), codec_state)
            if not overlapped:
                pending.result()
        spent_ms = [1e3 * (b - a) for a, b in zip(begun_s, begun_s[1:], strict=False)]
        emit(name, spent_ms[4:], "ms for 8 frames and their PCM")


def memory(settings: Settings) -> None:
    """Device memory of a process that has several long streams open and has worked on all of them."""
    from mktts.synth import Synthesizer

    checkpoint, model = _model(open_checkpoint(settings.checkpoint, settings.revision), settings)
    prompt = model.prompts.build(request_of(checkpoint, settings))
    with Synthesizer(model, checkpoint.sampling(), checkpoint, settings.device, settings.dtype) as synthesizer:
        synthesizer.warm_up()
    streams = [
        (model.backend.start(prompt, checkpoint.sampling(), seed, settings.open_frames), model.codec.start())
        for seed in range(settings.open_streams)
    ]
    for state, codec_state in streams:
        codes = []
        for index in range(16):
            frame = model.backend.step(state, prompt.row(index - 1) if index else None)
            if frame.codes is None:
                break
            codes.append(frame.codes)
        model.codec.submit(torch.stack(codes), codec_state).result()
    mib = 2**20
    free, total = torch.cuda.mem_get_info()
    emit("peak_gpu_mb", [(total - free) / mib], "MiB in use on the device, driver and context included")
    emit("peak_gpu_torch_mb", [torch.cuda.max_memory_allocated() / mib], "MiB of tensors")
    emit("reserved_gpu_torch_mb", [torch.cuda.max_memory_reserved() / mib], "MiB that torch holds")


def text(settings: Settings) -> None:
    """Text tokens a second at the context: one token a launch, and several."""
    from mktts.llm.decoder import TextDecoder

    window = 10  # tokens of one rate, since several may come at once
    tokens = max(2 * settings.around, 3 * window)
    with TextDecoder.load(settings.text_model, backend=settings.backend, device=settings.device) as decoder:
        note(text_backend=decoder.backend_name)
        ids = torch.randint(
            1_000, (settings.context - settings.around,), generator=torch.Generator().manual_seed(0)
        ).tolist()
        for name, together in (("text_tok_s", 1), ("text_tok_s_ten_a_step", window)):
            rates: list[float] = []
            for seed in range(1 + max(1, settings.samples // tokens)):  # the first one warms up
                made = decoder.generate(ids, seed=seed, max_tokens=tokens, stop_at_eos=False, tokens_per_step=together)
                ready_ms = [token.ready_ms for token in made][window - 1 :: window]
                if seed:
                    rates += [1e3 * window / (b - a) for a, b in zip(ready_ms, ready_ms[1:], strict=False)]
            emit(name, rates, "tokens / s")


def graph(settings: Settings) -> None:
    """Our oracle's frame as CUDA graphs of PyTorch operators."""
    from mktts.measure.bench.graph_oracle import GraphOracle
    from mktts.model.oracle import TorchBackend

    checkpoint = open_checkpoint(settings.checkpoint, settings.revision)
    config, tensors = checkpoint.config, checkpoint.tensors()
    builder = PromptBuilder(config, tensors, checkpoint.tokenizer(), settings.device, settings.dtype)
    oracle = TorchBackend(config, tensors, settings.device, settings.dtype)
    positions = 2 * (settings.context + settings.around)
    prompt = builder.build(request_of(checkpoint, settings))
    backend = GraphOracle(oracle, positions)
    frames = list(timed_frames(backend, prompt, checkpoint.sampling(), settings))
    note(graph_positions=positions)
    emit("graph_frame_ms", [elapsed_ms for elapsed_ms, _ in frames], "ms")
    emit("graph_talker_step_ms", [frame.talker_ms for _, frame in frames], "ms")
    emit("graph_predictor_ms", [frame.predictor_ms for _, frame in frames], "ms")


def _at_context(frame_ms: Sequence[tuple[int, float]], settings: Settings) -> list[float]:
    near = [ms for position, ms in frame_ms if abs(position - settings.context) <= settings.around]
    if not near:
        raise MetricsError(f"the peer's utterance ended before context {settings.context - settings.around}")
    return near


def upstream(settings: Settings) -> None:
    """qwen-tts: a frame at the context, and RTF of a whole utterance."""
    from mktts.measure.bench.peers import UpstreamPeer

    checkpoint = open_checkpoint(settings.checkpoint, settings.revision)
    request, sampling = request_of(checkpoint, settings), checkpoint.sampling()
    peer = UpstreamPeer(checkpoint.folder, settings.device, settings.dtype)
    peer.utterance(request, sampling, 0, 8)
    runs = [peer.utterance(request, sampling, seed, settings.frames) for seed in range(settings.peer_utterances)]
    emit("upstream_rtf", [run.rtf for run in runs], "compute s / audio s")
    emit("upstream_first_pcm_ms", [run.first_pcm_ms for run in runs], "ms; the whole utterance: it does not stream")
    long = peer.frames(request, sampling, 0, settings.context + settings.around)
    emit("upstream_frame_ms", _at_context(long.frame_ms, settings), "ms")


def faster(settings: Settings) -> None:
    """faster-qwen3-tts: first PCM at a chunk of 1 frame, a frame at the context, and RTF at its default and at 1, 8."""
    from mktts.measure.bench.peers import FasterPeer

    checkpoint = open_checkpoint(settings.checkpoint, settings.revision)
    request, sampling = request_of(checkpoint, settings), checkpoint.sampling()
    peer = FasterPeer(checkpoint.folder, settings.device, settings.dtype)
    for chunk in (1, 8, 12):
        peer.stream(request, sampling, 0, 26, chunk)  # captures its graphs; chunks of every length it will decode
    first = [peer.stream(request, sampling, seed, 1, 1) for seed in range(settings.samples // 10)]
    emit("faster_ttfc_ms", [run.first_pcm_ms for run in first], "ms, chunk of 1 frame")
    for name, chunk in (("faster_rtf", 12), ("faster_rtf_chunk_8", 8), ("faster_rtf_chunk_1", 1)):
        runs = [
            peer.stream(request, sampling, seed, settings.frames, chunk) for seed in range(settings.peer_utterances)
        ]
        emit(name, [run.rtf for run in runs], f"compute s / audio s, chunks of {chunk}")
    long = peer.stream(request, sampling, 0, settings.context + settings.around, 12)
    emit("faster_frame_ms", _at_context(long.frame_ms, settings), "ms, mean of 12 frames, codec left out")


SECTIONS: dict[str, Callable[[Settings], None]] = {
    "prepare": prepare,
    "ours": ours,
    "codec": codec,
    "overlap": overlap,
    "graph": graph,
    "memory": memory,
    "text": text,
    "large": large,
    "faster": faster,
    "upstream": upstream,
}


def command(section: str, settings: Settings) -> list[str]:
    """The program that measures `section`."""
    return [sys.executable, "-m", "mktts.measure.bench.sections", section, json.dumps(asdict(settings))]


if __name__ == "__main__":
    SECTIONS[sys.argv[1]](Settings(**json.loads(sys.argv[2])))
