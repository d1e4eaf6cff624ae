"""The OpenAPI document is true: requests made of it, right and wrong ones, get the answers it promises."""

from __future__ import annotations

import subprocess
import sys

import httpx
import pytest
from served import served

from mktts.server import Limits
from mktts.spec import FRAME_RATE_HZ
from mktts.synth import Synthesizer

KEY = "a-key-of-the-tests"
MAX_CHARS = 200


@pytest.fixture(scope="module")
def synthesizer(tiny):
    with Synthesizer.load(tiny) as made:
        yield made


@pytest.mark.parametrize(
    ("key", "phases"), [(None, "examples,fuzzing"), (KEY, "examples,coverage,fuzzing")], ids=["no key", "key"]
)
def test_answers_to_generated_requests_are_the_documented_ones(synthesizer, tmp_path, key, phases):
    """All of schemathesis's checks but one: that every value of the schema is accepted. A schema cannot say that a
    text must hold something visible, so the document promises a refusal for one that does not. The 800 requests that
    cover the schema are the same with a key and without."""
    limits = Limits(max_duration_s=1 / FRAME_RATE_HZ, max_chars=MAX_CHARS)
    with served(synthesizer, limits, api_key=key) as server:
        command = [sys.executable, "-m", "schemathesis.cli", "run", f"{server.url}/openapi.json"]
        command += ["--exclude-checks", "positive_data_acceptance", "--phases", phases]
        command += ["--max-examples", "25", "--seed", "1", "--generation-database", "none", "--no-color"]
        if key is not None:
            command += ["--header", f"Authorization: Bearer {key}"]
        done = subprocess.run(command, capture_output=True, text=True, cwd=tmp_path, timeout=300)
        assert done.returncode == 0, done.stdout + done.stderr
        page = httpx.get(f"{server.url}/metrics", headers={"Authorization": f"Bearer {key}"}).text
        assert 'mktts_streams_total{reason="max_frames",route="tts_stream"}' in page, "nothing was spoken: " + page
        assert server.studio.streams_open == 0 and server.studio.health.status == "ok"


def test_the_document_names_the_speakers_and_limits_of_this_server(synthesizer):
    limits = Limits(max_duration_s=1 / FRAME_RATE_HZ, max_chars=MAX_CHARS)
    with served(synthesizer, limits) as server:
        document = httpx.get(f"{server.url}/openapi.json").json()
        health = httpx.get(f"{server.url}/health").json()
    speech = document["components"]["schemas"]["SpeechRequest"]["properties"]
    assert speech["speaker"]["anyOf"][0]["enum"] == health["speakers"] and speech["text"]["maxLength"] == MAX_CHARS
    assert speech["language"]["enum"][: len(health["languages"])] == health["languages"]
    assert "en" in speech["language"]["enum"] and "instruct" not in speech  # this checkpoint takes none
    assert speech["max_frames"]["anyOf"][0]["maximum"] == 1
    assert "securitySchemes" not in document["components"]
