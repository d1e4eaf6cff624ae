"""The page: whole, from this server alone, and true to what it serves; in a real Chromium where there is one."""

import asyncio
import contextlib
import json
import re
import shutil
import subprocess
import sys
from pathlib import Path

import httpx
import numpy as np
import pytest
from absent import needs
from chromium import BINARY, MICROPHONE_RATE_HZ, NAMES, visited
from served import served

from mktts.server.app import PAGE
from mktts.server.settings import Limits
from mktts.server.voices import VoiceFolder
from mktts.spec import FRAME_RATE_HZ

KEY = "a/key=of-the+tests"
FRAMES = 12
LIMITS = Limits(max_duration_s=FRAMES / FRAME_RATE_HZ)
SPOKEN = f"{FRAMES / FRAME_RATE_HZ:.2f} s"
DONE = "document.querySelector('#speak').textContent === 'Speak' && !document.querySelector('#download').hidden"
needs_chromium = pytest.mark.skipif(BINARY is None, reason=f"no Chromium on this machine (looked for {NAMES})")
CHOSEN = "document.querySelector('#voices :checked')"
SILENCE = np.zeros(480, np.float32)
SCRIPTS = sorted(PAGE.glob("*.js"))


def test_the_page_and_what_it_loads_need_no_key_and_come_from_here(make_api):
    locked = make_api(api_key=KEY)
    page = locked.get("/")
    assert page.headers["Content-Type"].startswith("text/html") and "<textarea" in page.text
    for address in re.findall(r'(?:src|href)="([^"]+)"', page.text):
        if address != "data:,":
            assert not re.match(r"[a-z]+:|/", address), f"{address} leaves the server, or the path it lies behind"
            assert locked.get(f"/{address}").status_code == 200, address
    policy = page.headers["Content-Security-Policy"]
    assert policy.startswith("default-src 'none'") and "script-src 'self';" in policy
    assert not re.search(r"<style|<[^>]* (style|on\w+)=", page.text)  # which the policy forbids
    for path in (*SCRIPTS, *PAGE.glob("*.css")):
        answer = locked.get(f"/page/{path.name}")
        assert answer.content == path.read_bytes() and answer.headers["X-Content-Type-Options"] == "nosniff"
        assert not re.search(r"https?://\w|//cdn|@import", answer.text), path
    documented = locked.get("/docs").text
    loaded = re.findall(r'(?:src|href)="([^"]+)"', documented)
    assert loaded and not re.search(r"https?://|//cdn", documented)
    assert all(locked.get(address).status_code == 200 for address in loaded)
    for absent in ("none.js", "../app.py", "%2e%2e/app.py"):
        assert locked.get(f"/page/{absent}").status_code in (401, 404)


@pytest.mark.skipif(shutil.which("node") is None, reason="needs node")
def test_the_pages_pure_code_and_that_scripts_are_read_by_an_engine():
    commands = [(["node", Path(__file__).with_name("page_code.mjs"), PAGE], "")]
    commands += [(["node", "--input-type=module", "--check"], script.read_text(encoding="utf-8")) for script in SCRIPTS]
    for command, code in commands:
        done = subprocess.run(command, input=code, capture_output=True, text=True)
        assert done.returncode == 0, done.stderr


@contextlib.asynccontextmanager
async def opened(folder, synth, sound=SILENCE, **settings):
    """The server, and the page that a browser shows of it; with a key once it has been typed."""
    with served(synth, LIMITS, **settings) as server:
        async with visited(server.url, folder, sound, height=1_200) as page:
            if "api_key" in settings:
                await page.until("!document.querySelector('#key-row').hidden")
                await page.js(f"(k => {{ k.value = {json.dumps(KEY)}; k.onchange() }})(document.querySelector('#key'))")
            yield server, page


@needs_chromium
@pytest.mark.skipif(shutil.which("node") is None or shutil.which("curl") is None, reason="needs node and curl")
async def test_examples_of_other_programs_speak_as_they_are_copied_and_each_voice_has_a_sample(make_api, tmp_path):
    text = 'It\'s "quoted" & costs $5 \\ `so`.'
    async with opened(tmp_path, make_api().synth, api_key=KEY) as (server, page):
        await page.until("document.querySelectorAll('#voices span').length > 2")
        voice = await page.js("document.querySelectorAll('#voices input')[2].value")
        await page.click("#voices span:nth-child(3) input")
        await page.js(f"(t => {{ t.value = {json.dumps(text)}; t.oninput() }})(document.querySelector('#text'))")
        examples = {}
        for tab in range(await page.js("document.querySelectorAll('#tablist button').length")):
            await page.click(f"#tablist button:nth-child({tab + 1})")
            await page.click("#copy")
            assert await page.text("#copy") == "Copied"
            name = await page.text("#tablist [aria-selected=true]")
            examples[name] = (await page.js("getSelection().toString()")).replace("YOUR_KEY", KEY)
            assert KEY in examples[name] and voice in examples[name]
        await page.click("#voices span:nth-child(3) button")
        await page.until(DONE)
        assert await page.text("#sound") == SPOKEN and page.errors == []
        assert server.watched.streams.pop().settings["speaker"] == voice
        compile(examples["LiveKit"], "LiveKit", "exec")
        save = '; require("fs").writeFileSync("speech.mp3", Buffer.from(await sound.arrayBuffer()))'
        commands = {
            "curl": ["sh", "-c", examples["curl"]],
            "Python": [sys.executable, "-c", examples["Python"]],
            "JavaScript": ["node", "-e", f"(async () => {{ {examples['JavaScript'].split(' //')[0]}{save} }})()"],
            "Pipecat": [sys.executable, "-c", examples["Pipecat"]],
        }
        for name, command in commands.items():
            done = await asyncio.to_thread(subprocess.run, command, cwd=tmp_path, capture_output=True, text=True)
            assert done.returncode == 0, (name, done.stderr)
            if name != "Pipecat":
                assert server.watched.streams.pop().settings["text"] == text
                sound = (tmp_path / "speech.mp3").read_bytes()
                assert sound[:2] == b"\xff\xf3" or sound[:3] == b"ID3", name
                (tmp_path / "speech.mp3").unlink()


async def speak(page) -> None:
    await page.click("#speak")
    await page.until(DONE)
    assert await page.text("#sound") == SPOKEN, await page.text("#problem")
    # of the bytes that have come: the page writes their number into the header
    assert await page.js("document.querySelector('#player').duration") == pytest.approx(FRAMES / FRAME_RATE_HZ)
    assert re.fullmatch(r"\d+ ms", await page.text("#first-sound"))


@needs_chromium
async def test_an_audio_element_plays_an_address_and_jumps_in_it_but_not_on_a_page_from_elsewhere(synth, tmp_path):
    duration_s = LIMITS.max_frames / FRAME_RATE_HZ
    async with opened(tmp_path, synth) as (server, page):
        address = f"{server.url}/v1/audio/speech?input=Hello.&response_format=wav"
        event = "new Promise(done => {{ for (const name of ['{}', 'error']) sound['on' + name] = () => done(name) }})"
        await page.js(f"window.sound = new Audio('{address}&stream=false'); sound.load()")
        await page.until("sound.readyState >= 3")
        assert await page.js("sound.duration") == pytest.approx(duration_s)
        for part in (0.9, 0.2):
            await page.js(f"(sound.currentTime = {part * duration_s}, {event.format('seeked')})")
            assert await page.js("sound.currentTime") == pytest.approx(part * duration_s, abs=0.01)
        assert len(server.watched.streams) == 1
        await page.js(f"window.sound = new Audio('{address}'); sound.load()")
        await page.until("sound.readyState >= 3")
        assert len(server.watched.streams) == 2
        await page.go(f"{server.url.replace('127.0.0.1', 'localhost')}/health")  # another site
        await page.js(f"window.sound = new Audio('{address}')")
        assert await page.js(f"(sound.load(), {event.format('canplay')})") == "error"
        assert len(server.watched.streams) == 2
        await page.js("(sound = new Audio()).crossOrigin = 'anonymous'")
        assert await page.js(f"(sound.src = '{address}', {event.format('canplay')})") == "canplay"
        assert 'mktts_refused_total{code="foreign_origin"}' in httpx.get(f"{server.url}/metrics").text


@needs_chromium
@needs("av", "python_multipart")
async def test_the_page_asks_for_the_key_speaks_and_keeps_a_recorded_voice(make_api, tiny_base, tmp_path):
    folder = tmp_path / "voices"
    seconds = np.arange(20 * MICROPHONE_RATE_HZ) / MICROPHONE_RATE_HZ
    hum = 0.15 * sum(np.sin(2 * np.pi * 140 * k * seconds) / k for k in range(1, 8))
    settings = {"uploads": VoiceFolder(folder, 3), "api_key": KEY}
    synth = make_api(checkpoint=tiny_base).synth
    async with opened(tmp_path, synth, hum.astype(np.float32), **settings) as (server, page):
        await page.until("!document.querySelector('#keep-row').hidden")
        await page.js("document.querySelector('#seed').value = 7")
        await page.js("for (const part of document.querySelectorAll('details')) part.open = true")
        await page.click("#record")
        await page.until("document.querySelector('#recording').textContent.startsWith('Recording')")
        await page.js("new Promise(done => setTimeout(done, 1500))")
        await page.click("#record")
        await page.until("document.querySelector('#recording').textContent.includes('KiB')")
        await speak(page)  # with the recording as it is
        assert await page.js("document.querySelector('#problem').hidden") and await page.text("#drawn") == "seed 7"
        assert (await page.text("#first-byte")).endswith("ms") and (await page.text("#made")).endswith("ms")
        assert "ms" in await page.text("#late")
        assert await page.js("document.querySelector('#download').download") == "speech.wav"
        await page.js("document.querySelector('#name').value = 'mine'")
        await page.js("document.querySelector('#consent').value = 'It is my own voice.'")
        await page.click("#keep")
        await page.until(f"{CHOSEN}.value === 'mine'")
        assert len(list(folder.rglob("mine.safetensors"))) == 1
        await speak(page)
        await page.click("#delete")
        await page.until(f"{CHOSEN}.value === 'default'")
        assert not list(folder.rglob("mine.safetensors")) and page.errors == []
        asked = {address.split("/")[2] for address in page.requested if address.startswith("http")}
        assert asked == {server.url.removeprefix("http://")}
