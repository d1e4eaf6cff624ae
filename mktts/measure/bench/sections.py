"""The sections of `python -m mktts bench --peers`: each runs as a program of its own,
`python -m mktts.measure.bench.sections SECTION JSON`, with the BenchSettings as JSON.

A section loads what it measures, warms it up, and prints one line of JSON a figure as soon as it is known, so that
what it measured stays when it fails later. The names are defined in mktts.measure.metrics.
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable
from typing import TYPE_CHECKING

import torch

from mktts.checkpoint import Checkpoint, open_checkpoint
from mktts.measure.bench.codec import codec_ms
from mktts.measure.bench.frames import STEADY_FRAMES, kernel_frames, steady_frame_ms, timed_frames
from mktts.measure.bench.peer_sections import faster, upstream
from mktts.measure.bench.settings import BenchSettings, emit, note, request_of, sentence_of
from mktts.model.backend import Frame
from mktts.model.prompt import PromptBuilder, Request
from mktts.speech.metrics import summarise

if TYPE_CHECKING:
    from mktts.speech.options import Chunk
    from mktts.synth.one_by_one import StepModel


def _model(checkpoint: Checkpoint, settings: BenchSettings) -> tuple[Checkpoint, StepModel]:
    from mktts.synth.loading import step_model

    return checkpoint, step_model(settings.backend, checkpoint, torch.device(settings.device), settings.dtype)


def _frames_of(checkpoint: Checkpoint, model: StepModel, settings: BenchSettings) -> list[tuple[float, Frame]]:
    prompt = model.prompts.build(request_of(checkpoint, settings))
    return list(timed_frames(model.backend, prompt, checkpoint.sampling(), settings))


def _streams(checkpoint: Checkpoint, model: StepModel, settings: BenchSettings, suffix: str = "") -> None:
    """First PCM, frame with codec and RTF through the synthesizer, as its user has them."""
    from mktts.speech.guard import Guard
    from mktts.speech.options import StreamOptions
    from mktts.synth import Synthesizer

    short, sentence = request_of(checkpoint, settings), sentence_of(checkpoint)
    options = StreamOptions(guard=Guard.off())  # random weights never end; the frame count does

    def run(synthesizer: Synthesizer, request: Request, seed: int, frames: int) -> list[Chunk]:
        said = {"speaker": request.speaker, "layout": request.layout, "seed": seed}
        return list(synthesizer.stream(request.text, **said, max_frames=frames, options=options))

    with Synthesizer(model, checkpoint.sampling(), checkpoint, settings.device, settings.dtype) as synthesizer:
        synthesizer.warm_up()
        run(synthesizer, short, 0, settings.frames)
        for name, request in (("ttfc", short), ("ttfc_sentence", sentence)):
            run(synthesizer, request, 0, 2)
            first = [summarise(run(synthesizer, request, seed, 2)) for seed in range(settings.samples // 2)]
            emit(f"{name}{suffix}_ms", [metrics.ttfc_ms for metrics in first], "ms")
        spoken = [run(synthesizer, short, seed, settings.frames) for seed in range(settings.utterances)]
        whole = [summarise(chunks) for chunks in spoken]
        emit(f"rtf{suffix}", [metrics.rtf for metrics in whole], "compute s / audio s")
        emit(f"utterance{suffix}_s", [metrics.audio_s for metrics in whole], "s of audio")
        emit(f"underruns{suffix}", [metrics.underruns for metrics in whole], "count")
        arrived = [[(chunk.frames, chunk.timings.ready_ms) for chunk in chunks] for chunks in spoken]
        steady_ms = [ms for chunks in arrived for ms in steady_frame_ms(chunks)]
        emit(f"frame_with_codec{suffix}_ms", steady_ms, f"ms, chunks of {STEADY_FRAMES} frames")


# ---- sections


def prepare(settings: BenchSettings) -> None:
    """Makes the random checkpoints that are not in the cache yet, which may take longer than what is measured."""
    from mktts.measure.checkpoint_maker import CheckpointMaker

    speech, text = (settings.checkpoint, settings.large), (settings.text_model,)
    maker = CheckpointMaker(speech, text)
    for kind, sources in (("speech", speech), ("text", text)):
        for source in sources:
            maker.wait(source, kind)


def ours(settings: BenchSettings) -> None:
    """Frame, its two parts, frame with codec, first PCM of a few words and of a sentence, and RTF."""
    checkpoint, model = _model(open_checkpoint(settings.checkpoint, settings.revision), settings)
    request = request_of(checkpoint, settings)
    note(backend=model.backend.name, text=request.text, speaker=request.speaker, random_weights=checkpoint.is_random)
    sentence = sentence_of(checkpoint).text
    note(sentence=sentence, sentence_tokens=len(checkpoint.tokenizer().encode(sentence)))
    frames = _frames_of(checkpoint, model, settings)
    emit("frame_ms", [elapsed_ms for elapsed_ms, _ in frames], "ms")
    split = [frame for _, frame in frames]
    if model.backend.name == "megakernel":
        split = list(kernel_frames(model, model.prompts.build(request), checkpoint.sampling(), settings))
    emit("talker_step_ms", [frame.talker_ms for frame in split], "ms")
    emit("predictor_ms", [frame.predictor_ms for frame in split], "ms")
    _streams(checkpoint, model, settings)


def large(settings: BenchSettings) -> None:
    """Frame, frame with codec, first PCM and RTF of the large checkpoint."""
    checkpoint, model = _model(open_checkpoint(settings.large), settings)
    emit("frame_1p7b_ms", [elapsed_ms for elapsed_ms, _ in _frames_of(checkpoint, model, settings)], "ms")
    _streams(checkpoint, model, settings, "_1p7b")


def codec(settings: BenchSettings) -> None:
    """Chunks of 1 to 8 frames, codes on the host to PCM on the host, by the decoder the synthesizer uses."""
    _, model = _model(open_checkpoint(settings.checkpoint, settings.revision), settings)
    note(codec_variant=model.codec.name)
    for name, times_ms in codec_ms(model.codec, settings.samples).items():
        emit(name, times_ms, "ms")


def overlap(settings: BenchSettings) -> None:
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


def memory(settings: BenchSettings) -> None:
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


def text(settings: BenchSettings) -> None:
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


def graph(settings: BenchSettings) -> None:
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


SECTIONS: dict[str, Callable[[BenchSettings], None]] = {
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


if __name__ == "__main__":
    SECTIONS[sys.argv[1]](BenchSettings(**json.loads(sys.argv[2])))
