"""An engine in a process of its own, against one in this process."""

import asyncio
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import torch
from served import WAIT_S, until

from mktts.audio import to_pcm16
from mktts.checkpoint import Checkpoint, open_checkpoint
from mktts.common import python_path
from mktts.engine.admission import AdmissionLimits
from mktts.engine.options import Guard, StreamOptions
from mktts.engine.remote import Wire, sendable
from mktts.errors import BackendUnavailable, BusyError, EngineError, OptionsError
from mktts.model.voice import Voice
from mktts.synth import Synthesizer

BATCH = {"device": "cpu", "engine": "batch"}
LONG = {"max_frames": 2_000, "options": StreamOptions(guard=Guard.off(), buffer_frames=32)}


def apart(name: str, **settings: object) -> Synthesizer:
    return Synthesizer.load_apart(open_checkpoint(name), name, None, {**BATCH, **settings})


@pytest.fixture(scope="module")
def far() -> Iterator[Synthesizer]:
    """Streams wait for admission, however small the capacity is at the moment."""
    with apart("random:tiny") as synthesizer:
        synthesizer.set_limits(AdmissionLimits(max_wait_s=WAIT_S, max_waiting=64))
        yield synthesizer


@pytest.fixture(scope="module")
def near(tiny: Checkpoint) -> Iterator[Synthesizer]:
    with Synthesizer.load(tiny, **BATCH) as synthesizer:
        yield synthesizer


def test_it_says_in_16_bits_what_one_in_this_process_says(far, near):
    settings = {"seed": 3, "max_frames": 30}
    theirs = near.stream("Good morning, everybody.", **settings)
    chunks = list(far.stream("Good kit, everybody.", pronunciations={"kit": "morning"}, **settings))
    pcm = np.concatenate([chunk.pcm for chunk in chunks])
    assert b"".join(chunk.pcm16 for chunk in chunks) == to_pcm16(theirs.read()) == to_pcm16(pcm)
    assert sum(chunk.frames for chunk in chunks) == 30
    assert [chunk.start_s for chunk in chunks] == sorted(chunk.start_s for chunk in chunks)
    assert (far.backend_name, far.device, far.dtype) == (near.backend_name, near.device, near.dtype)
    assert far.sampling == near.sampling


async def test_many_streams_in_an_event_loop_each_get_their_own(far, near):
    asked = [{"text": "One of many.", "seed": seed, "max_frames": 12} for seed in range(6)]
    said = await asyncio.gather(*(far.stream(**one).aread() for one in asked))
    assert [to_pcm16(pcm) for pcm in said] == [to_pcm16(near.say(**one)) for one in asked]


def test_a_session_that_another_thread_cancels_while_it_begins_is_cancelled_there_too(far, monkeypatch):
    send, session = far.engine._send, far.open(**LONG)

    def told() -> bool:
        return session._utterance.number not in far.engine._utterances

    def cancels_first(method, *arguments, **more):
        if method == "begin":
            session.cancel()
            until(told, "the cancel is told")
        send(method, *arguments, **more)

    monkeypatch.setattr(far.engine, "_send", cancels_first)
    session.feed("Good morning, everybody. ")
    until(told, "it is told again")
    until(lambda: far.engine.stats["batch"].lanes_used == 0, "its lane is free")


def test_nothing_is_made_for_a_reader_who_takes_nothing_and_a_cancelled_stream_ends(far):
    stream = far.stream("A long story.", **LONG)
    next(stream)
    until(lambda: stream.idle, "its buffer to be full")
    assert far.stats["batch"].lanes_used == 1
    before = stream._utterance.made_frames
    time.sleep(0.3)
    assert stream._utterance.made_frames == before <= 40
    next(stream), next(stream), next(stream), next(stream)
    until(lambda: stream._utterance.made_frames > before, "more, as it was read from")
    stream.cancel()
    assert list(stream) == [] and stream.finish_reason == "cancelled"
    for _ in range(3):
        next(far.stream("Nobody reads on.", **LONG))
    until(lambda: not far.engine._utterances, "the cancelled and the dropped ones to be gone")
    until(lambda: not far.stats["batch"].lanes_used, "their lanes to be free")


def test_a_voice_goes_over_and_all_streams_end_where_the_process_is_killed(tiny_base):
    torch.manual_seed(1)
    one, other = (Voice(torch.randn(64), None, None, tiny_base.config.model_size) for _ in range(2))
    settings = {"seed": 2, "max_frames": 8}
    with Synthesizer.load(tiny_base, **BATCH) as near, apart("random:tiny:base") as far:
        expected = to_pcm16(near.say("In her voice.", voice=one, **settings))
        for _ in range(2):
            assert to_pcm16(far.stream("In her voice.", voice=one, **settings).read()) == expected
        far.stream("And hers.", voice=other, **settings).read()
        far.forget(other)
        assert to_pcm16(far.stream("In her voice.", voice=one, **settings).read()) == expected
        gone = threading.Event()
        far.engine.on_gone = gone.set
        stream = far.stream("Until somebody pulls the plug.", voice=one, **LONG)
        next(stream)
        os.kill(far.engine._process.pid, signal.SIGKILL)
        with pytest.raises(EngineError, match="the engine's process"):
            stream.read()
        assert gone.wait(WAIT_S) and far.engine.gone
        for use in (lambda: far.stream("Hello?", voice=one), far.warm_up):
            with pytest.raises(EngineError):
                use()


def test_it_ends_with_the_process_that_it_speaks_for():
    program = (
        "import os, time\n"
        "from mktts.checkpoint import open_checkpoint\n"
        "from mktts import Synthesizer\n"
        "far = Synthesizer.load_apart(open_checkpoint('random:tiny'), 'random:tiny', None, {'device': 'cpu'})\n"
        "print(far.engine._process.pid, flush=True)\n"
        "time.sleep(60)\n"
    )
    words, environment = [sys.executable, "-c", program], {**os.environ, **python_path()}
    with subprocess.Popen(words, stdout=subprocess.PIPE, text=True, env=environment) as parent:
        child = Path(f"/proc/{int(parent.stdout.readline())}/cmdline")
        parent.kill()
    until(lambda: not child.exists() or not child.read_bytes(), "the child to go")  # empty: it waits to be reaped


def test_what_loading_raises_is_raised_here():
    checkpoint = open_checkpoint("random:tiny")
    with pytest.raises(BackendUnavailable):
        Synthesizer.load_apart(checkpoint, "random:tiny", None, {"device": "cuda:77"})
    with pytest.raises(OptionsError, match="lexicon"):
        Synthesizer.load_apart(checkpoint, "random:tiny", None, {"device": "cpu", "lexicon": "absent.tsv"})


def test_an_error_that_cannot_be_pickled_is_told_in_words():
    error = ValueError("beyond words")
    error.cause = threading.Lock()
    here, there = (Wire(end) for end in socket.socketpair())
    here.send(("over", (sendable(error),), None), ("over", (sendable(None),), None))
    (told,), (other,) = (arguments for _, arguments, _ in there.recv())
    assert type(told) is EngineError and "ValueError: beyond words" in str(told) and other is None


# The last one of this file: afterwards the process of `far` is gone.
def test_admission_speaks_through_it_and_closing_ends_streams_and_the_process(far):
    far.set_limits(AdmissionLimits(max_streams=1, max_waiting=0, max_wait_s=0.0))
    first = far.stream("The only place.", **LONG)
    next(first)
    with pytest.raises(BusyError) as refused:
        far.stream("One too many.", **LONG).read()
    assert refused.value.capacity == 1
    until(lambda: far.capacity.streams == 1, "the capacity")
    far.close()
    assert far.engine._process.returncode == 0 and not far.engine.gone
    assert list(first) == [] and first.finish_reason == "cancelled"
    far.close()
    with pytest.raises(EngineError, match="closed"):
        far.stream("Too late.")
