"""One utterance, step by step, without threads, its text known or fed; and the options of a stream."""

from __future__ import annotations

import time
from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from fakes import OFF, FakeBackend, FakeCodec, fake_model

from mktts.codec.decoder import CodecDecoder
from mktts.errors import OptionsError
from mktts.model.prompt import Request
from mktts.model.sampling import Sampling
from mktts.spec import NUM_CODEBOOKS, SAMPLE_RATE_HZ, SAMPLES_PER_FRAME
from mktts.speech.guard import Guard
from mktts.speech.options import Chunk, Plan, StreamOptions
from mktts.speech.text import SEGMENT_CHARS
from mktts.speech.utterance import MAX_SEGMENT_FRAMES
from mktts.synth.one_by_one import Generation, StepModel

HELLO = "Hello."


def generation(
    model: StepModel,
    *texts: str,
    options: StreamOptions = OFF,
    max_frames: int | None = None,
    seed: int = 5,
    reference=None,
) -> Generation:
    voice = None if reference is None else SimpleNamespace(codes=reference)
    requests = [Request(text, voice=voice) for text in texts or (HELLO,)]
    return model.speak(requests, Plan(Sampling(), seed, max_frames, options), time.perf_counter())


def run(utterance: Generation, steps: int = 10_000) -> list[Chunk]:
    """Steps until the end, or until it waits."""
    chunks = []
    while utterance.finish_reason is None and steps and utterance.ready():
        chunk = utterance.step()
        chunks += [chunk] if chunk is not None else []
        steps -= 1
    return chunks


def pcm_of(chunks: list[Chunk]) -> np.ndarray:
    return np.concatenate([chunk.pcm for chunk in chunks])


@pytest.fixture(scope="module")
def codec(tiny) -> CodecDecoder:
    return CodecDecoder(tiny.codec_config, tiny.codec_tensors())


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
        model = fake_model(backend(eos_after=segment_frames), codec())
        chunks.append(run(generation(model, HELLO, "And more.", options=options)))
    assert model.codec.unmade == queued
    assert [chunk.frames for chunk in chunks[0]] == [chunk.frames for chunk in chunks[1]]
    assert np.array_equal(*map(pcm_of, chunks))


def test_a_chunk_comes_with_the_frame_that_completes_it():
    utterance = generation(fake_model(), max_frames=8)
    given_after = []
    while utterance.finish_reason is None:
        assert utterance.ready()
        if utterance.step() is not None:
            given_after.append(len(utterance.codes))
    assert given_after == [1, 2, 4, 8]


def test_timings_add_up_over_the_frames_of_a_chunk():
    chunks = run(generation(fake_model(), max_frames=9))
    assert [chunk.timings.talker_ms for chunk in chunks] == [1.0 * chunk.frames for chunk in chunks]
    assert [chunk.timings.predictor_ms for chunk in chunks] == [2.0 * chunk.frames for chunk in chunks]
    assert chunks[0].timings.prefill_ms > 0 and {chunk.timings.prefill_ms for chunk in chunks[1:]} == {0.0}
    ready = [chunk.timings.ready_ms for chunk in chunks]
    assert ready == sorted(ready) and ready[0] > 0
    first = chunks[0].timings
    assert first.compute_ms == first.prefill_ms + first.talker_ms + first.predictor_ms + first.codec_ms


def test_ready_ms_counts_from_the_call():
    model = fake_model()
    chunk = model.speak([Request(HELLO)], Plan(Sampling(), 0, 1, OFF), time.perf_counter() - 100).step()
    assert chunk.timings.ready_ms > 100_000


# ---- the end


def test_max_frames_counts_the_whole_utterance():
    backend = FakeBackend(eos_after=4)
    utterance = generation(fake_model(backend), "One.", "Two.", "Three.", max_frames=10)
    run(utterance)
    assert (utterance.finish_reason, len(utterance.codes)) == ("max_frames", 10)
    assert [state.max_frames for state in backend.states] == [10, 6, 2]


def test_the_longest_repetition_of_real_speech_is_no_runaway():
    longest = 34
    backend = FakeBackend(code0=lambda frame: frame // longest)
    utterance = generation(
        fake_model(backend), options=StreamOptions(guard=Guard(frames_per_text_token=None)), max_frames=200
    )
    run(utterance)
    assert utterance.finish_reason == "max_frames"


def test_a_missing_end_of_speech_is_a_runaway_by_the_length_of_the_text():
    guard = Guard(frames_per_text_token=3.0, slack_frames=10)
    backend = FakeBackend()
    utterance = generation(fake_model(backend), "12345", options=StreamOptions(guard=guard))
    run(utterance)
    assert (utterance.finish_reason, len(utterance.codes)) == ("runaway", 10 + 3 * 5)
    assert backend.states[0].max_frames == 10 + 3 * 5  # and its key-value cache is no longer than that


def test_the_guard_is_on_by_default_and_can_be_off():
    text = "12"
    assert run_length(StreamOptions(), text) == Guard().limit_frames(len(text)) == 100
    assert run_length(OFF, text) == MAX_SEGMENT_FRAMES


def run_length(options: StreamOptions, text: str) -> int:
    utterance = generation(fake_model(), text, options=options)
    run(utterance)
    return len(utterance.codes)


def test_the_limit_of_the_model_bounds_a_segment():
    backend = FakeBackend()
    utterance = generation(fake_model(backend, positions=50), "12345")
    run(utterance)
    assert (utterance.finish_reason, len(utterance.codes)) == ("max_frames", 45)


def test_a_cancelled_step_decodes_nothing_more():
    model = fake_model()
    utterance = generation(model, options=replace(OFF, schedule=(4,)))
    run(utterance, steps=3)
    utterance.cancelled = True
    assert utterance.step() is None
    assert model.codec.decoded == []


# ---- long text


def test_segments_follow_one_another_with_a_fresh_talker_and_one_codec():
    backend, model = FakeBackend(eos_after=3), None
    model = fake_model(backend)
    utterance = generation(model, "One.", "Two.", "Three.", seed=9)
    chunks = run(utterance)
    assert utterance.finish_reason == "eos"
    assert model.prompts.built == ["One.", "Two.", "Three."]
    assert [state.seed for state in backend.states] == [9, 10, 11]
    assert model.codec.starts == 1
    assert [chunk.frames for chunk in chunks] == [1, 1, 2, 4, 1]  # chunks run over the joins


def test_a_segment_is_built_when_its_turn_comes():
    model = fake_model(FakeBackend(eos_after=3))
    run(generation(model, "One.", "Two."), steps=3)
    assert model.prompts.built == ["One."]


def test_no_step_at_a_join_is_larger_than_inside(codec):
    """The decoder goes on over a join, so its samples are those of one utterance; restarting it would jump."""
    model = replace(fake_model(FakeBackend(eos_after=5)), codec=codec)
    utterance = generation(model, "One.", "Two.", "Three.", "Four.")
    pcm = pcm_of(run(utterance))
    steps = np.abs(np.diff(pcm))
    joins = np.array([5, 10, 15]) * SAMPLES_PER_FRAME - 1
    inside = np.delete(steps, joins)
    assert steps[joins].max() <= inside.max()
    pieces = [codec.decode_all(piece).numpy() for piece in torch.stack(utterance.codes).split(5)]
    restarted = np.concatenate(pieces)
    assert (
        np.abs(restarted - pcm).max() > 100 * np.abs(codec.decode_all(torch.stack(utterance.codes)).numpy() - pcm).max()
    )


# ---- an in-context voice


@pytest.mark.parametrize("frames", [3, 40])
def test_the_codec_hears_the_reference_first_and_its_audio_is_left_out(codec, frames):
    reference = torch.randint(2048, (frames, NUM_CODEBOOKS), generator=torch.Generator().manual_seed(1))
    utterance = generation(replace(fake_model(), codec=codec), max_frames=12, reference=reference)
    pcm = pcm_of(chunks := run(utterance))
    whole = codec.decode_all(torch.cat((reference, torch.stack(utterance.codes)))).numpy()
    assert np.abs(pcm - whole[frames * SAMPLES_PER_FRAME :]).max() <= 1e-5
    assert chunks[0].start_s == 0


# ---- the silent lead


@pytest.mark.parametrize("silent", [0, 1, 5])
def test_the_silent_lead_is_left_out_but_for_forty_milliseconds(silent):
    model = fake_model(codec=FakeCodec(silent_frames=silent))
    whole = pcm_of(run(generation(model, max_frames=12)))
    trimmed_model = fake_model(codec=FakeCodec(silent_frames=silent))
    utterance = generation(trimmed_model, options=replace(OFF, trim_lead=True), max_frames=12)
    chunks = run(utterance)
    start = max(0, silent * SAMPLES_PER_FRAME - SAMPLE_RATE_HZ * 40 // 1_000)
    assert np.array_equal(pcm_of(chunks), whole[start:])
    assert chunks[0].start_s == pytest.approx(start / SAMPLE_RATE_HZ)
    assert sum(chunk.frames for chunk in chunks) == len(utterance.codes) == 12
    # the schedule starts with the first chunk that is heard
    assert [chunk.frames for chunk in chunks] == [silent + 1, 1, 2, 4, 8][: len(chunks) - 1] + [chunks[-1].frames]


def test_forty_milliseconds_are_kept_across_the_edge_of_a_frame_and_a_click_is_silence():
    """The first audible sample is the first of frame 2, so what is kept before it was decoded with frame 1."""

    class Loud(FakeCodec):
        def decode(self, codes, state):
            pcm = super().decode(codes, state) * 0
            if state.frames > 2:
                pcm[:] = 0.5
            elif state.frames == 1:
                pcm[..., :48] = 10 ** (-51 / 20)  # the click that the shipped voice begins with
            return pcm

    utterance = generation(fake_model(codec=Loud()), options=replace(OFF, trim_lead=True), max_frames=4)
    first = run(utterance)[0]
    kept = SAMPLE_RATE_HZ * 40 // 1_000
    assert first.pcm.tolist() == [0.0] * kept + [0.5] * SAMPLES_PER_FRAME
    assert first.start_s == pytest.approx((2 * SAMPLES_PER_FRAME - kept) / SAMPLE_RATE_HZ)


@pytest.mark.parametrize("frames", [1, 2, 5, 16, 17, 21])
def test_decoding_beside_the_next_frames_changes_no_sample_and_is_one_step_late(frames):
    plain = run(generation(fake_model(), max_frames=frames))
    beside = generation(replace(fake_model(), overlaps=True), max_frames=frames)
    beside.alone = True
    chunks = run(beside)
    assert np.array_equal(pcm_of(chunks), pcm_of(plain))
    assert sum(chunk.frames for chunk in chunks) == frames and beside.pending_frames == 0
    assert [chunk.frames for chunk in chunks[:1]] == [1]  # the first one waits for nothing
    ends_s = [chunk.start_s + chunk.duration_s for chunk in chunks]
    assert [chunk.start_s for chunk in chunks[1:]] == pytest.approx(ends_s[:-1])


def fed(model: StepModel, options: StreamOptions = OFF, max_frames: int | None = None):
    max_chars = options.max_chars_per_segment or SEGMENT_CHARS
    return model.listen(Request(""), max_chars, Plan(Sampling(), 5, max_frames, options))


def test_without_text_nothing_is_made():
    backend = FakeBackend()
    utterance, _ = fed(fake_model(backend))
    assert not utterance.ready()
    assert backend.entered == 0 and backend.states == []


def test_the_model_steps_as_far_as_the_text_goes_and_hands_out_what_it_has():
    backend = FakeBackend(eos_after=12)
    utterance, script = fed(fake_model(backend))
    script.feed("abcdef")  # a token a character: the first is in the prompt, five more frames follow
    chunks = run(utterance)
    assert not utterance.ready() and utterance.finish_reason is None
    assert len(utterance.codes) == 6 == backend.entered
    assert [chunk.frames for chunk in chunks] == [1, 1, 2, 2]  # the last one early: the listener need not wait
    script.feed("gh")
    chunks += run(utterance)
    assert (len(utterance.codes), utterance.finish_reason) == (8, None)
    script.finish()
    chunks += run(utterance)
    assert (len(utterance.codes), utterance.finish_reason) == (12, "eos")
    assert sum(chunk.frames for chunk in chunks) == 12


def test_text_that_comes_after_end_of_speech_is_spoken_too():
    model = fake_model(FakeBackend(eos_after=3))
    utterance, script = fed(model)
    script.feed("Hello there")
    run(utterance)
    assert (len(utterance.codes), utterance.finish_reason) == (3, None)
    script.feed(" you")
    script.finish()
    run(utterance)
    assert [prompt.text for prompt in model.prompts.opened] == ["Hello there", "you"]
    assert (len(utterance.codes), utterance.finish_reason) == (6, "eos")


def test_the_end_of_the_text_after_the_last_frame_ends_the_utterance():
    utterance, script = fed(fake_model(FakeBackend(eos_after=2)))
    script.feed("abc")
    run(utterance)
    assert not utterance.ready()
    script.finish()
    assert run(utterance) == [] and utterance.finish_reason == "eos"


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
        lambda: Plan(Sampling(), -1, None, OFF),
        lambda: Plan(Sampling(), 2**63, None, OFF),
        lambda: Plan(Sampling(), 0, 0, OFF),
        lambda: Plan(Sampling(), "7", None, OFF),
    ],
)
def test_options_out_of_range_are_refused(make):
    with pytest.raises(OptionsError, match="must"):
        make()


def test_options_take_lists_and_numpy_integers():
    assert StreamOptions(schedule=[1, np.int64(2)]).schedule == (1, 2)
