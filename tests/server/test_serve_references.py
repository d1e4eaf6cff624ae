"""Recordings that requests bring: what of them is cloned, from where they may come, within which limits. In process."""

from __future__ import annotations

import base64
import http.server
import threading

import numpy as np
import pytest
from absent import needs
from clones import Clones, hum, voice_of

from mktts.audio import encoded, from_pcm16
from mktts.errors import BackendUnavailable, VoiceError
from mktts.server import Limits
from mktts.server.references import ReferenceSources

pytestmark = needs("av")
SAID = "What the reference says."
LIMITS = Limits(max_reference_s=2.0, max_reference_bytes=200_000)
WAV = encoded(hum(), "wav")


@pytest.fixture
def clones(monkeypatch) -> Clones:
    return Clones(monkeypatch)


@pytest.fixture(scope="module")
def base_api(make_api, tiny_base):
    return make_api(checkpoint=tiny_base, limits=LIMITS)


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


def data_url(data: bytes) -> str:
    return f"data:audio/wav;base64,{base64.b64encode(data).decode()}"


@pytest.mark.parametrize(
    ("body", "said"),
    [
        ({"ref_audio": data_url(WAV), "ref_text": SAID, "task_type": "Base"}, SAID),
        ({"ref_audio": base64.b64encode(WAV).decode(), "ref_text": f" {SAID}\n"}, SAID),
        ({"ref_audio": [base64.urlsafe_b64encode(WAV).decode().rstrip("=")], "voice": "alloy"}, None),
        ({"ref_audio": data_url(WAV), "ref_text": SAID, "x_vector_only_mode": True}, None),
    ],
    ids=["data URL", "base64", "one in a list", "x-vector"],
)
def test_a_recording_is_cloned_and_its_voice_speaks(make_api, tiny_base, clones, body, said):
    api = make_api(checkpoint=tiny_base, limits=LIMITS)
    for _ in range(2):  # the next request with the same one need not make it again
        assert api.speech(**body).status_code == 200
        assert api.synth.streams[-1].settings["voice"] is clones.made[0]
    ((pcm, rate_hz, transcript),) = clones.asked
    assert np.array_equal(pcm, from_pcm16(WAV[44:])) and (rate_hz, transcript) == (24_000, said)


@pytest.mark.parametrize(
    ("body", "code", "param", "message"),
    [
        ({"ref_audio": data_url(b"hello")}, "bad_reference", "ref_audio", "expected audio"),
        ({"ref_audio": data_url(encoded(hum(3.0), "flac"))}, "bad_reference", "ref_audio", "may last 2 s"),
        ({"ref_audio": data_url(bytes(200_001))}, "bad_reference", "ref_audio", "may have 200000 bytes"),
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
def test_what_cannot_be_cloned_is_one_line_under_the_callers_key(base_api, clones, body, code, param, message):
    answer = base_api.speech(**body)
    error = answer.json()["error"]
    assert (answer.status_code, error["code"], error["param"]) == (400, code, param), error
    assert message in error["message"] and "\n" not in error["message"] and clones.asked == []


@pytest.mark.parametrize(
    ("error", "code"),
    [(VoiceError("too quiet"), "bad_reference"), (BackendUnavailable("no qwen_tts"), "cloning_unavailable")],
)
def test_what_cloning_refuses_is_the_callers_mistake(base_api, monkeypatch, error, code):
    monkeypatch.setattr("mktts.server.references.clone_voice", lambda *_: (_ for _ in ()).throw(error))
    found = base_api.speech(ref_audio=data_url(encoded(hum(0.5), "wav"))).json()["error"]
    assert (found["code"], found["param"]) == (code, "ref_audio") and str(error) in found["message"]


def test_a_body_beyond_the_recordings_limit_and_a_checkpoint_that_does_not_clone_are_told(base_api, api):
    answer = base_api.speech(ref_audio=data_url(bytes(2_000_000)))
    assert (answer.status_code, answer.json()["error"]["code"]) == (413, "body_too_large")
    error = api.speech(ref_audio=data_url(WAV[:9_000])).json()["error"]
    assert (error["code"], error["param"]) == ("cloning_unavailable", "ref_audio")


def test_a_saved_voice_goes_by_its_name(make_api, tiny_base, clones):
    anna = voice_of(tiny_base, 1)
    api = make_api(checkpoint=tiny_base, voices={"anna": anna})
    assert api.speech(ref_audio="Anna").status_code == 200
    assert api.synth.streams[0].settings["voice"] is anna and clones.asked == []


def test_addresses_and_files_only_where_the_server_was_told(make_api, tiny_base, clones, files, tmp_path):
    base, asked = files
    (tmp_path / "outside.wav").write_bytes(WAV)
    folder = tmp_path / "recordings"
    folder.mkdir()
    (folder / "me.wav").write_bytes(WAV)
    (folder / "link.wav").symlink_to(tmp_path / "outside.wav")
    sources = ReferenceSources(frozenset({"127.0.0.1"}), folder)
    api = make_api(checkpoint=tiny_base, limits=LIMITS, sources=sources)
    for recording in (f"{base}/me.wav", "me.wav", f"file://{folder}/me.wav"):
        assert api.speech(ref_audio=recording).status_code == 200, recording
    assert len(clones.asked) == 1  # the same recording each time
    outside = ["../outside.wav", "link.wav", f"file://{tmp_path}/outside.wav", "absent.wav", "\0", "x" * 300 + "."]
    for recording in (*outside, f"{base}/moved.wav", f"{base}/text", base.replace("127.0.0.1", "localhost")):
        answer = api.speech(ref_audio=recording)
        assert answer.status_code == 400 and answer.json()["error"]["param"] == "ref_audio", recording
    assert asked == ["/me.wav", "/moved.wav", "/text"]
