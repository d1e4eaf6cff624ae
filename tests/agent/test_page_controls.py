"""The page's devices, its text input and its event log, in a real Chromium against a bot that does what is told."""

from __future__ import annotations

import json

import numpy as np
import pytest
from chromium import NAMES, binary

pytestmark = pytest.mark.skipif(binary() is None, reason=f"no Chromium on this machine (looked for {NAMES})")

OPTIONS = "[...document.querySelector('#{}').options].map(o => o.textContent)"
LOG = "[...document.querySelectorAll('#log li')].map(l => [...l.children].slice(1).map(c => c.textContent))"


async def typed(page, text: str) -> None:
    await page.js(f"document.querySelector('#typed').value = {json.dumps(text)}")
    await page.click("#send")


async def test_microphones_have_names_once_one_was_allowed_and_another_goes_on_in_the_middle(talk, bot):
    await talk.until("document.querySelector('#microphone').options.length > 2")
    names = await talk.js(OPTIONS.format("microphone"))
    assert names[0] == "default microphone" and any("Fake" in name for name in names[1:])
    asked = (
        "navigator.mediaDevices.getUserMedia = (ask => c => (window.asked = c, ask.call(navigator.mediaDevices, c)))"
    )
    await talk.js(f"void ({asked}(navigator.mediaDevices.getUserMedia))")
    chosen = await talk.js(
        "(l => (l.selectedIndex = 2, l.dispatchEvent(new Event('change')), l.value))"
        "(document.querySelector('#microphone'))"
    )
    await talk.until("window.asked")
    assert await talk.js("asked.audio.deviceId.exact") == chosen
    await bot.new_frames(25)
    assert np.abs(await bot.new_frames(60)).max() > 0
    assert await talk.js("document.querySelector('#status').textContent") == "Listening"
    await talk.click("#stop")
    await bot.until(lambda: bot.closed == 1, "the end")
    await talk.click("#start")  # the next conversation takes it too
    await bot.new_frames(10)
    assert await talk.js("asked.audio.deviceId.exact") == chosen


async def test_the_chosen_loudspeaker_is_the_one_that_plays(page, bot):
    await page.js(
        "AudioContext.prototype.setSinkId = async function (id) { (window.sinks ??= []).push(id) };"
        "navigator.mediaDevices.enumerateDevices = async () => ["
        "{ kind: 'audiooutput', deviceId: 'one', label: 'a loudspeaker' }];"
        "void navigator.mediaDevices.dispatchEvent(new Event('devicechange'))"
    )
    await page.until("document.querySelector('#speaker').options.length === 2")
    await page.js("document.querySelector('#speaker').value = 'one'")
    await page.click("#start")
    await bot.until(lambda: bot.messages, "hello")
    await page.until("window.sinks?.[0] === 'one'")
    await page.js("void (navigator.mediaDevices.enumerateDevices = async () => [])")
    await page.js("void navigator.mediaDevices.dispatchEvent(new Event('devicechange'))")
    await page.until("window.sinks.at(-1) === ''")  # unplugged: the default one goes on
    assert await page.js("document.querySelector('#speaker').value") == ""


async def test_of_two_lists_of_devices_the_one_asked_for_later_counts(page):
    await page.js(
        "const speaker = id => [{ kind: 'audiooutput', deviceId: id, label: id }];"
        "const ask = (answer, ms) => { navigator.mediaDevices.enumerateDevices = () => new Promise(done => "
        "setTimeout(() => (window.answered = (window.answered ?? 0) + 1, done(answer)), ms));"
        "navigator.mediaDevices.dispatchEvent(new Event('devicechange')) };"
        "ask(speaker('old'), 300); ask(speaker('new'), 10)"
    )
    await page.until("window.answered === 2")
    assert await page.js(OPTIONS.format("speaker")) == ["default loudspeaker", "new"]


async def test_a_microphone_that_fails_is_told_and_the_conversation_goes_on(talk, bot):
    await talk.js(
        "navigator.mediaDevices.getUserMedia = async () => { throw new DOMException('', 'OverconstrainedError') };"
        "void document.querySelector('#microphone').dispatchEvent(new Event('change'))"
    )
    await talk.until("document.querySelector('#problem').textContent.includes('is gone')")
    await bot.new_frames(10)


async def test_what_is_typed_is_sent_and_m_in_it_does_not_mute(talk, bot):
    await talk.js("document.querySelector('#typed').focus()")
    for key in "hmm":
        await talk.press(key)
    await talk.press("Enter")
    await bot.until(lambda: bot.messages[-1] == {"type": "text", "text": "hmm"}, "the text")
    assert await talk.js("document.querySelector('#typed').value") == ""
    await typed(talk, "   ")
    await typed(talk, " again ")
    await bot.until(lambda: bot.messages[-1] == {"type": "text", "text": "again"}, "the second text")
    assert [message["type"] for message in bot.messages] == ["hello", "text", "text"]


async def test_typing_starts_a_conversation_that_needs_no_microphone(page, bot):
    await page.js("void (navigator.mediaDevices.getUserMedia = () => window.asked = true)")
    bot.config["transports"] = ["webrtc", "websocket"]
    await page.command("Page.reload")
    await page.until("document.readyState === 'complete' && !document.querySelector('#typed').disabled")
    await page.js("void (navigator.mediaDevices.getUserMedia = () => window.asked = true)")
    await typed(page, "hello")
    await bot.until(lambda: bot.messages == [{"type": "text", "text": "hello"}], "the text")
    await bot.play(0.2)
    await page.until("Number(document.querySelector('#played').textContent) > 0")
    assert bot.frames == [] and not await page.js("window.asked")
    await page.click("#stop")
    await bot.until(lambda: bot.closed == 1, "the end")


async def test_the_log_says_what_happened_and_can_be_copied(talk, bot):
    await bot.send("ready", session="cafe")
    await bot.send("state", user="silent", bot="thinking")
    await bot.send("caption", who="user", text="<i>hello</i>", final=True)
    await bot.send("caption", who="bot", text="Hi", final=False, turn=1)
    await bot.send("caption", who="bot", text="Hi there.", final=True, turn=1, interrupted=True)
    await bot.send("latency", turn=1, first_audio_ms=12.5)
    await bot.send("error", message="the ears hear nothing", fatal=False)
    await talk.until("document.querySelector('#problem').textContent.includes('ears')")
    events = await talk.js(LOG)
    for event in (
        ["session", "cafe"],
        ["state", "Thinking"],
        ["user", "<i>hello</i>"],
        ["bot, interrupted", "Hi there."],
        ["latency", "turn 1, first_audio_ms 12.5"],
        ["problem", "the ears hear nothing"],
    ):
        assert event in events
    assert ["bot", "Hi"] not in events
    times = await talk.js("[...document.querySelectorAll('#log li span:first-child')].map(s => Number(s.textContent))")
    assert times == sorted(times) and times[0] > 0
    await talk.js("void (navigator.clipboard.writeText = async text => { window.copied = text })")
    await talk.js("document.querySelector('#events').open = true")
    await talk.js("document.querySelector('#copy').scrollIntoView()")
    await talk.click("#copy")
    await talk.until("window.copied?.includes('bot, interrupted Hi there.')")
