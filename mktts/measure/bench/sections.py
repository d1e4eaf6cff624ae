"""The sections of `python -m mktts bench`, each run in its own process (`mktts.measure.bench.command`).

A section loads what it measures, warms it up, and yields figures as (name, values, unit), and notes for the document's
settings as dicts. mktts.measure.metrics defines the names.

`faster` and `upstream` are other implementations, used as their users would: they read the same checkpoint folder and
get the prompt of the same `Request`. A missing or incompatible package raises BackendUnavailable with the reason."""

import importlib
import itertools
import json
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from importlib.resources import files
from typing import Any

import torch

from mktts.checkpoint import Checkpoint, open_checkpoint
from mktts.codec.graphs import codec_for
from mktts.engine.admission import Admission
from mktts.engine.metrics import summarise
from mktts.engine.options import Chunk, Guard, StreamOptions
from mktts.engine.upstream import decode_codes, generate_codes, install_shim, load_upstream
from mktts.errors import BackendUnavailable, MetricsError
from mktts.kernel.backend import MAX_FRAMES_A_LAUNCH
from mktts.llm.decoder import TextDecoder
from mktts.measure.environment import provided_by
from mktts.measure.parity.codec import random_codes
from mktts.measure.recogniser import Aligner
from mktts.measure.recogniser import words as words_said
from mktts.model.backend import Frame, default_dtype
from mktts.model.prompt import Prompt, PromptBuilder, Request
from mktts.model.sampling import Sampling
from mktts.spec import CODEBOOK_SIZE, FRAME_MS, FRAME_RATE_HZ, SAMPLE_RATE_HZ
from mktts.synth import Synthesizer
from mktts.synth.loading import single_runner

WORDS = "The quick brown fox jumps over the lazy dog and then it runs home to sleep for the rest of a long day"
SENTENCE = "The quick brown fox jumps over the lazy dog while a farmer watches from home."  # 15 words
STEADY_FRAMES = 8  # frames per chunk of a running stream: the last entry of the default schedule
_MARGIN = 5  # extra tokens of text, within which some prefix has exactly the wanted number
_SEEDS = 50  # streams to try before a section gives up, as random weights may end some early
_CODEC_WARM_UP_FRAMES = 96  # beyond the codec's attention window, so that every timed call does full work
_TOKENS = 10  # tokens per sample of the rate

Measured = Iterator[tuple[str, Sequence[float], str] | dict[str, Any]]


@dataclass(frozen=True)
class ModelSettings:
    """The measured model and device, as for Synthesizer.load, with the dtype as a name."""

    checkpoint: str = "random:0.6b"
    revision: str | None = None
    backend: str = "auto"
    device: str = "auto"
    dtype: str | None = None

    def open(self) -> Checkpoint:
        return open_checkpoint(self.checkpoint, self.revision)

    def loading(self) -> dict[str, Any]:
        """Arguments of Synthesizer.load."""
        dtype = getattr(torch, self.dtype) if self.dtype else None
        return {"backend": self.backend, "device": self.device, "dtype": dtype}


@dataclass(frozen=True)
class BenchSettings(ModelSettings):
    """The settings that all sections share.

    large, text_model: checkpoints of the sections `large` and `text`
    prompt_tokens: tokens of the short text
    frames: frames per utterance
    context, around: frames are timed at positions [context - around, context + around)
    samples: timed frames, chunks or first chunks per figure
    utterances, peer_utterances: whole utterances per figure"""

    device: str = "cuda"
    large: str = "random:1.7b"
    text_model: str = "random:0.6b"
    prompt_tokens: int = 12
    frames: int = round(10 * FRAME_RATE_HZ)
    context: int = 200
    around: int = 50
    samples: int = 200
    utterances: int = 10
    peer_utterances: int = 2

    @property
    def torch_dtype(self) -> torch.dtype:
        return self.loading()["dtype"] or default_dtype(torch.device(self.device))

    @property
    def last(self) -> int:
        """The end of the range of positions at which frames are timed."""
        return self.context + self.around


def text_of(tokens: int, encode: Callable[[str], list[int]]) -> str:
    """A prefix of the bench's words with `tokens` tokens, or with the next larger number that some prefix has."""
    words, text = itertools.cycle(WORDS.split()), ""
    while len(encode(text)) < tokens + _MARGIN:
        text += f"{next(words)} "
    beginnings = (text[:end].rstrip() for end in range(len(text)))  # may end within a word
    counts = {piece: count for piece in beginnings if (count := len(encode(piece))) >= tokens}
    return min(counts, key=lambda piece: (counts[piece], len(piece)))


def request_of(checkpoint: Checkpoint, settings: BenchSettings) -> Request:
    """The short prompt of every section: streaming layout, the checkpoint's first speaker."""
    text = text_of(settings.prompt_tokens, checkpoint.tokenizer().encode)
    return Request(text, "auto", checkpoint.config.default_speaker, layout="streaming")


def steady_frame_ms(chunks: Sequence[tuple[int, float]]) -> list[float]:
    """Milliseconds per frame with its codec: the time between each two consecutive chunks of STEADY_FRAMES, divided by
    the frames. chunks: (frames, ms from the call to its PCM on the host), in order."""
    pairs = zip(chunks, chunks[1:], strict=False)
    return [(ready - before) / size for (last, before), (size, ready) in pairs if last == size == STEADY_FRAMES]


# ---- sections


def streams(settings: BenchSettings) -> Measured:
    """First PCM of a few words and of a sentence, frame with codec and RTF, through the synthesizer."""
    checkpoint = settings.open()
    short = request_of(checkpoint, settings)
    sentence = replace(short, text=SENTENCE, layout=None)  # as a user would: in the checkpoint's own layout
    options = StreamOptions(guard=Guard.off())  # random weights never stop, so max_frames ends the stream

    def run(request: Request, seed: int, frames: int) -> list[Chunk]:
        said = {"speaker": request.speaker, "layout": request.layout, "seed": seed}
        return list(synthesizer.stream(request.text, **said, max_frames=frames, options=options))

    with Synthesizer.load(checkpoint, engine="single", **settings.loading()) as synthesizer:
        synthesizer.warm_up()
        yield {"backend": synthesizer.backend_name, "text": short.text, "sentence": SENTENCE}
        run(short, 0, settings.frames)
        for name, request in (("ttfc", short), ("ttfc_sentence", sentence)):
            run(request, 0, 2)
            first = [summarise(run(request, seed, 2)) for seed in range(settings.samples // 2)]
            yield f"{name}_ms", [metrics.ttfc_ms for metrics in first], "ms"
        spoken = [run(short, seed, settings.frames) for seed in range(settings.utterances)]
        whole = [summarise(chunks) for chunks in spoken]
        yield "rtf", [metrics.rtf for metrics in whole], "compute s / audio s"
        arrived = [[(chunk.frames, chunk.timings.ready_ms) for chunk in chunks] for chunks in spoken]
        if steady_ms := [ms for chunks in arrived for ms in steady_frame_ms(chunks)]:
            yield "frame_with_codec_ms", steady_ms, f"ms, chunks of {STEADY_FRAMES} frames"


def frames(settings: BenchSettings, suffix: str = "") -> Measured:
    """The time of a frame from codes to codes at the context, and of its two halves."""
    checkpoint, device = settings.open(), torch.device(settings.device)
    runner = single_runner(settings.backend, checkpoint, device, settings.torch_dtype, Admission())
    backend, prompt = runner.lanes.backend, runner.prompts.build(request_of(checkpoint, settings))
    timed = list(timed_frames(backend, prompt, checkpoint.sampling(), settings))
    yield f"frame{suffix}_ms", [elapsed_ms for elapsed_ms, _ in timed], "ms"
    if backend.name == "megakernel":
        timed = list(timed_frames(backend, prompt, checkpoint.sampling(), settings, MAX_FRAMES_A_LAUNCH))
    yield f"talker_step{suffix}_ms", [frame.talker_ms for _, frame in timed], "ms"
    yield f"predictor{suffix}_ms", [frame.predictor_ms for _, frame in timed], "ms"


def large(settings: BenchSettings) -> Measured:
    """The section `frames` for the large checkpoint."""
    return frames(replace(settings, checkpoint=settings.large, revision=None), "_1p7b")


def codec(settings: BenchSettings) -> Measured:
    """Decoding chunks of 1 and of 8 frames, codes on the host to PCM on the host, as the synthesizer does it."""
    checkpoint = settings.open()
    decoder = codec_for(checkpoint.codec_config, checkpoint.codec_tensors(), torch.device(settings.device))
    yield {"codec_variant": decoder.name}
    size = min(CODEBOOK_SIZE, decoder.config.codebook_size)
    codes = random_codes(_CODEC_WARM_UP_FRAMES, 0, size)
    for count in (1, STEADY_FRAMES):
        state, times_ms = decoder.start(), []
        for start in range(0, _CODEC_WARM_UP_FRAMES, count):
            decoder.submit(codes[start : start + count], state).result()
        for _ in range(settings.samples):
            begun_s = time.perf_counter()
            decoder.submit(codes[:count], state).result()
            times_ms.append(1e3 * (time.perf_counter() - begun_s))
        yield f"codec_{count}_ms", times_ms, "ms"


def text(settings: BenchSettings) -> Measured:
    """Tokens per second of the text model at the context."""
    tokens = max(2 * settings.around, 3 * _TOKENS)
    with TextDecoder.load(settings.text_model, backend=settings.backend, device=settings.device) as decoder:
        yield {"text_backend": decoder.backend_name}
        rows, draw = settings.context - settings.around, torch.Generator().manual_seed(0)
        ids = torch.randint(1_000, (rows,), generator=draw).tolist()
        rates: list[float] = []
        for seed in range(1 + max(1, settings.samples // tokens)):  # the first one warms up
            made = decoder.generate(ids, seed=seed, max_tokens=tokens, stop_at_eos=False)
            ready_ms = [token.ready_ms for token in made][_TOKENS - 1 :: _TOKENS]
            if seed:
                rates += [1e3 * _TOKENS / (b - a) for a, b in zip(ready_ms, ready_ms[1:], strict=False)]
        yield "text_tok_s", rates, "tokens / s"


# ---- single frames


def timed_frames(
    backend: Any, prompt: Prompt, sampling: Sampling, settings: BenchSettings, at_once: int = 1
) -> Iterator[tuple[float, Frame]]:
    """Yields `samples` frames around the context, each with the wall ms of its step or launch, to codes on the host.

    at_once: frames per launch; above 1 the first is left out, so that the frames' own times are the kernel's only."""
    left, rows, skipped = settings.samples, len(prompt.embeds), 1 if at_once > 1 else 0
    for seed in range(_SEEDS):
        state, made = backend.start(prompt, sampling, seed, settings.last + 1 - rows), 0
        while (position := rows - 1 + made) + at_once <= settings.last:  # position of the next frame's talker input
            asked = [prompt.row(t - 1) if t else None for t in range(made, made + at_once)]
            begun_s = time.perf_counter()
            found = list(backend.frames(state, asked)) if at_once > 1 else [backend.step(state, asked[0])]
            elapsed_ms = 1e3 * (time.perf_counter() - begun_s)
            found = [frame for frame in found if frame.codes is not None]
            if seed and made and position >= settings.context - settings.around:  # seed 0 warms up
                for frame in found[skipped : skipped + left]:
                    yield elapsed_ms, frame
                    left -= 1
            made += len(found)
            if left == 0:
                return
            if len(found) < at_once:
                break
    raise MetricsError(f"{_SEEDS} streams ended before {settings.samples} frames at context {settings.context}")


# ---- other implementations


def _at_context(checkpoint: Checkpoint, frame_ms: Sequence[tuple[int, float]], settings: BenchSettings) -> list[float]:
    """Selects from (frames so far, ms) the ms at positions around the context, counting the prompt."""
    builder = PromptBuilder(checkpoint.config, checkpoint.tensors(), checkpoint.tokenizer())
    rows = len(builder.build(request_of(checkpoint, settings)).embeds)
    near = [ms for made, ms in frame_ms if abs(rows + made - settings.context) <= settings.around]
    if not near:
        raise MetricsError(f"the peer's utterance ended before context {settings.context - settings.around}")
    return near


def faster(settings: BenchSettings) -> Measured:
    """faster-qwen3-tts with its own defaults (a static cache of 2 048 positions); CUDA only. First PCM with chunks of 1
    frame, a frame at the context by its own timing, and RTF with its default chunks and with chunks of 8.

    Chunks of 8 frames, the size of ours in a running stream, give the time of a frame with its codec."""
    install_shim()
    try:
        package = importlib.import_module("faster_qwen3_tts")
    except Exception as error:
        why = f"{type(error).__name__}: {error}"
        raise BackendUnavailable(f"the package faster_qwen3_tts is needed and cannot be imported: {why}") from error
    checkpoint = settings.open()
    folder, short, sampling = str(checkpoint.folder), request_of(checkpoint, settings), checkpoint.sampling()
    peer = package.FasterQwen3TTS.from_pretrained(folder, device=settings.device, dtype=settings.torch_dtype)
    processor = peer.model.processor
    # As for upstream: a local folder must not swap the tokenizer's pre-tokenizer (mktts.engine.upstream).
    processor.tokenizer = type(processor.tokenizer).from_pretrained(folder)
    yield {"faster_package": provided_by("faster_qwen3_tts")}

    def run(request: Request, seed: int, max_frames: int, chunk_frames: int) -> list[dict[str, float]]:
        """Its own figures of each chunk (frames, frames so far, time without the codec), and the time from the call to
        the chunk's PCM on the host."""
        torch.manual_seed(seed)
        chunks, begun_s = [], time.perf_counter()
        for pcm, rate_hz, timing in peer.generate_custom_voice_streaming(
            text=request.text.strip(),
            speaker=request.speaker,
            language=request.language,
            non_streaming_mode=request.layout != "streaming",  # None: whole, upstream's default for a custom voice
            max_new_tokens=max_frames,
            chunk_size=chunk_frames,
            repetition_penalty=sampling.repetition_penalty,
            **asdict(sampling.talker),  # its predictor's settings are fixed to the released ones
        ):
            ready_ms = 1e3 * (time.perf_counter() - begun_s)
            chunks.append({**timing, "ready_ms": ready_ms, "audio_s": len(pcm) / rate_hz})
        return chunks

    for chunk in (1, 8, 12):
        run(short, 0, 26, chunk)  # captures its graphs, and decodes chunks of every length that follows
    sentence = replace(short, text=SENTENCE, layout=None)
    for name, said in (("faster_ttfc_ms", short), ("faster_ttfc_sentence_ms", sentence)):
        run(said, 0, 1, 1)
        first = [run(said, seed, 1, 1)[0] for seed in range(settings.samples // 10)]
        yield name, [chunk["ready_ms"] for chunk in first], "ms, chunk of 1 frame"
    for name, size in (("faster_rtf", 12), ("faster_rtf_chunk_8", 8)):
        runs = [run(short, seed, settings.frames, size) for seed in range(settings.peer_utterances)]
        rtf = [made[-1]["ready_ms"] / 1e3 / sum(chunk["audio_s"] for chunk in made) for made in runs]
        yield name, rtf, f"compute s / audio s, chunks of {size}"
        if size == STEADY_FRAMES:
            arrived = [[(chunk["chunk_steps"], chunk["ready_ms"]) for chunk in made] for made in runs]
            steady_ms = [ms for chunks in arrived for ms in steady_frame_ms(chunks)]
            yield "faster_frame_with_codec_ms", steady_ms, f"ms, chunks of {STEADY_FRAMES} frames"
    said_ms = [(c["total_steps_so_far"], c["decode_ms"] / c["chunk_steps"]) for c in run(short, 0, settings.last, 12)]
    yield "faster_frame_ms", _at_context(checkpoint, said_ms, settings), "ms, mean of 12 frames, codec left out"


def upstream(settings: BenchSettings) -> Measured:
    """A frame at the context, and whole utterances: upstream does not stream, so all PCM comes at the end."""
    checkpoint = settings.open()
    request, sampling = request_of(checkpoint, settings), checkpoint.sampling()
    model = load_upstream(checkpoint.folder, settings.torch_dtype, settings.device)
    yield {"upstream_package": provided_by("qwen_tts")}

    def utterance(seed: int, frames: int) -> tuple[float, float]:
        """Returns (ms from text to PCM on the host, seconds of audio)."""
        begun_s = time.perf_counter()
        pcm = decode_codes(model, generate_codes(model, request, sampling, seed, frames))
        return 1e3 * (time.perf_counter() - begun_s), len(pcm) / SAMPLE_RATE_HZ

    utterance(0, 8)
    runs = [utterance(seed, settings.frames) for seed in range(settings.peer_utterances)]
    yield "upstream_rtf", [ms / 1e3 / audio_s for ms, audio_s in runs], "compute s / audio s"
    whole = [ms / 1e3 / audio_s * FRAME_MS for ms, audio_s in runs]
    yield "upstream_frame_with_codec_ms", whole, "ms, a whole utterance over its frames: it does not stream"
    yield "upstream_first_pcm_ms", [ms for ms, _ in runs], "ms; the whole utterance: it does not stream"
    marks_s: list[float] = []
    noted = {"on_frame": lambda codes: marks_s.append(time.perf_counter())}
    generate_codes(model, request, sampling, 0, settings.last, **noted)
    # The first mark is after the first frame, so no interval includes the prompt's prefill.
    frame_ms = [(i, 1e3 * (b - a)) for i, (a, b) in enumerate(zip(marks_s, marks_s[1:], strict=False), 1)]
    yield "upstream_frame_ms", _at_context(checkpoint, frame_ms, settings), "ms"


def words(settings: BenchSettings) -> Measured:
    """Errors of word times against those of an aligner, whose own error is about 0.02 s; speakers take turns."""
    aligner, checkpoint = Aligner(), settings.open()
    if checkpoint.is_random or checkpoint.config.type.clones:
        raise MetricsError("word times are measured on a trained checkpoint with speakers: --checkpoint small")
    sentences = files("mktts.measure.bench").joinpath("sentences.json").read_text(encoding="utf-8")
    speakers = sorted(checkpoint.config.speakers) or [None]
    starts_s, ends_s, aligned = [], [], 0
    with Synthesizer.load(checkpoint, **settings.loading()) as synthesizer:
        for number, text in enumerate(json.loads(sentences)):
            speaker, options = speakers[number % len(speakers)], StreamOptions(word_times=True)
            stream = synthesizer.stream(text, speaker=speaker, seed=number, options=options)
            pcm = stream.read()
            said = [words_said(synthesizer.spoken(word.word, "auto")) for word in stream.words]
            found = aligner.align(pcm, [one for parts in said for one in parts])
            if found is None or stream.finish_reason != "eos":
                continue
            aligned += 1
            for word, parts in zip(stream.words, said, strict=True):
                spans, found = found[: len(parts)], found[len(parts) :]
                starts_s.append(abs(word.start_s - spans[0][0]))
                ends_s.append(abs(word.end_s - spans[-1][1]))
    yield "word_start_error_s", starts_s, "s"
    yield "word_end_error_s", ends_s, "s"
    yield {"sentences": aligned, "tool": provided_by("pocketsphinx")}
