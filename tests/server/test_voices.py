"""Voices of callers: recordings that requests bring, and uploads that are kept for a while, their owner's alone."""

import base64
import stat
import time
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import numpy as np
import pytest
import torch
from absent import needs
from served import plain_voice, until
from sounds import tone

from mktts.audio import encoded, from_pcm16
from mktts.checkpoint import Checkpoint
from mktts.errors import BackendUnavailable, ServerError, VoiceError
from mktts.model.voice import Voice
from mktts.server.access import owner_of
from mktts.server.schemas import UploadedVoice
from mktts.server.settings import Limits
from mktts.server.voices import VoiceFolder
from mktts.synth.cloning import clone_voice

pytestmark = needs("av", "python_multipart")
ANNA, BEN = "annas-key", "bens-key"
SAID = "What the reference says."
CONSENT = "I, Anna, agree that my voice is used here."
LIMITS = Limits(max_reference_s=2.0, max_reference_bytes=200_000, max_voices=3)
WAV, OTHER_WAV = encoded(tone(1.0), "wav"), encoded(tone(1.0, 300.0), "wav")
PLAYLIST = b"#EXTM3U\n#EXT-X-TARGETDURATION:1\n#EXTINF:1,\nfile:" + b"///etc/passwd\n"
GIANT = WAV[:4] + b"\xff\xff\xff\x7f" + WAV[8:24] + (2**31 - 1).to_bytes(4, "little") + WAV[28:]


@pytest.fixture
def clones(monkeypatch) -> list[tuple[np.ndarray, int, str | None, Voice]]:
    """PCM, rate and transcript of each call of `clone_voice`, and what it made."""
    calls = []

    def noted(checkpoint: Checkpoint, *asked: Any) -> Voice:
        calls.append((*asked, clone_voice(checkpoint, *asked)))
        return calls[-1][-1]

    monkeypatch.setattr("mktts.server.openai_routes.clone_voice", noted)
    return calls


@pytest.fixture(scope="module")
def base_api(make_api, tiny_base):
    return make_api(checkpoint=tiny_base, limits=LIMITS)


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
        assert api.synth.streams[-1].settings["voice"] is clones[0][-1]
    ((pcm, rate_hz, transcript, _),) = clones
    assert np.array_equal(pcm, from_pcm16(WAV[44:])) and (rate_hz, transcript) == (24_000, said)


@pytest.mark.parametrize(
    ("body", "code", "param", "message"),
    [
        ({"ref_audio": data_url(b"hello")}, "bad_reference", "ref_audio", "expected audio"),
        ({"ref_audio": data_url(encoded(tone(3.0), "flac"))}, "bad_reference", "ref_audio", "may last 2 s"),
        ({"ref_audio": data_url(bytes(200_001))}, "bad_reference", "ref_audio", "may have 200000 bytes"),
        ({"ref_audio": "data:audio/wav;base64,!!"}, "bad_reference", "ref_audio", "base64"),
        *[
            ({"ref_audio": elsewhere}, "reference_not_allowed", "ref_audio", "nothing else is read")
            for elsewhere in ("file:/" + "/etc/passwd", "me.wav", "../" * 40, "https://files.example/me.wav", "\0")
        ],
        ({"ref_text": SAID}, "bad_reference", "ref_text", "expected a ref_audio"),
        ({"ref_audio": data_url(WAV), "x_vector_only_mode": False}, "bad_reference", "ref_text", "ref_text"),
        ({"ref_audio": data_url(WAV), "voice": "anna"}, "two_voices", "ref_audio", "expected either this or voice"),
        ({"ref_audio": data_url(WAV), "ref_text": "x" * 5_001}, "ref_text_too_long", "ref_text", "characters"),
        ({"ref_audio": [WAV.hex(), WAV.hex()]}, "invalid_value", "ref_audio", "string"),
    ],
    ids=lambda value: str(value)[:30],
)
def test_what_cannot_be_cloned_is_one_line_under_the_callers_key(base_api, clones, body, code, param, message):
    answer = base_api.speech(**body)
    error = answer.json()["error"]
    assert (answer.status_code, error["code"], error["param"]) == (400, code, param), error
    assert message in error["message"] and "\n" not in error["message"] and clones == []


def test_what_cloning_refuses_and_a_body_beyond_the_limit_are_the_callers_mistake(base_api, shared_api, monkeypatch):
    for refusal, code in ((VoiceError, "bad_reference"), (BackendUnavailable, "cloning_unavailable")):
        monkeypatch.setattr("mktts.server.openai_routes.clone_voice", Mock(side_effect=refusal("too quiet")))
        found = base_api.speech(ref_audio=data_url(encoded(tone(0.5), "wav"))).json()["error"]
        assert (found["code"], found["param"]) == (code, "ref_audio") and "too quiet" in found["message"]
    answer = base_api.speech(ref_audio=data_url(bytes(2_000_000)))
    assert (answer.status_code, answer.json()["error"]["code"]) == (413, "body_too_large")
    error = shared_api.speech(ref_audio=data_url(WAV[:9_000])).json()["error"]
    assert (error["code"], error["param"]) == ("cloning_unavailable", "ref_audio")


# ---- uploads


@pytest.fixture
def folder(tmp_path) -> Path:
    return tmp_path / "voices"


@pytest.fixture
def api(make_api, tiny_base, folder, clones):
    return make_api(checkpoint=tiny_base, limits=LIMITS, uploads=VoiceFolder(folder, 3), api_key=[ANNA, BEN])


def bearer(key: str) -> dict[str, str]:
    return {"Authorization": f"Bearer {key}"}


def upload(api: Any, name: str = "anna", wav: bytes = WAV, key: str = ANNA, **fields: str) -> Any:
    form = {"name": name, "consent": CONSENT, **fields}
    files = {"audio_sample": ("me.wav", wav, "audio/wav")}
    return api.post("/v1/audio/voices", data=form, files=files, headers=bearer(key))


def spoken(api: Any, key: str = ANNA, **body: object) -> Voice | int:
    """The voice that a request speaks with; the status where it is refused."""
    body = {"input": "Hello.", "response_format": "pcm", "max_frames": 1, **body}
    answer = api.post("/v1/audio/speech", json=body, headers=bearer(key))
    return api.synth.streams[-1].settings["voice"] if answer.status_code == 200 else answer.status_code


def listed(api: Any, key: str = ANNA) -> list[str]:
    found = api.get("/v1/audio/voices", headers=bearer(key)).json()
    names = [voice["name"] for voice in found["uploaded_voices"]]
    assert set(names) <= set(found["voices"])
    return names


def delete(api: Any, name: str = "anna", key: str = ANNA) -> Any:
    return api.delete(f"/v1/audio/voices/{name}", headers=bearer(key))


def files(folder: Path) -> list[Path]:
    return sorted(path for path in folder.rglob("*") if path.is_file())


def record(name: str, expires_at: int = 2**40) -> UploadedVoice:
    what = {"consent": CONSENT, "mime_type": "audio/wav", "file_size": 1, "created_at": 0}
    return UploadedVoice(name=name, expires_at=expires_at, **what)


def same(one: Voice, other: Voice) -> bool:
    return torch.equal(one.embedding, other.embedding) and one.transcript == other.transcript


def test_an_uploaded_voice_is_its_owners_file_and_speaks_under_every_key_that_names_a_voice(api, folder, clones):
    answer = upload(api, "Anna", ref_text=SAID, speaker_description="warm narrator")
    assert answer.status_code == 200, answer.text
    kept, voice = answer.json(), answer.json()["voice"]
    assert (kept["object"], kept["id"], kept["name"], kept["success"]) == ("audio.voice", "anna", "anna", True)
    assert (voice["name"], voice["consent"], voice["ref_text"]) == ("anna", CONSENT, SAID)
    assert (voice["mime_type"], voice["file_size"]) == ("audio/wav", len(WAV))
    assert abs(voice["created_at"] - time.time()) < 60
    assert voice["expires_at"] - voice["created_at"] == 30 * 24 * 3_600
    (path,) = files(folder)  # which no one else can read, and which has neither key nor recording
    assert stat.S_IMODE(path.stat().st_mode) == 0o600 and path.parent.name == owner_of(ANNA)
    assert {stat.S_IMODE(part.stat().st_mode) for part in (folder, path.parent)} == {0o700}
    notes, content = UploadedVoice.model_validate_json(Voice.notes(path)), path.read_bytes()
    assert (notes.name, notes.consent) == ("anna", CONSENT)
    assert ANNA.encode() not in content + bytes(path) and WAV[2_000:2_100] not in content
    used = spoken(api, voice="anna")
    assert same(used, clones[0][-1]) and clones[0][1:3] == (24_000, SAID)
    for body in ({"voice": "ANNA"}, {"ref_audio": "Anna"}, {"voice": {"id": "anna"}}):
        assert spoken(api, **body) is used, body
    api.headers.update(bearer(ANNA))
    assert api.tts(speaker="anna").status_code == 200
    with api.open_socket() as socket:
        socket.send_json({"type": "start", "text": "Hello.", "speaker": "anna", "max_frames": 1})
        assert socket.receive_json()["type"] == "started"
    assert [stream.settings["voice"] is used for stream in api.synth.streams[-2:]] == [True, True]


def test_a_voice_belongs_to_the_key_that_made_it(api, clones):
    upload(api)
    assert (listed(api), listed(api, BEN)) == (["anna"], [])
    for name in ("anna", f"../{owner_of(ANNA)}/anna"):
        assert spoken(api, BEN, voice=name) == spoken(api, BEN, ref_audio=name) == 400
    assert delete(api, key=BEN).status_code == 404
    upload(api, wav=OTHER_WAV, key=BEN)  # the same name, another voice
    assert same(spoken(api, voice="anna"), clones[0][-1])
    assert same(spoken(api, BEN, voice="anna"), clones[1][-1])


def test_a_deleted_or_replaced_voice_is_gone_from_every_server_of_the_folder(make_api, tiny_base, folder, api, clones):
    def heard() -> int:
        """How many streams there are once its address, whose sound is kept, has been asked for; or a status."""
        at = "/v1/audio/speech?input=Hello.&voice=anna&stream=false&response_format=pcm&max_frames=1"
        answer = api.get(at, headers=bearer(ANNA))
        return len(api.synth.streams) if answer.status_code == 200 else answer.status_code

    upload(api)
    assert heard() == heard() == 1
    other = make_api(checkpoint=tiny_base, limits=LIMITS, uploads=VoiceFolder(folder, 3), api_key=ANNA)
    used = spoken(other, voice="anna")
    upload(api, wav=OTHER_WAV)
    assert listed(api) == ["anna"] and heard() == 2
    replaced = spoken(other, voice="anna")
    assert same(replaced, clones[1][-1]) and other.synth.forgotten == [used]
    answer = delete(api)
    assert (answer.status_code, answer.json()["deleted"]) == (200, True) and files(folder) == []
    assert spoken(other, voice="anna") == heard() == 400 and listed(other) == []
    assert other.synth.forgotten == [used, replaced] and delete(api).status_code == 404


def test_a_server_forgets_what_another_deleted_though_nobody_asks(api, monkeypatch):
    monkeypatch.setattr("mktts.server.app._SWEEP_S", 0.02)
    upload(api)
    used = spoken(api, voice="anna")
    VoiceFolder(api.service.uploads.folder, 3).delete(owner_of(ANNA), "anna")
    with api:  # as the server runs it
        until(lambda: api.synth.forgotten == [used], "the server to notice")


def test_what_has_expired_is_deleted_asked_for_or_not(api, folder, tiny_base):
    assert upload(api, expires_in_s="1").status_code == 200
    assert upload(api, "later", expires_in_s=str(10**9)).json()["voice"]["expires_at"] < time.time() + 10**8
    api.service.uploads.keep("nobody", plain_voice(tiny_base), record("ben", expires_at=1))
    api.service.uploads.sweep()
    assert "ben" not in [path.stem for path in files(folder)]
    until(lambda: listed(api) == ["later"], "the voice to expire")
    assert spoken(api, voice="anna") == 400 and [path.stem for path in files(folder)] == ["later"]


def test_a_key_may_keep_so_many_voices(api, folder, tiny_base):
    for name in ("one", "two", "three", "two"):
        api.service.uploads.keep(owner_of(ANNA), plain_voice(tiny_base), record(name))
    refused = upload(api, "four").json()["error"]
    assert refused["code"] == "too_many_voices" and "3 voices" in refused["message"]
    assert upload(api, "four", key=BEN).status_code == 200 and len(files(folder)) == 4


def test_a_voice_that_cannot_be_written_is_an_error_that_says_so(api, folder, caplog):
    folder.rmdir()
    answer = upload(api)
    error = answer.json()["error"]
    assert (answer.status_code, error["code"], error["type"]) == (500, "voice_not_kept", "server_error")
    assert "could not be kept" in error["message"] and "No such file or directory" in error["message"]
    assert error["message"] in caplog.messages and listed(api) == []
    folder.mkdir()
    assert upload(api).status_code == 200


@pytest.mark.parametrize(
    ("fields", "wav", "code", "param"),
    [
        *[({"name": name}, WAV, "invalid_value", "name") for name in ("../anna", ".anna", "", "a" * 65)],
        *[({"name": name}, WAV, "name_taken", "name") for name in ("Alloy", "default")],
        *[({"consent": words}, WAV, "invalid_value", "consent") for words in ("", " \t", "x" * 2_001)],
        ({"ref_text": "x" * 5_001}, WAV, "ref_text_too_long", "ref_text"),
        *[({"expires_in_s": age}, WAV, "invalid_value", "expires_in_s") for age in ("0", "soon", "9" * 5_000)],
        ({"colour": "red"}, WAV, "invalid_value", "colour"),
        ({"type": "prompt"}, WAV, "invalid_value", "type"),
        ({}, encoded(tone(3.0), "flac"), "bad_reference", "audio_sample"),
        ({}, PLAYLIST, "bad_reference", "audio_sample"),
        ({}, GIANT, "bad_reference", "audio_sample"),
        ({}, b"\x1aE\xdf\xa3" + bytes(5_000), "bad_reference", "audio_sample"),
        ({}, b"\0\0\0\x20ftypM4A " + b"\xff" * 5_000, "bad_reference", "audio_sample"),
        ({}, bytes(200_001), "bad_reference", "audio_sample"),
    ],
    ids=lambda value: str(value)[:24],
)
def test_what_cannot_be_kept_is_one_line_and_leaves_nothing(api, folder, fields, wav, code, param):
    answer = upload(api, **{"name": "anna", **fields}, wav=wav)
    error = answer.json()["error"]
    assert (answer.status_code, error["code"], error["param"]) == (400, code, param), error
    assert "\n" not in error["message"] and error["request_id"] and files(folder) == [] and listed(api) == []


def test_a_body_that_is_no_upload_is_the_callers_mistake(api):
    for kind, content in (
        ("text/plain", b"x"),
        ("application/json", b"{"),
        ("application/json", b'{"name": "anna"}'),
        ("multipart/form-data", b"x"),
        ("multipart/form-data; boundary=x", b"--x\r\nnonsense"),
        ("multipart/form-data; boundary=x", b"--x\r\n" * 1_000),
    ):
        answer = api.post("/v1/audio/voices", content=content, headers={**bearer(ANNA), "Content-Type": kind})
        assert answer.status_code == 400 and answer.json()["error"]["type"] == "invalid_request_error", content[:20]


def test_a_server_without_a_folder_and_one_that_clones_nothing_say_so(make_api, tiny_base, folder):
    plain = make_api(checkpoint=tiny_base)
    answer = upload(plain)
    assert (answer.status_code, answer.json()["error"]["code"]) == (403, "uploads_off")
    assert delete(plain).status_code == 403 and listed(plain) == []
    assert upload(make_api(uploads=VoiceFolder(folder, 3))).json()["error"]["code"] == "cloning_unavailable"


def test_a_file_that_is_no_upload_is_left_alone(api, folder):
    (folder / "notes.txt").write_text("mine")
    owned = folder / owner_of(ANNA)
    owned.mkdir()
    (owned / "broken.safetensors").write_bytes(b"no voice")
    assert listed(api) == [] and spoken(api, voice="broken") == 400
    api.service.uploads.sweep()
    assert len(files(folder)) == 2
    with pytest.raises(ServerError, match="expected a folder to read and write"):
        VoiceFolder(folder / "notes.txt", 3)


def test_neither_name_nor_statement_is_logged(api, caplog):
    caplog.set_level("DEBUG")
    upload(api, "annabella", ref_text=SAID)
    delete(api, "annabella")
    ours = [record.getMessage() for record in caplog.records if record.name.startswith("mktts")]
    assert len(ours) >= 2 and not [line for line in ours if "annabella" in line or "agree" in line or SAID in line]
