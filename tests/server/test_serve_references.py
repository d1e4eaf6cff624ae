"""Recordings that requests bring: cloned as by `clone_voice`, from where they may come, within limits."""

from __future__ import annotations

import base64
import http.server
import threading

import httpx
import numpy as np
import pytest
from absent import needs
from served import served

from mktts.audio import encoded, to_pcm16
from mktts.model.voice import Voice
from mktts.server import Limits
from mktts.server.references import ReferenceSources
from mktts.spec import SAMPLE_RATE_HZ
from mktts.synth import Synthesizer
from mktts.synth.cloning import clone_voice

pytestmark = needs("av", "qwen_tts")
HOW = {"seed": 1, "max_frames": 4}
SAID = "What the reference says."
LIMITS = Limits(max_reference_s=2.0, max_reference_bytes=200_000)


def hum(seconds: float = 1.0) -> np.ndarray:
    t = np.arange(round(seconds * SAMPLE_RATE_HZ)) / SAMPLE_RATE_HZ
    return (0.1 * sum(np.sin(2 * np.pi * 140 * k * t) / k for k in range(1, 8))).astype(np.float32)


WAV = encoded(hum(), "wav")
HEARD = np.frombuffer(to_pcm16(hum()), "<i2").astype(np.float32) / 2**15  # what a WAV of 16 bits keeps of it


@pytest.fixture(scope="module")
def files():
    """A server of files on this machine; `asked` holds the paths that were asked for."""
    asked = []

    class Files(http.server.BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            asked.append(self.path)
            if self.path == "/moved.wav":
                self.send_response(302)
                self.send_header("Location", "/me.wav")
                self.end_headers()
                return
            self.send_response(200)
            self.end_headers()
            self.wfile.write(WAV if self.path == "/me.wav" else b"not audio")

        def log_message(self, *words: object) -> None:
            pass

    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), Files) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield f"http://127.0.0.1:{server.server_address[1]}", asked
        server.shutdown()


@pytest.fixture(scope="module")
def synthesizer(tiny_base):
    with Synthesizer.load(tiny_base, engine="single") as made:
        yield made


@pytest.fixture(scope="module")
def server(synthesizer):
    with served(synthesizer, LIMITS) as running:
        yield running


@pytest.fixture(scope="module")
def voices(tiny_base) -> dict[str | None, Voice]:
    return {said: clone_voice(tiny_base, HEARD, SAMPLE_RATE_HZ, said) for said in (None, SAID)}


def post(server, **body) -> httpx.Response:
    return httpx.post(
        f"{server.url}/v1/audio/speech", json={"input": "Hello.", "response_format": "pcm", **HOW, **body}, timeout=60
    )


def data_url(data: bytes) -> str:
    return f"data:audio/wav;base64,{base64.b64encode(data).decode()}"


@pytest.mark.parametrize(
    ("body", "said"),
    [
        ({"ref_audio": data_url(WAV), "ref_text": SAID, "task_type": "Base"}, SAID),
        ({"ref_audio": base64.b64encode(WAV).decode(), "ref_text": SAID}, SAID),
        ({"ref_audio": [base64.urlsafe_b64encode(WAV).decode().rstrip("=")], "voice": "alloy"}, None),
        ({"ref_audio": data_url(WAV), "ref_text": SAID, "x_vector_only_mode": True}, None),
    ],
    ids=["data URL", "base64", "one in a list", "x-vector"],
)
def test_a_recording_is_cloned_as_by_clone_voice(server, synthesizer, voices, body, said):
    answer = post(server, **body)
    assert answer.status_code == 200, answer.text
    assert answer.content == to_pcm16(synthesizer.say("Hello.", voice=voices[said], **HOW))


def test_the_next_request_with_the_same_recording_need_not_make_it_again(server, monkeypatch):
    first = post(server, ref_audio=data_url(WAV))
    monkeypatch.setattr("mktts.server.references.decode_untrusted", lambda *_: 1 / 0)
    assert post(server, ref_audio=data_url(WAV)).content == first.content


@pytest.mark.parametrize(
    ("body", "code", "param", "message"),
    [
        ({}, "no_voice", "voice", "send ref_audio"),
        ({"ref_audio": data_url(b"hello")}, "bad_reference", "ref_audio", "expected audio"),
        ({"ref_audio": data_url(encoded(hum(3.0), "flac"))}, "bad_reference", "ref_audio", "may last 2 s"),
        ({"ref_audio": data_url(bytes(200_001))}, "bad_reference", "ref_audio", "may have 200000 bytes"),
        ({"ref_audio": data_url(encoded(0 * hum(), "wav"))}, "bad_reference", "ref_audio", "silent"),
        ({"ref_audio": "data:audio/wav;base64,!!"}, "bad_reference", "ref_audio", "base64"),
        ({"ref_audio": "file:/" + "/etc/passwd"}, "reference_not_allowed", "ref_audio", "--reference-folder"),
        ({"ref_audio": "me.wav"}, "reference_not_allowed", "ref_audio", "--reference-folder"),
        ({"ref_audio": "https://files.example/me.wav"}, "reference_not_allowed", "ref_audio", "--reference-host"),
        ({"ref_audio": "http://[::1"}, "reference_not_allowed", "ref_audio", "--reference-host"),
        ({"ref_text": SAID}, "bad_reference", "ref_text", "there is no ref_audio"),
        ({"ref_audio": data_url(WAV), "x_vector_only_mode": False}, "bad_reference", "ref_text", "ref_text"),
        ({"ref_audio": data_url(WAV), "voice": "anna"}, "two_voices", "ref_audio", "leave out voice"),
        ({"ref_audio": data_url(WAV), "ref_text": "x" * 5_001}, "ref_text_too_long", "ref_text", "characters"),
        ({"ref_audio": [WAV.hex(), WAV.hex()]}, "invalid_value", "ref_audio", "string"),
    ],
    ids=lambda value: str(value)[:30],
)
def test_what_cannot_be_cloned_is_one_line_under_the_callers_key(server, body, code, param, message):
    answer = post(server, **body)
    error = answer.json()["error"]
    assert (answer.status_code, error["code"], error["param"]) == (400, code, param), error
    assert message in error["message"] and "\n" not in error["message"]


def test_a_body_beyond_the_recordings_limit_is_refused_before_it_is_read(server):
    answer = post(server, ref_audio=data_url(bytes(2_000_000)))
    assert (answer.status_code, answer.json()["error"]["code"]) == (413, "body_too_large")


def test_a_saved_voice_goes_by_its_name(synthesizer, voices):
    with served(synthesizer, LIMITS, {"anna": voices[None]}) as server:
        expected = to_pcm16(synthesizer.say("Hello.", voice=voices[None], **HOW))
        assert post(server, ref_audio="Anna").content == expected


def test_addresses_and_files_only_where_the_server_was_told(synthesizer, voices, files, tmp_path):
    base, asked = files
    (tmp_path / "outside.wav").write_bytes(WAV)
    folder = tmp_path / "recordings"
    folder.mkdir()
    (folder / "me.wav").write_bytes(WAV)
    (folder / "link.wav").symlink_to(tmp_path / "outside.wav")
    expected = to_pcm16(synthesizer.say("Hello.", voice=voices[None], **HOW))
    sources = ReferenceSources(frozenset({"127.0.0.1"}), folder)
    with served(synthesizer, LIMITS, sources=sources) as server:
        for recording in (f"{base}/me.wav", "me.wav", f"file://{folder}/me.wav"):
            assert post(server, ref_audio=recording).content == expected, recording
        outside = ["../outside.wav", "link.wav", f"file://{tmp_path}/outside.wav", "absent.wav", "\0", "x" * 300 + "."]
        for recording in (*outside, f"{base}/moved.wav", f"{base}/text", base.replace("127.0.0.1", "localhost")):
            answer = post(server, ref_audio=recording)
            assert answer.status_code == 400 and answer.json()["error"]["param"] == "ref_audio", recording
    assert asked == ["/me.wav", "/moved.wav", "/text"]


def test_a_checkpoint_that_does_not_clone_says_so(tiny):
    with Synthesizer.load(tiny, engine="single") as synthesizer, served(synthesizer, LIMITS) as server:
        error = post(server, ref_audio=data_url(WAV[:9_000])).json()["error"]
        assert (error["code"], error["param"]) == ("cloning_unavailable", "ref_audio")
