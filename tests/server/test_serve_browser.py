"""The server's page, and pages of others, in a real Chromium."""

from __future__ import annotations

import json
import wave

import numpy as np
import pytest
from absent import needs
from chromium import FOREIGN_HOST, NAMES, binary, chromium
from served import first_speaker, served

from mktts.server import Limits
from mktts.server.uploads import VoiceFolder
from mktts.spec import FRAME_RATE_HZ
from mktts.synth import Synthesizer

pytestmark = pytest.mark.skipif(binary() is None, reason=f"no Chromium on this machine (looked for {NAMES})")
KEY = "a/key=of-the+tests"
FRAMES = 12
LIMITS = Limits(max_duration_s=FRAMES / FRAME_RATE_HZ)
SPOKEN = f"{FRAMES / FRAME_RATE_HZ:.2f} s"
RATE_HZ = 48_000
DONE = "!document.querySelector('#speak').disabled && !document.querySelector('#download').hidden"


@pytest.fixture(scope="module")
def browser(tmp_path_factory):
    """Its microphone hears a hum."""
    folder = tmp_path_factory.mktemp("chromium")
    seconds = np.arange(2 * RATE_HZ) / RATE_HZ
    hum = 0.3 * sum(np.sin(2 * np.pi * 140 * k * seconds) / k for k in range(1, 8))
    with wave.open(str(folder / "hum.wav"), "wb") as out:
        out.setparams((1, 2, RATE_HZ, 0, "NONE", ""))
        out.writeframes((hum * 16_000).astype("<i2").tobytes() * 10)
    with chromium(folder, folder / "hum.wav") as running:
        yield running


@pytest.fixture(scope="module")
def server(synthesizer):
    with served(synthesizer, LIMITS) as running:
        yield running


@pytest.fixture
async def page(browser, server):
    async with browser.tab(server.url) as tab:
        await tab.until("document.querySelector('#voice').options.length > 1")
        yield tab
        assert tab.errors == []
        assert {address.split("/")[2] for address in tab.requested if address.startswith("http")} == {
            server.url.removeprefix("http://")
        }


async def speak(page, format: str) -> None:
    await page.js(f"document.querySelector('#format').value = {format!r}")
    await page.click("#speak")
    await page.until(DONE)


async def test_it_speaks_and_says_when_the_first_sound_came_and_how_late_it_was(page):
    await page.js("document.querySelector('#seed').value = 7")
    await speak(page, "wav")
    assert await page.js("document.querySelector('#problem').hidden"), await page.text("#problem")
    assert (await page.text("#drawn"), await page.text("#sound")) == ("7", SPOKEN)
    assert (await page.text("#first-byte")).endswith("ms") and (await page.text("#made")).endswith("ms")
    assert 0 < float((await page.text("#first-sound")).split()[0]) < 10_000 and "ms" in await page.text("#late")
    assert await page.js("document.querySelector('#download').download") == "speech.wav"


async def test_a_server_with_a_key_asks_for_it(browser, synthesizer):
    with served(synthesizer, LIMITS, api_key=KEY) as locked:
        async with browser.tab(locked.url) as page:
            await page.until("!document.querySelector('#key-row').hidden")
            await page.js(
                f"(k => {{ k.value = {json.dumps(KEY)}; k.dispatchEvent(new Event('change')) }})"
                "(document.querySelector('#key'))"
            )
            await page.until("document.querySelector('#voice').options.length > 1")
            await speak(page, "wav")
            assert await page.text("#sound") == SPOKEN and page.errors == []


@needs("av", "qwen_tts", "python_multipart")
async def test_a_voice_is_recorded_kept_used_and_deleted(browser, tiny_base, tmp_path):
    folder = tmp_path / "voices"
    with (
        Synthesizer.load(tiny_base, engine="single") as synthesizer,
        served(synthesizer, LIMITS, uploads=VoiceFolder(folder, 3)) as server,
    ):
        async with browser.tab(server.url, height=1_200) as page:
            await page.until("!document.querySelector('#keep-row').hidden")
            await page.click("#record")
            await page.until("document.querySelector('#recording').textContent.startsWith('Recording')")
            await page.js("new Promise(done => setTimeout(done, 1500))")
            await page.click("#record")
            await page.until("document.querySelector('#recording').textContent.includes('KiB')")
            await speak(page, "wav")  # with the recording as it is
            assert await page.text("#sound") == SPOKEN, await page.text("#problem")
            await page.js("document.querySelector('#name').value = 'mine'")
            await page.js("document.querySelector('#consent').value = 'It is my own voice.'")
            await page.click("#keep")
            await page.until("document.querySelector('#voice').value === 'mine'")
            assert len(list(folder.rglob("mine.safetensors"))) == 1
            await speak(page, "wav")
            assert await page.text("#sound") == SPOKEN
            await page.click("#delete")
            await page.until("document.querySelector('#voice').value === 'default'")
            assert not list(folder.rglob("mine.safetensors")) and page.errors == []


async def test_a_page_of_this_machine_uses_http_and_one_from_elsewhere_nothing(browser, server, synthesizer, tiny):
    speech = json.dumps({"input": "Hello.", "voice": first_speaker(tiny), "response_format": "pcm"})
    with served(synthesizer, LIMITS) as other:  # another port: another origin
        ask = (
            f"fetch('{server.url}/v1/audio/speech', {{method: 'POST', body: {speech!r}, "
            "headers: {'Content-Type': 'application/json', 'X-Stainless-Lang': 'js'}})"
            ".then(r => r.arrayBuffer()).then(b => b.byteLength).catch(e => String(e))"
        )
        async with browser.tab(f"{other.url}/health") as page:
            assert await page.js(ask) == FRAMES * 3_840
        port = other.url.rpartition(":")[2]
        async with browser.tab(f"http://{FOREIGN_HOST}:{port}/health") as page:
            assert "foreign_host" in await page.text("body")
            assert "TypeError" in await page.js(ask)
