"""The page of the server in a real Chromium."""

from __future__ import annotations

import json
import wave

import numpy as np
import pytest
from absent import needs
from chromium import NAMES, binary, chromium
from fake_synthesizer import FakeSynthesizer
from served import served
from test_voices import Clones

from mktts.server import Limits
from mktts.server.uploads import VoiceFolder
from mktts.spec import FRAME_RATE_HZ

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


async def speak(page) -> None:
    await page.js("document.querySelector('#format').value = 'wav'")
    await page.click("#speak")
    await page.until(DONE)
    assert await page.text("#sound") == SPOKEN, await page.text("#problem")


async def test_it_asks_for_the_key_speaks_and_says_when_the_first_sound_came(browser, tiny):
    with served(FakeSynthesizer(tiny), LIMITS, api_key=KEY) as locked:
        async with browser.tab(locked.url) as page:
            await page.until("!document.querySelector('#key-row').hidden")
            await page.js(
                f"(k => {{ k.value = {json.dumps(KEY)}; k.dispatchEvent(new Event('change')) }})"
                "(document.querySelector('#key'))"
            )
            await page.until("document.querySelector('#voice').options.length > 1")
            await page.js("document.querySelector('#seed').value = 7")
            await speak(page)
            assert await page.js("document.querySelector('#problem').hidden") and await page.text("#drawn") == "7"
            assert (await page.text("#first-byte")).endswith("ms") and (await page.text("#made")).endswith("ms")
            assert "ms" in await page.text("#first-sound") and "ms" in await page.text("#late")
            assert await page.js("document.querySelector('#download').download") == "speech.wav"
            asked = {address.split("/")[2] for address in page.requested if address.startswith("http")}
            assert page.errors == [] and asked == {locked.url.removeprefix("http://")}


@needs("av", "python_multipart")
async def test_a_voice_is_recorded_kept_used_and_deleted(browser, tiny_base, tmp_path, monkeypatch):
    folder = tmp_path / "voices"
    Clones(monkeypatch)
    with served(FakeSynthesizer(tiny_base), LIMITS, uploads=VoiceFolder(folder, 3)) as server:
        async with browser.tab(server.url, height=1_200) as page:
            await page.until("!document.querySelector('#keep-row').hidden")
            await page.click("#record")
            await page.until("document.querySelector('#recording').textContent.startsWith('Recording')")
            await page.js("new Promise(done => setTimeout(done, 1500))")
            await page.click("#record")
            await page.until("document.querySelector('#recording').textContent.includes('KiB')")
            await speak(page)  # with the recording as it is
            await page.js("document.querySelector('#name').value = 'mine'")
            await page.js("document.querySelector('#consent').value = 'It is my own voice.'")
            await page.click("#keep")
            await page.until("document.querySelector('#voice').value === 'mine'")
            assert len(list(folder.rglob("mine.safetensors"))) == 1
            await speak(page)
            await page.click("#delete")
            await page.until("document.querySelector('#voice').value === 'default'")
            assert not list(folder.rglob("mine.safetensors")) and page.errors == []
