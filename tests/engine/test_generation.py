"""One utterance, step by step, without threads; and the options of a stream."""

import time
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from desk import chunks_of, unread
from fakes import OFF, FakeBackend, FakeCodec, FakeCodecState, fake_single

from mktts.audio import first_audible_sample
from mktts.engine.chunker import Chunker
from mktts.engine.options import Chunk, Guard, Plan, StreamOptions
from mktts.engine.runner import Runner
from mktts.engine.stream import MAX_SEGMENT_FRAMES, Utterance
from mktts.errors import OptionsError
from mktts.model.sampling import Sampling
from mktts.spec import AUDIBLE_WINDOW_SAMPLES, NUM_CODEBOOKS, SAMPLE_RATE_HZ

HELLO = "Hello."
NO_LENGTH = StreamOptions(guard=Guard(frames_per_text_token=None))


def run(runner: Runner, utterance: Utterance, steps: int = 10_000) -> list[Chunk]:
    """Turns, of a frame each, until the end, or until it waits."""
    while not utterance.over and steps and runner.turn(time.perf_counter()) == float("-inf"):
        steps -= 1
    return chunks_of(utterance)


def pcm_of(chunks: list[Chunk]) -> np.ndarray:
    return np.concatenate([chunk.pcm for chunk in chunks])


class QueueingBackend(FakeBackend):
    """Writes a frame's codes where `codes_to_come` says, once whoever queues work behind them has done so."""

    def codes_to_come(self, state):
        return vars(state).setdefault("to_come", torch.zeros(NUM_CODEBOOKS, dtype=torch.int32))

    def step(self, state, row, meanwhile=None):
        if meanwhile is not None:
            meanwhile()
        frame = super().step(state, row)
        if frame.codes is not None:
            self.codes_to_come(state).copy_(frame.codes)
        return frame


class QueueingCodec(FakeCodec):
    """Decodes what was submitted unmade when its result is asked for. unmade: how often."""

    unmade = 0

    def submit_unmade(self, codes, state):
        self.unmade += 1
        return SimpleNamespace(result=lambda: self.decode(codes.long(), state).numpy(), pcm16=None)


# ---- chunks


@pytest.mark.parametrize(("schedule", "queued"), [((1, 2, 4), 1), ((2, 4), 0)])
@pytest.mark.parametrize("segment_frames", [5, 1])
def test_a_first_frame_that_is_a_chunk_is_decoded_behind_its_launch(schedule, queued, segment_frames):
    options = StreamOptions(schedule=schedule, guard=Guard.off())
    chunks = []
    for backend, codec in ((FakeBackend, FakeCodec), (QueueingBackend, QueueingCodec)):
        model = fake_single(backend(eos_after=segment_frames), codec())
        chunks.append(run(model, unread(model, HELLO, "And more.", options=options)))
    assert model.lanes.codec.unmade == queued
    assert [chunk.frames for chunk in chunks[0]] == [chunk.frames for chunk in chunks[1]]
    assert np.array_equal(*map(pcm_of, chunks))


@pytest.mark.parametrize("size", [1, 100, 239, 240, 241, 1_000, 1_920, 5_000])
def test_chunks_of_any_length_are_trimmed_as_the_whole_is(size):
    """The sound begins 60 samples before a window ends, too late for that one to be audible."""
    sound_begins = 9 * AUDIBLE_WINDOW_SAMPLES - 60
    random = np.random.default_rng(3)
    whole = np.concatenate((1e-4 * random.normal(size=sound_begins), 0.01 * random.normal(size=3_000)))
    whole = whole.astype(np.float32)
    assert first_audible_sample(whole) == 9 * AUDIBLE_WINDOW_SAMPLES
    pieces = iter([whole[start : start + size] for start in range(0, len(whole), size)])
    decoded = SimpleNamespace(result=lambda: next(pieces), pcm16=None)
    chunker = Chunker(StreamOptions(schedule=(1,), trim_lead=True), time.perf_counter())
    chunks = []
    for _ in range(0, len(whole), size):
        chunker.undecoded.append(None)
        chunker.pending_frames += 1
        chunks.append(chunker.take(lambda codes: decoded))
    heard = [chunk for chunk in chunks if chunk]
    kept = 9 * AUDIBLE_WINDOW_SAMPLES - SAMPLE_RATE_HZ * 40 // 1_000
    assert np.array_equal(np.concatenate([chunk.pcm for chunk in heard]), whole[kept:])
    assert heard[0].start_s == pytest.approx(kept / SAMPLE_RATE_HZ)
    assert sum(chunk.frames for chunk in heard) == len(chunks)


def test_timings_add_up_over_the_frames_of_a_chunk():
    runner, now_s = fake_single(), time.perf_counter()
    chunks = run(runner, unread(runner, frames=9, started_s=now_s))
    assert [chunk.timings.talker_ms for chunk in chunks] == pytest.approx([chunk.frames for chunk in chunks])
    assert [chunk.timings.predictor_ms for chunk in chunks] == pytest.approx([2 * chunk.frames for chunk in chunks])
    assert chunks[0].timings.prefill_ms > 0 and {chunk.timings.prefill_ms for chunk in chunks[1:]} == {0.0}
    ready = [chunk.timings.ready_ms for chunk in chunks]
    assert ready == sorted(ready) and ready[0] > 0
    (earlier,) = run(runner, unread(runner, frames=1, started_s=now_s - 100))
    assert earlier.timings.ready_ms > 100_000  # counted from the call


# ---- the end, and segments


@pytest.mark.parametrize(
    ("backend", "text", "options", "max_frames", "positions", "ended", "cache_frames"),
    [
        (FakeBackend(eos_after=4), "One. Two. Three.", OFF, 10, 10_000, ("max_frames", 10), [10, 6, 2]),
        (FakeBackend(), "12", StreamOptions(), None, 10_000, ("runaway", 100), [100]),  # the guard is on by default
        (FakeBackend(), "12", OFF, None, 10_000, ("max_frames", MAX_SEGMENT_FRAMES), [MAX_SEGMENT_FRAMES]),
        (FakeBackend(), "12345", OFF, None, 50, ("max_frames", 45), [45]),  # as many as the model has positions
        # The longest repetition of real speech is no runaway.
        (FakeBackend(code0=lambda frame: frame // 34), HELLO, NO_LENGTH, 200, 10_000, ("max_frames", 200), [200]),
    ],
)
def test_where_an_utterance_ends_and_how_long_its_caches_are(
    backend, text, options, max_frames, positions, ended, cache_frames
):
    runner = fake_single(backend, positions=positions)
    utterance = unread(runner, *text.split(), options=options, frames=max_frames)
    run(runner, utterance)
    assert (utterance.finish_reason, len(utterance.codes)) == ended
    assert [state.max_frames for state in backend.states] == cache_frames


def test_segments_follow_one_another_with_a_fresh_talker_and_one_codec():
    backend = FakeBackend(eos_after=3)
    model = fake_single(backend)
    utterance = unread(model, "One.", "Two.", "Three.")
    chunks = run(model, utterance, steps=3)
    assert model.prompts.built == ["One."]  # the others when their turns come
    chunks += run(model, utterance)
    assert utterance.finish_reason == "eos"
    assert model.prompts.built == ["One.", "Two.", "Three."]
    assert [state.seed for state in backend.states] == [5, 6, 7]
    assert model.lanes.codec.starts == 1
    assert [chunk.frames for chunk in chunks] == [1, 1, 2, 4, 1]  # chunks run over the joins
    at_once = FakeCodec().decode(torch.from_numpy(np.stack(utterance.codes)), FakeCodecState())
    assert np.array_equal(pcm_of(chunks), at_once.numpy())


@pytest.mark.parametrize("frames", [1, 2, 16, 21])
def test_decoding_beside_the_next_frames_changes_no_sample_and_is_one_step_late(frames):
    plain, runner = fake_single(), fake_single()
    whole = pcm_of(run(plain, unread(plain, frames=frames)))
    runner.lanes.decodes_beside = runner.lanes.alone = True
    beside = unread(runner, frames=frames)
    chunks = run(runner, beside)
    assert np.array_equal(pcm_of(chunks), whole)
    assert sum(chunk.frames for chunk in chunks) == frames and beside.chunker.pending_frames == 0
    assert [chunk.frames for chunk in chunks[:1]] == [1]  # the first one waits for nothing
    ends_s = [chunk.start_s + chunk.duration_s for chunk in chunks]
    assert [chunk.start_s for chunk in chunks[1:]] == pytest.approx(ends_s[:-1])


# ---- options


@pytest.mark.parametrize(
    "make",
    [
        lambda: StreamOptions(schedule=()),
        lambda: StreamOptions(schedule=(1, 0)),
        lambda: StreamOptions(schedule=(1.5,)),
        lambda: StreamOptions(schedule=(1, 9), buffer_frames=8),
        lambda: StreamOptions(max_chars_per_segment=0),
        lambda: Guard(repeat_frames=1),
        lambda: Guard(frames_per_text_token=0),
        lambda: Guard(slack_frames=0),
        lambda: Plan(Sampling(), 2**63, None, OFF),
    ],
)
def test_options_out_of_range_are_refused(make):
    with pytest.raises(OptionsError, match="must"):
        make()


def test_options_take_lists_and_numpy_integers():
    assert StreamOptions(schedule=[1, np.int64(2)]).schedule == (1, 2)
