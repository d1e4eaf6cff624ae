"""The OpenAPI document is true: requests made of it, right and wrong ones, get the answers it promises."""

from __future__ import annotations

import subprocess
import sys

import httpx
from fake_synthesizer import FakeSynthesizer
from served import served

from mktts.server import Limits
from mktts.spec import FRAME_RATE_HZ

KEY = "a-key-of-the-tests"


def test_answers_to_generated_requests_are_the_documented_ones(tiny, tmp_path):
    """All of schemathesis's checks but one: that every value of the schema is accepted. A schema cannot say that a
    text must hold something visible, so the document promises a refusal for one that does not."""
    limits = Limits(max_duration_s=1 / FRAME_RATE_HZ, max_chars=200)
    with served(FakeSynthesizer(tiny), limits, api_key=KEY) as server:
        command = [sys.executable, "-m", "schemathesis.cli", "run", f"{server.url}/openapi.json"]
        command += ["--header", f"Authorization: Bearer {KEY}", "--exclude-checks", "positive_data_acceptance"]
        command += ["--phases", "examples,coverage,fuzzing", "--max-examples", "10", "--seed", "1"]
        command += ["--generation-database", "none", "--no-color"]
        done = subprocess.run(command, capture_output=True, text=True, cwd=tmp_path, timeout=300)
        assert done.returncode == 0, done.stdout + done.stderr
        page = httpx.get(f"{server.url}/metrics", headers={"Authorization": f"Bearer {KEY}"}).text
        assert 'mktts_streams_total{reason="max_frames",route="tts_stream"}' in page, "nothing was spoken: " + page
        assert server.studio.streams_open == 0 and server.studio.health.status == "ok"
