"""The sections of other implementations: what ours is measured beside."""

from __future__ import annotations

from collections.abc import Sequence

from mktts.checkpoint import open_checkpoint
from mktts.errors import MetricsError
from mktts.measure.bench.frames import STEADY_FRAMES, steady_frame_ms
from mktts.measure.bench.peers import FasterPeer, UpstreamPeer
from mktts.measure.bench.settings import BenchSettings, emit, note, request_of, sentence_of
from mktts.measure.environment import provided_by
from mktts.spec import FRAME_MS


def _at_context(frame_ms: Sequence[tuple[int, float]], settings: BenchSettings) -> list[float]:
    near = [ms for position, ms in frame_ms if abs(position - settings.context) <= settings.around]
    if not near:
        raise MetricsError(f"the peer's utterance ended before context {settings.context - settings.around}")
    return near


def upstream(settings: BenchSettings) -> None:
    """qwen-tts: a frame at the context, and RTF of a whole utterance."""
    checkpoint = open_checkpoint(settings.checkpoint, settings.revision)
    request, sampling = request_of(checkpoint, settings), checkpoint.sampling()
    peer = UpstreamPeer(checkpoint.folder, settings.device, settings.dtype)
    note(upstream_package=provided_by("qwen_tts"))
    peer.utterance(request, sampling, 0, 8)
    runs = [peer.utterance(request, sampling, seed, settings.frames) for seed in range(settings.peer_utterances)]
    emit("upstream_rtf", [run.rtf for run in runs], "compute s / audio s")
    whole = [run.total_ms / 1e3 / run.audio_s * FRAME_MS for run in runs]
    emit("upstream_frame_with_codec_ms", whole, "ms, a whole utterance over its frames: it does not stream")
    emit("upstream_first_pcm_ms", [run.first_pcm_ms for run in runs], "ms; the whole utterance: it does not stream")
    long = peer.frames(request, sampling, 0, settings.context + settings.around)
    emit("upstream_frame_ms", _at_context(long.frame_ms, settings), "ms")


def faster(settings: BenchSettings) -> None:
    """faster-qwen3-tts: first PCM at a chunk of 1 frame, a frame at the context, and RTF at its default and at 1, 8.

    Chunks of 8 frames, as ours come once a stream runs, give the frame with its codec.
    """
    checkpoint = open_checkpoint(settings.checkpoint, settings.revision)
    request, sampling = request_of(checkpoint, settings), checkpoint.sampling()
    peer = FasterPeer(checkpoint.folder, settings.device, settings.dtype)
    note(faster_package=provided_by("faster_qwen3_tts"))
    for chunk in (1, 8, 12):
        peer.stream(request, sampling, 0, 26, chunk)  # captures its graphs; chunks of every length it will decode
    first = [peer.stream(request, sampling, seed, 1, 1) for seed in range(settings.samples // 10)]
    emit("faster_ttfc_ms", [run.first_pcm_ms for run in first], "ms, chunk of 1 frame")
    sentence = sentence_of(checkpoint)
    peer.stream(sentence, sampling, 0, 1, 1)
    first = [peer.stream(sentence, sampling, seed, 1, 1) for seed in range(settings.samples // 10)]
    emit("faster_ttfc_sentence_ms", [run.first_pcm_ms for run in first], "ms, chunk of 1 frame")
    for name, chunk in (("faster_rtf", 12), ("faster_rtf_chunk_8", 8), ("faster_rtf_chunk_1", 1)):
        runs = [
            peer.stream(request, sampling, seed, settings.frames, chunk) for seed in range(settings.peer_utterances)
        ]
        emit(name, [run.rtf for run in runs], f"compute s / audio s, chunks of {chunk}")
        if chunk == STEADY_FRAMES:
            steady_ms = [ms for run in runs for ms in steady_frame_ms(run.chunks)]
            emit("faster_frame_with_codec_ms", steady_ms, f"ms, chunks of {STEADY_FRAMES} frames")
    long = peer.stream(request, sampling, 0, settings.context + settings.around, 12)
    emit("faster_frame_ms", _at_context(long.frame_ms, settings), "ms, mean of 12 frames, codec left out")
