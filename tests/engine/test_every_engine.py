"""What a stream gives, the same on every engine; then many texts at once, as `say` gives each; then one utterance, step
by step, without threads. On fake models."""

import gc
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from functools import partial
from itertools import pairwise, repeat
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from desk import chunks_of, fed, open_streams, unread
from fakes import FAKE_ENGINES, OFF, ONE, FakeBackend, FakeCodec, fake_single, fake_synthesizer, settle
from hypothesis import HealthCheck, assume, given, settings
from hypothesis import strategies as st
from served import WAIT_S, until

from mktts.audio import first_audible_sample
from mktts.engine.many import SayRequest
from mktts.engine.options import SCHEDULE, TOGETHER_SCHEDULE, Chunk, Guard, StreamOptions
from mktts.engine.runner import Runner
from mktts.engine.stream import MAX_SEGMENT_FRAMES, Stream, Utterance
from mktts.errors import EngineError, OptionsError, TextError
from mktts.model.sampling import Sampling
from mktts.spec import NUM_CODEBOOKS, SAMPLE_RATE_HZ
from mktts.synth import Synthesizer

THREE = "The first sentence. And a second one here. The third ends it."
SEGMENTS = replace(OFF, max_chars_per_segment=25)
REFERENCE = torch.arange(5 * NUM_CODEBOOKS).reshape(5, NUM_CODEBOOKS) % 97


@dataclass(frozen=True)
class Case:
    """A stream, the model that it is opened on, and why it ends."""

    reason: str
    frames: tuple[int, ...]  # of each chunk
    options: StreamOptions = OFF
    text: str = "Hello."
    max_frames: int | None = None
    eos_after: int | None = None
    silent: int = 0
    code0: Callable[[int], int] = lambda frame: frame
    voice: object = None
    prefix: str = ""


def _guarded(**guard: float | None) -> StreamOptions:
    return StreamOptions(guard=Guard(**{"frames_per_text_token": None, **guard}), schedule=SCHEDULE)


CASES = {
    "a schedule": Case("max_frames", (3, 5, 5), replace(OFF, schedule=(3, 5)), max_frames=13),
    "one chunk": Case("max_frames", (13,), replace(OFF, schedule=(50,)), max_frames=13),
    "end of speech": Case("eos", (1, 1, 2, 2), eos_after=6),
    "no frames": Case("eos", (), eos_after=0),
    "one frame": Case("max_frames", (1,), max_frames=1),
    "segments": Case("eos", (1, 1, 2, 4, 4), SEGMENTS, THREE, eos_after=4),
    "segments of one frame": Case("eos", (1, 1, 1), SEGMENTS, THREE, eos_after=1),
    "segments of no frames": Case("eos", (), SEGMENTS, THREE, eos_after=0),
    "max_frames within a segment": Case("max_frames", (1, 1, 2, 4, 2), SEGMENTS, THREE, max_frames=10, eos_after=4),
    "max_frames at a join": Case("max_frames", (1, 1, 2, 4), SEGMENTS, THREE, max_frames=8, eos_after=4),
    "a repeated code": Case("runaway", (1, 1, 2, 4, *[8] * 5, 2), _guarded(), code0=lambda frame: min(frame, 10)),
    "a missing end": Case(
        "runaway", (1, 1, 2, 4, 8, 8, 1), _guarded(frames_per_text_token=3.0, slack_frames=10), "12345"
    ),
    "silence first": Case("max_frames", (6, 1, 2, 3), replace(OFF, trim_lead=True), max_frames=12, silent=5),
    "no silence": Case("max_frames", (1, 1, 2, 4, 4), replace(OFF, trim_lead=True), max_frames=12),
    "silence alone": Case("max_frames", (), replace(OFF, trim_lead=True), max_frames=9, silent=100),
    "a small buffer": Case("max_frames", (1,) * 30, replace(ONE, buffer_frames=1), max_frames=30),
    "silence over a small buffer": Case(
        "max_frames", (13,) + (1,) * 17, replace(ONE, trim_lead=True, buffer_frames=2), max_frames=30, silent=12
    ),
    "a voice with codes": Case("max_frames", (1, 1, 2, 3), max_frames=7, voice=SimpleNamespace(codes=REFERENCE)),
    "a kept prefix": Case("eos", (1, 1, 2, 4, 4), SEGMENTS, THREE, eos_after=4, prefix="v" * 150),
}


def model_of(case: Case) -> dict:
    backend = FakeBackend(eos_after=case.eos_after, code0=case.code0)
    return {"backend": backend, "codec": FakeCodec(silent_frames=case.silent), "prefix": case.prefix}


def speak(synth: Synthesizer, case: Case, seed: int) -> Stream:
    return synth.stream(case.text, seed=seed, max_frames=case.max_frames, options=case.options, voice=case.voice)


def heard(stream: Stream) -> dict:
    chunks = list(stream)
    return {
        "frames": [chunk.frames for chunk in chunks],
        "starts": [round(chunk.start_s * SAMPLE_RATE_HZ) for chunk in chunks],
        "pcm": [sample for chunk in chunks for sample in chunk.pcm.tolist()],
        "codes": stream.codes.tolist(),
        "reason": stream.finish_reason,
    }


@pytest.mark.parametrize("case", CASES.values(), ids=CASES.keys())
def test_a_stream_is_the_same_on_every_engine_alone_and_beside_others(make, case):
    with fake_synthesizer(**model_of(case)) as synth:
        wanted = {seed: heard(speak(synth, case, seed)) for seed in (3, 4, 5)}
    assert (wanted[3]["reason"], tuple(wanted[3]["frames"])) == (case.reason, case.frames)
    if wanted[3]["codes"] and case.voice is None:
        codec = FakeCodec(case.silent)
        whole = codec.decode(torch.tensor(wanted[3]["codes"]), codec.start()).numpy()
        audible = first_audible_sample(whole) if case.options.trim_lead else 0
        kept = len(whole) if audible is None else max(0, audible - SAMPLE_RATE_HZ * 40 // 1_000)
        assert wanted[3]["pcm"] == whole[kept:].tolist() and wanted[3]["starts"][:1] == [kept][: len(whole) - kept]
    with make(**model_of(case)) as synth:
        assert heard(speak(synth, case, 3)) == wanted[3]
        streams = {seed: speak(synth, case, seed) for seed in wanted}
        assert {seed: heard(stream) for seed, stream in streams.items()} == wanted


def test_where_no_schedule_is_asked_for_chunks_of_many_streams_stay_small(make):
    with make() as synth:
        stream = synth.stream("Hello.", max_frames=16, seed=1)
        chunks = list(stream)
    schedule = SCHEDULE if stream.engine == "single" else TOGETHER_SCHEDULE
    assert tuple(chunk.frames for chunk in chunks[: len(schedule)]) == schedule
    assert all(chunk.timings.talker_ms > 0 and chunk.timings.ready_ms > 0 for chunk in chunks)


def test_a_voice_is_heard_once_for_many_streams(make):
    codec = FakeCodec()
    with make(codec=codec) as synth:
        for _ in range(3):
            synth.say("Hello.", voice=SimpleNamespace(codes=REFERENCE), max_frames=2, seed=1)
    assert codec.decoded == [5] + [1] * 6


@settings(max_examples=20, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.lists(st.text(alphabet="abc. ", min_size=1, max_size=9), min_size=1, max_size=6), st.booleans())
def test_however_text_is_fed_the_codes_are_those_of_the_text_at_once(make, pieces, eager):
    text = "".join(pieces).strip()
    assume(text)

    def codes(synth: Synthesizer, parts: list[str]) -> list[list[int]]:
        session = synth.open(seed=5, sampling=Sampling(), options=ONE)
        for part in parts:
            session.feed(part)
            if eager and len(session.codes) < len("".join(parts)):
                synth.say("Between.", max_frames=2, seed=1)  # the worker has had time for what was fed
        session.finish()
        session.read()
        assert session.finish_reason == "eos"
        return session.codes.tolist()

    backend = FakeBackend(eos_after=len(text) + 5)
    with fake_synthesizer(backend) as synth:
        wanted = codes(synth, [text])
    with make(backend) as synth:
        assert codes(synth, pieces) == wanted == codes(synth, [text])


def test_long_fed_text_becomes_segments_at_sentence_ends(make):
    with make(FakeBackend(eos_after=60)) as synth:
        session = synth.open(options=replace(OFF, max_chars_per_segment=20), seed=1)
        sentences = ["This is the first sentence.", "And the second one is here.", "Last."]
        fed(session, (word + " " for word in " ".join(sentences).split()))
        assert [prompt.text for prompt in synth._prompts.opened] == sentences
        assert session.finish_reason == "eos" and len(session.codes) == 3 * 60


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


@pytest.mark.parametrize(("schedule", "queued"), [((1, 2, 4), 1), ((2, 4), 0)])
@pytest.mark.parametrize("segment_frames", [5, 1])
def test_a_first_frame_that_is_a_chunk_is_decoded_behind_its_launch(schedule, queued, segment_frames):
    chunks = []
    for backend, codec in ((FakeBackend, FakeCodec), (QueueingBackend, QueueingCodec)):
        model = fake_single(backend(eos_after=segment_frames), codec())
        chunks.append(run(model, unread(model, "Hello.", "And more.", options=replace(OFF, schedule=schedule))))
    assert model.lanes.codec.unmade == queued
    assert [chunk.frames for chunk in chunks[0]] == [chunk.frames for chunk in chunks[1]]
    assert np.array_equal(*map(pcm_of, chunks))


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


@pytest.mark.parametrize(
    ("backend", "text", "options", "frames", "positions", "ended", "caches"),
    [
        (FakeBackend(eos_after=4), "One. Two. Three.", OFF, 10, 10_000, ("max_frames", 10), [10, 6, 2]),
        (FakeBackend(), "12", StreamOptions(), None, 10_000, ("runaway", 100), [100]),  # the guard is on by default
        (FakeBackend(), "12", OFF, None, 10_000, ("max_frames", MAX_SEGMENT_FRAMES), [MAX_SEGMENT_FRAMES]),
        (FakeBackend(), "12345", OFF, None, 50, ("max_frames", 45), [45]),  # as many as the model has positions
        # The longest repetition of real speech is no runaway.
        (FakeBackend(code0=lambda frame: frame // 34), "Hello.", _guarded(), 200, 10_000, ("max_frames", 200), [200]),
    ],
)
def test_where_an_utterance_ends_and_how_long_its_caches_are(backend, text, options, frames, positions, ended, caches):
    runner = fake_single(backend, positions=positions)
    utterance = unread(runner, *text.split(), seed=5, options=options, frames=frames)
    run(runner, utterance, steps=3)
    assert len(runner.prompts.built) == 1  # the other segments when their turns come
    run(runner, utterance)
    assert (utterance.finish_reason, len(utterance.codes)) == ended
    assert [(state.seed, state.max_frames) for state in backend.states] == list(enumerate(caches, 5))


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
    assert all(late.start_s == pytest.approx(one.start_s + one.duration_s) for one, late in pairwise(chunks))


@pytest.mark.parametrize(
    ("of", "wrong"),
    [
        *((StreamOptions, {"schedule": schedule}) for schedule in ((), (1, 0), (1.5,), 3)),
        (StreamOptions, {"schedule": (1, 9), "buffer_frames": 8}),
        (StreamOptions, {"buffer_frames": 2**64}),
        (StreamOptions, {"max_chars_per_segment": 0}),
        (StreamOptions, {"guard": None}),
        *((Guard, wrong) for wrong in ({"repeat_frames": 1}, {"frames_per_text_token": 0}, {"slack_frames": 0})),
    ],
)
def test_options_out_of_range_are_refused_and_lists_and_numpy_integers_taken(of, wrong):
    with pytest.raises(OptionsError, match="must"):
        of(**wrong)
    assert StreamOptions(schedule=[1, np.int64(2)]).schedule == (1, 2)


TEXTS = [f"Text number {number}." for number in range(12)]


@pytest.fixture(params=[*FAKE_ENGINES, "auto"])
def make(request):
    """Makes synthesizers on each engine."""
    return partial(fake_synthesizer, engine=request.param)


def open_now(synth) -> int:
    gc.collect()
    settle(synth)
    return open_streams(synth)


@pytest.mark.parametrize("at_once", [None, 1, 5])
def test_each_text_sounds_as_if_said_alone_in_its_turn_and_has_its_own_seed_where_none_is_given(make, at_once):
    backend = FakeBackend(eos_after=7)
    with make(backend, slots=2) as synth:  # more than fit wait for their place
        alone = [synth.say(text, seed=4) for text in TEXTS]
        many = synth.say_many(iter(TEXTS), seed=4, at_once=at_once)
        assert all(np.array_equal(*pair) for pair in zip(many, alone, strict=True))
        assert open_now(synth) == 0
        backend.order.clear()
        list(synth.say_many(["Same."] * 5))
        assert len(set(backend.order)) == 5


@pytest.mark.parametrize("at_once", [1, 2, 100])
@pytest.mark.parametrize("fails", ["opening", "speaking"])
def test_an_error_is_raised_in_its_turn_and_the_others_are_cancelled(make, at_once, fails):
    texts = ["Good.", "Good too.", "\x00" if fails == "opening" else "Fails.", "Never said.", "Never said."]
    seeds = iter([10, 20, 70, 30, 40])
    with make(FakeBackend(eos_after=5, fail_at=3, failing=[70])) as synth:
        plain, got = synth._stream, []
        synth._stream = lambda text, settings, **how: plain(text, {**settings, "seed": next(seeds, 0)}, **how)
        with pytest.raises((TextError, RuntimeError, EngineError)):
            for pcm in synth.say_many(texts, at_once=at_once):
                got.append(len(pcm))
        assert len(got) == 2 and open_now(synth) == 0 and list(synth.say_many([])) == []


@pytest.mark.parametrize(("engine", "room"), [("single", 1), ("batch", 16), ("auto", 16)])
@pytest.mark.parametrize("at_once", [None, 3])
def test_as_many_are_open_as_asked_for_or_fit_and_a_few_more_of_those_asked_one_by_one(engine, room, at_once):
    with fake_synthesizer(engine=engine, slots=16) as synth:
        taken = []
        texts = (taken.append(text) or text for text in repeat("Text."))
        many = synth.say_many(texts, max_frames=3, at_once=at_once)
        next(many)
        assert len(taken) == (at_once or room) + 1 and open_streams(synth) <= (at_once or room)
        many.close()
        taken.clear()
        said = synth.say_each(lambda: taken.append(1) or SayRequest("Text.", {"max_frames": 2}), at_once=at_once)
        next(said)
        assert len(taken) == (at_once or room + room // 8) + 1
        said.close()


@pytest.mark.parametrize("method", ["say_many", "say_each"])
@pytest.mark.parametrize("leave", ["close", "dropped", "a callback raised"])
def test_leaving_early_ends_what_is_open(make, method, leave):
    calls_back = leave == "a callback raised"
    settings = {"max_frames": 20, "options": ONE}
    with make() as synth:
        texts = (1 / 0 if calls_back and number > 6 else text for number, text in enumerate(TEXTS))
        if method == "say_many":
            made = synth.say_many(texts, at_once=4, **settings)
        else:
            made = synth.say_each(lambda: SayRequest(next(texts), settings), at_once=4)
        if calls_back:
            with pytest.raises(ZeroDivisionError):
                list(made)
        else:
            next(made)
        if leave == "close":
            made.close()
        del made
        assert open_now(synth) == 0
        assert all(job.over for job in list(synth.engine._utterances))


@pytest.mark.parametrize("at_once", [0, 1.5, True, "2"])
def test_how_many_at_once_is_checked_at_the_call(make, at_once):
    with make() as synth:
        for say in (synth.say_many, synth.say_each):
            with pytest.raises(OptionsError, match="at_once must be a whole number of at least 1"):
                say(TEXTS, at_once=at_once)


def test_what_is_cut_off_because_the_synthesizer_is_closed_is_an_error(make):
    synth = make(FakeBackend(eos_after=100_000))
    with ThreadPoolExecutor() as threads:
        said = threads.submit(synth.say, TEXTS[0], max_frames=100_000)
        until(lambda: open_streams(synth), "a stream is open")
        synth.close()
        with pytest.raises(EngineError, match="closed"):
            said.result(WAIT_S)
    for measure in (synth.measure_capacity, lambda: synth.engine._on_worker(int)):
        with pytest.raises(EngineError, match="closed"):
            measure()
