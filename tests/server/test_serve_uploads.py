"""Voices that callers upload: kept as files of their owner alone, for a while, and gone everywhere once deleted."""

from __future__ import annotations

import json
import socket
import stat
import threading
import time
from pathlib import Path
from urllib.parse import urlsplit

import httpx
import numpy as np
import openai
import pytest
from absent import needs
from served import Served, served, until
from websockets.sync.client import connect

from mktts.audio import encoded, from_pcm16, to_pcm16
from mktts.model.voice import Voice
from mktts.server import Limits
from mktts.server.gate import owner_of
from mktts.server.schemas import UploadedVoice as UploadRecord
from mktts.server.uploads import VoiceFolder
from mktts.spec import SAMPLE_RATE_HZ
from mktts.synth import Synthesizer
from mktts.synth.cloning import clone_voice

pytestmark = needs("av", "qwen_tts", "python_multipart")
ANNA, BEN = "annas-key", "bens-key"
HOW = {"seed": 1, "max_frames": 4}
SAID = "What the reference says."
CONSENT = "I, Anna, agree that my voice is used here."
LIMITS = Limits(max_reference_s=2.0, max_reference_bytes=200_000, max_voices=3)


def hum(seconds: float = 1.0, pitch_hz: float = 140.0) -> np.ndarray:
    t = np.arange(round(seconds * SAMPLE_RATE_HZ)) / SAMPLE_RATE_HZ
    return (0.1 * sum(np.sin(2 * np.pi * pitch_hz * k * t) / k for k in range(1, 8))).astype(np.float32)


WAV, OTHER_WAV = encoded(hum(), "wav"), encoded(hum(pitch_hz=210.0), "wav")


@pytest.fixture(scope="module")
def synthesizer(tiny_base):
    with Synthesizer.load(tiny_base, engine="single") as made:
        yield made


@pytest.fixture
def folder(tmp_path) -> Path:
    return tmp_path / "voices"


@pytest.fixture
def server(synthesizer, folder):
    with served(synthesizer, LIMITS, uploads=VoiceFolder(folder, 3), api_key=[ANNA, BEN]) as running:
        yield running


@pytest.fixture(scope="module")
def refusing(synthesizer, tmp_path_factory):
    """A server, and its folder, for what is refused: none of it changes either."""
    folder = tmp_path_factory.mktemp("refusing") / "voices"
    with served(synthesizer, LIMITS, uploads=VoiceFolder(folder, 3), api_key=[ANNA, BEN]) as running:
        yield running, folder


@pytest.fixture(scope="module")
def said(tiny_base, synthesizer):
    """The PCM that a request in the voice of a recording must give."""
    made: dict[tuple[bytes, str | None], bytes] = {}

    def pcm(wav: bytes, transcript: str | None = None) -> bytes:
        if (wav, transcript) not in made:
            voice = clone_voice(tiny_base, from_pcm16(wav[44:]), SAMPLE_RATE_HZ, transcript)
            made[wav, transcript] = to_pcm16(synthesizer.say("Hello.", voice=voice, **HOW))
        return made[wav, transcript]

    return pcm


def bearer(key: str) -> dict[str, str]:
    return {"Authorization": f"Bearer {key}"}


def upload(server: Served, name: str = "anna", wav: bytes = WAV, key: str = ANNA, **fields: str) -> httpx.Response:
    form = {"name": name, "consent": CONSENT, **fields}
    files = {"audio_sample": ("me.wav", wav, "audio/wav")}
    return httpx.post(f"{server.url}/v1/audio/voices", data=form, files=files, headers=bearer(key), timeout=60)


def speak(server: Served, key: str = ANNA, **body: object) -> httpx.Response:
    body = {"input": "Hello.", "response_format": "pcm", **HOW, **body}
    return httpx.post(f"{server.url}/v1/audio/speech", json=body, headers=bearer(key), timeout=60)


def listed(server: Served, key: str = ANNA) -> list[str]:
    found = httpx.get(f"{server.url}/v1/audio/voices", headers=bearer(key)).json()
    names = [voice["name"] for voice in found["uploaded_voices"]]
    assert set(names) <= set(found["voices"])
    return names


def delete(server: Served, name: str = "anna", key: str = ANNA) -> httpx.Response:
    return httpx.delete(f"{server.url}/v1/audio/voices/{name}", headers=bearer(key))


def files(folder: Path) -> list[Path]:
    return sorted(path for path in folder.rglob("*") if path.is_file())


def test_an_uploaded_voice_speaks_as_its_recording_does_under_every_key_that_names_a_voice(server, said):
    answer = upload(server, "Anna", ref_text=SAID, speaker_description="warm narrator")
    assert answer.status_code == 200, answer.text
    kept, voice = answer.json(), answer.json()["voice"]
    assert (kept["object"], kept["id"], kept["success"]) == ("audio.voice", "anna", True)
    assert (voice["name"], voice["consent"], voice["ref_text"]) == ("anna", CONSENT, SAID)
    assert (voice["mime_type"], voice["file_size"]) == ("audio/wav", len(WAV))
    assert abs(voice["created_at"] - time.time()) < 60
    assert voice["expires_at"] - voice["created_at"] == LIMITS.voice_s
    for body in ({"voice": "anna"}, {"voice": "ANNA"}, {"ref_audio": "Anna"}, {"voice": {"id": "anna"}}):
        assert speak(server, **body).content == said(WAV, SAID), body
    plain = {"text": "Hello.", "speaker": "anna", **HOW}
    assert httpx.post(f"{server.url}/tts/stream", json=plain, headers=bearer(ANNA)).content == said(WAV, SAID)
    with connect(server.ws, additional_headers=bearer(ANNA)) as connection:
        connection.send(json.dumps({"type": "start", **plain}))
        pcm, message = b"", ""
        while '"finished"' not in message:
            received = connection.recv(timeout=60)
            pcm, message = (pcm + received, message) if isinstance(received, bytes) else (pcm, received)
    assert pcm == said(WAV, SAID)


def test_openais_client_uploads_a_voice_and_speaks_with_it(server, said):
    with openai.OpenAI(base_url=f"{server.url}/v1", api_key=ANNA, max_retries=0) as client:
        voice = client.audio.voices.create(name="anna", consent=CONSENT, audio_sample=("me.wav", WAV, "audio/wav"))
        assert (voice.id, voice.name) == ("anna", "anna")
        answer = client.audio.speech.create(
            model="x", input="Hello.", voice={"id": voice.id}, response_format="pcm", extra_body=HOW
        )
    assert answer.content == said(WAV)


def test_a_voice_belongs_to_the_key_that_made_it(server, said):
    upload(server)
    assert (listed(server), listed(server, BEN)) == (["anna"], [])
    refused = speak(server, BEN, voice="anna")
    assert (refused.status_code, refused.json()["error"]["code"]) == (400, "unknown_speaker")
    assert speak(server, BEN, ref_audio="anna").status_code == 400
    assert delete(server, key=BEN).status_code == 404
    upload(server, wav=OTHER_WAV, key=BEN)  # the same name, another voice
    assert speak(server, voice="anna").content == said(WAV)
    assert speak(server, BEN, voice="anna").content == said(OTHER_WAV)
    assert httpx.get(f"{server.url}/v1/audio/voices").status_code == 401


def test_the_file_is_a_voice_that_its_owner_alone_can_read_and_holds_neither_key_nor_recording(server, folder):
    upload(server, ref_text=SAID)
    (path,) = files(folder)
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert {stat.S_IMODE(part.stat().st_mode) for part in (folder, path.parent)} == {0o700}
    assert path.parent.name == owner_of(ANNA)
    assert Voice.load(path).transcript == SAID
    record = UploadRecord.model_validate_json(Voice.notes(path))
    assert (record.name, record.consent) == ("anna", CONSENT)
    content = path.read_bytes()
    assert ANNA.encode() not in content and WAV[2_000:2_100] not in content


def test_a_deleted_voice_is_gone_from_every_server_of_the_folder_and_from_its_caches(synthesizer, folder, server):
    upload(server, ref_text=SAID)
    with served(synthesizer, LIMITS, uploads=VoiceFolder(folder, 3), api_key=[ANNA, BEN]) as other:
        gone: list[Voice] = []
        forget = other.studio.uploads.on_gone
        other.studio.uploads.on_gone = lambda voice: (gone.append(voice), forget(voice))
        assert speak(other, voice="anna").status_code == 200
        used = other.studio.uploads.find(owner_of(ANNA), "anna")
        model = synthesizer._models.any()
        assert id(used.codes) in model.primed._states and any(used.digest in key for key in model.prompts._heads)
        answer = delete(server)
        assert (answer.status_code, answer.json()["deleted"]) == (200, True)
        assert files(folder) == []
        assert speak(other, voice="anna").status_code == 400 and listed(other) == []
        assert [voice is used for voice in gone] == [True]
        until(lambda: id(used.codes) not in model.primed._states, "the codec's state to be let go")
        until(lambda: not any(used.digest in key for key in model.prompts._heads), "the prompt's rows to be let go")
    assert delete(server).status_code == 404


def test_a_server_forgets_what_another_deleted_though_nobody_asks(synthesizer, folder, server, monkeypatch):
    monkeypatch.setattr("mktts.server.app._SWEEP_S", 0.05)
    upload(server)
    with served(synthesizer, LIMITS, uploads=VoiceFolder(folder, 3), api_key=ANNA) as other:
        gone: list[Voice] = []
        other.studio.uploads.on_gone = gone.append
        assert speak(other, voice="anna").status_code == 200
        delete(server)
        until(lambda: gone, "the other server to notice")


def test_an_upload_of_the_same_name_takes_its_place(server, said):
    upload(server)
    assert speak(server, voice="anna").content == said(WAV)
    upload(server, wav=OTHER_WAV)
    assert speak(server, voice="anna").content == said(OTHER_WAV)
    assert listed(server) == ["anna"]


def test_a_voice_expires_and_its_file_is_deleted(server, folder):
    assert upload(server, expires_in_s="1").status_code == 200
    assert upload(server, "later", expires_in_s=str(10**9)).json()["voice"]["expires_at"] < time.time() + 10**8
    until(lambda: listed(server) == ["later"], "the voice to expire")
    assert speak(server, voice="anna").status_code == 400
    assert [path.stem for path in files(folder)] == ["later"]


def test_what_has_expired_is_deleted_though_nobody_asks(folder, tiny_base):
    kept = VoiceFolder(folder, 3)
    voice = clone_voice(tiny_base, hum(), SAMPLE_RATE_HZ)
    what = {"name": "anna", "consent": CONSENT, "mime_type": "audio/wav", "file_size": 1}
    record = UploadRecord(**what, created_at=0, expires_at=1)
    kept.keep("nobody", voice, record)
    kept.sweep()
    assert files(folder) == []


def test_a_key_may_keep_so_many_voices(server, folder):
    for name in ("one", "two", "three", "two"):
        assert upload(server, name).status_code == 200
    refused = upload(server, "four").json()["error"]
    assert refused["code"] == "too_many_voices" and "3 voices" in refused["message"]
    assert upload(server, "four", key=BEN).status_code == 200
    assert len(files(folder)) == 4


CHANGED_FLAC = bytearray(encoded(hum(), "flac"))
CHANGED_FLAC[200:2_000] = bytes(1_800)
PLAYLIST = b"#EXTM3U\n#EXT-X-TARGETDURATION:1\n#EXTINF:1,\nfile:" + b"///etc/passwd\n"
GIANT = WAV[:4] + b"\xff\xff\xff\x7f" + WAV[8:24] + (2**31 - 1).to_bytes(4, "little") + WAV[28:]


@pytest.mark.parametrize(
    ("fields", "wav", "code", "param"),
    [
        ({"name": "../anna"}, WAV, "invalid_value", "name"),
        ({"name": ".anna"}, WAV, "invalid_value", "name"),
        ({"name": ""}, WAV, "invalid_value", "name"),
        ({"name": "a" * 65}, WAV, "invalid_value", "name"),
        ({"name": "Alloy"}, WAV, "name_taken", "name"),
        ({"name": "default"}, WAV, "name_taken", "name"),
        ({"consent": ""}, WAV, "invalid_value", "consent"),
        ({"consent": " \t"}, WAV, "invalid_value", "consent"),
        ({"consent": "x" * 2_001}, WAV, "invalid_value", "consent"),
        ({"ref_text": "x" * 5_001}, WAV, "ref_text_too_long", "ref_text"),
        ({"expires_in_s": "0"}, WAV, "invalid_value", "expires_in_s"),
        ({"expires_in_s": "soon"}, WAV, "invalid_value", "expires_in_s"),
        ({"colour": "red"}, WAV, "invalid_value", "colour"),
        ({}, b"", "bad_reference", "audio_sample"),
        ({}, b"not audio", "bad_reference", "audio_sample"),
        ({}, encoded(hum(3.0), "flac"), "bad_reference", "audio_sample"),
        ({}, encoded(0 * hum(), "wav"), "bad_reference", "audio_sample"),
        ({}, WAV[:60], "bad_reference", "audio_sample"),
        ({}, PLAYLIST, "bad_reference", "audio_sample"),
        ({}, GIANT, "bad_reference", "audio_sample"),
        ({}, b"\x1aE\xdf\xa3" + bytes(5_000), "bad_reference", "audio_sample"),
        ({}, b"\0\0\0\x20ftypM4A " + b"\xff" * 5_000, "bad_reference", "audio_sample"),
        ({}, bytes(200_001), "bad_reference", "audio_sample"),
    ],
    ids=lambda value: str(value)[:24],
)
def test_what_cannot_be_kept_is_one_line_and_leaves_nothing(refusing, fields, wav, code, param):
    server, folder = refusing
    answer = upload(server, **{"name": "anna", **fields}, wav=wav)
    error = answer.json()["error"]
    assert (answer.status_code, error["code"], error["param"]) == (400, code, param), error
    assert "\n" not in error["message"] and error["request_id"]
    assert files(folder) == [] and listed(server) == []


def test_a_broken_flac_is_a_voice_or_a_refusal_and_never_a_failure(server, folder):
    answer = upload(server, wav=bytes(CHANGED_FLAC))
    assert answer.status_code in (200, 400) and len(files(folder)) == (answer.status_code == 200)


@pytest.mark.parametrize(
    ("kind", "content", "status"),
    [
        ("text/plain", b"x", 400),
        ("application/json", b"{", 400),
        ("application/json", b"[" * 60_000, 400),
        ("application/json", b"null", 400),
        ("multipart/form-data", b"x", 400),
        ("multipart/form-data; boundary=x", b"--x\r\nnonsense", 400),
        ("multipart/form-data; boundary=x", b"--x\r\n" * 1_000, 400),
    ],
)
def test_a_body_that_is_no_upload_is_the_callers_mistake(refusing, kind, content, status):
    server, _ = refusing
    head = {**bearer(ANNA), "Content-Type": kind}
    answer = httpx.post(f"{server.url}/v1/audio/voices", content=content, headers=head)
    assert answer.status_code == status and answer.json()["error"]["type"] == "invalid_request_error"


@pytest.mark.parametrize("announced", [True, False], ids=["announced", "in chunks"])
def test_a_gigabyte_is_refused_at_once_and_read_no_further(server, announced):
    where = urlsplit(server.url)
    head = f"POST /v1/audio/voices HTTP/1.1\r\nHost: {where.netloc}\r\nAuthorization: Bearer {ANNA}\r\n"
    head += "Content-Type: multipart/form-data; boundary=x\r\n"
    head += f"Content-Length: {2**30}\r\n\r\n" if announced else "Transfer-Encoding: chunked\r\n\r\n"
    sent_bytes = 0
    with socket.create_connection((where.hostname, where.port), timeout=30) as connection:
        connection.sendall(head.encode())

        def send() -> None:
            nonlocal sent_bytes
            piece = bytes(2**16)
            try:
                while sent_bytes < 2**30:
                    connection.sendall(piece if announced else b"10000\r\n" + piece + b"\r\n")
                    sent_bytes += len(piece)
            except OSError:
                pass

        sending = threading.Thread(target=send, daemon=True)
        sending.start()
        assert b" 413 " in connection.recv(4_096).partition(b"\r\n")[0]
        sending.join(30)
    assert sent_bytes < 2**25


def test_a_server_without_a_folder_and_one_that_clones_nothing_say_so(synthesizer, tiny, folder):
    with served(synthesizer, LIMITS) as server:
        answer = upload(server)
        assert (answer.status_code, answer.json()["error"]["code"]) == (403, "uploads_off")
        assert delete(server).status_code == 403 and listed(server) == []
    with Synthesizer.load(tiny, engine="single") as other, served(other, uploads=VoiceFolder(folder, 3)) as server:
        assert upload(server).json()["error"]["code"] == "cloning_unavailable"


def test_a_file_that_is_no_upload_is_left_alone(folder, server):
    (folder / "notes.txt").write_text("mine")
    owned = folder / owner_of(ANNA)
    owned.mkdir()
    (owned / "broken.safetensors").write_bytes(b"no voice")
    assert listed(server) == [] and speak(server, voice="broken").status_code == 400
    server.studio.uploads.sweep()
    assert len(files(folder)) == 2


def test_neither_name_nor_statement_is_logged(server, caplog):
    caplog.set_level("DEBUG")
    upload(server, "annabella", ref_text=SAID)
    delete(server, "annabella")
    ours = [record.getMessage() for record in caplog.records if record.name.startswith("mktts")]
    assert len(ours) >= 2 and not [line for line in ours if "annabella" in line or "agree" in line or SAID in line]
