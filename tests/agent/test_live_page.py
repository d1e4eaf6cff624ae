"""The agent's page in a real Chromium with a fake microphone, against a bot that does what each test says.

`make reference` takes a picture of the page in a conversation with the real bot.
"""

from __future__ import annotations

import re
import shutil
import socket
import subprocess
from urllib.parse import urlencode

import numpy as np
import pytest
from absent import needs
from agent_picture import SPOKEN, visit
from chromium import FOREIGN_HOST, NAMES, binary
from page_bot import INPUT_RATE_HZ, PAGE, PIECE_S
from running import running_agent

from mktts.agent.settings import AgentSettings

REACHABLE = [name for _, name in socket.if_nameindex() if not name.startswith(("lo", "ifb"))]
BEEP_HZ = 600
FRAME_BYTES = 2 * INPUT_RATE_HZ // 50

needs_chromium = pytest.mark.skipif(binary() is None, reason=f"no Chromium on this machine (looked for {NAMES})")
needs_node = pytest.mark.skipif(shutil.which("node") is None, reason="no JavaScript runtime (node) on this machine")


@needs_node
def test_resampling_and_the_playback_queue_do_what_they_promise():
    harness = PAGE.parents[2] / "tests" / "agent" / "page_harness.mjs"
    done = subprocess.run(["node", str(harness), str(PAGE)], capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr


@needs_chromium
async def test_the_microphone_arrives_as_16_khz_frames_of_20_ms(talk, bot):
    heard = await bot.new_frames(100)
    assert bot.messages[0] == {"type": "hello"}
    assert {len(frame) for frame in bot.frames} == {FRAME_BYTES}
    spectrum = np.abs(np.fft.rfft(heard))
    assert abs(spectrum.argmax() * INPUT_RATE_HZ / len(heard) - BEEP_HZ) < 10
    assert np.abs(heard).max() > 0.01


@needs_chromium
async def test_what_the_bot_says_is_played_and_shown_on_its_meter(talk, bot):
    await bot.play(1.0)
    await talk.until("Number(document.querySelector('#played').textContent) >= 999")
    await talk.until("Number(document.querySelector('#queued').textContent) === 0")
    assert await talk.number("#played") == 1_000 and await talk.number("#dropped") == 0


@needs_chromium
async def test_the_bots_level_is_seen_while_it_speaks(talk, bot):
    await bot.play(2.0, paced=False)
    await talk.until("document.querySelector('#bot').value > 0.5")
    await talk.until("document.querySelector('#bot').value === 0")


@needs_chromium
async def test_clear_drops_queued_audio_at_once_and_new_audio_plays(talk, bot):
    await bot.play(5.0, paced=False)
    await talk.until("Number(document.querySelector('#played').textContent) > 100")
    await bot.send("clear")
    await talk.until("Number(document.querySelector('#dropped').textContent) > 0")
    # of one moment: what fades out moves from queued to played meanwhile
    played, dropped, queued = await talk.js(
        "['played', 'dropped', 'queued'].map(id => Number(document.getElementById(id).textContent))"
    )
    assert played < 4_000 and abs(played + dropped + queued - 5_000) <= 2
    await talk.until("Number(document.querySelector('#queued').textContent) === 0")
    assert await talk.number("#played") <= played + 6  # the fade that keeps it from clicking
    before = await talk.number("#played")
    await bot.play(0.4, paced=False)
    await talk.until(f"Number(document.querySelector('#played').textContent) >= {before + 399}")
    assert await talk.number("#underruns") == 0


@needs_chromium
async def test_captions_grow_are_replaced_and_show_what_was_cut_off(talk, bot):
    await bot.send("caption", who="user", text="what tie", final=False)
    await bot.send("caption", who="user", text="What time is it?", final=True)
    await bot.send("caption", who="bot", text="It is", final=False, turn=1)
    await bot.send("caption", who="bot", text="It is ten.", final=True, turn=1)
    await bot.send("caption", who="bot", text="Once upon a", final=True, turn=2, interrupted=True, unheard="time")
    await bot.send("caption", who="bot", text="<b>Yes</b>?", final=True, turn=3)
    await bot.send("something new", text="must be ignored")
    await talk.until("document.querySelectorAll('#captions li').length === 4")
    said = (
        "[...document.querySelectorAll('#captions li')].map(l => [l.className, l.querySelector('.said').textContent])"
    )
    assert await talk.js(said) == [
        ["user", "What time is it?"],
        ["bot", "It is ten."],
        ["bot cut", "Once upon a"],
        ["bot", "<b>Yes</b>?"],  # text, never markup
    ]
    assert await talk.text("#captions .cut s") == "time" and await talk.text("#captions .cut .mark") == "interrupted"


@needs_chromium
async def test_latency_shows_the_last_value_of_each_kind_and_every_turn(talk, bot):
    first = {"transcript_ms": 81, "first_token_ms": 140, "first_audio_ms": 402.4, "silence_ms": None}
    cut = {"transcript_ms": None, "first_token_ms": None, "first_audio_ms": None, "silence_ms": 371}
    await bot.send("latency", turn=1, **first)
    await bot.send("latency", turn=1, **cut)
    await bot.play(0.3)
    await talk.until("document.querySelector('#tiles [data-name=page_ms]').textContent !== '–'")
    tile = "Object.fromEntries([...document.querySelectorAll('#tiles dd')].map(d => [d.dataset.name, d.textContent]))"
    shown = await talk.js(tile)
    assert 0 < int(shown.pop("page_ms")) < 1_000
    assert shown == {"transcript_ms": "81", "first_token_ms": "140", "first_audio_ms": "402", "silence_ms": "371"}
    assert await talk.js("document.querySelectorAll('#turns tr').length") == 1


@needs_chromium
@pytest.mark.parametrize("way", ["button", "key"])
async def test_mute_sends_silence_and_says_so(talk, bot, way):
    async def switch():
        await (talk.click("#mute") if way == "button" else talk.press("m"))

    assert np.abs(await bot.new_frames(60)).max() > 0
    await switch()
    await bot.until(lambda: {"type": "mute", "muted": True} in bot.messages, "mute")
    await bot.new_frames(5)  # what was under way
    assert not (await bot.new_frames(60)).any()
    assert await talk.js("document.querySelector('#mute').ariaPressed") == "true" and "Muted" in await talk.text(
        "#status"
    )
    await switch()
    await bot.until(lambda: bot.messages[-1] == {"type": "mute", "muted": False}, "unmute")
    assert np.abs(await bot.new_frames(60)).max() > 0


@needs_chromium
async def test_the_state_follows_the_bot(talk, bot):
    for user, bots, shown in [
        ("speaking", "silent", "Hearing you"), ("silent", "thinking", "Thinking"),
        ("silent", "speaking", "Speaking"), ("silent", "silent", "Listening"),
    ]:  # fmt: skip
        await bot.send("state", user=user, bot=bots)
        await talk.until(f"document.querySelector('#status').textContent === '{shown}'")


@needs_chromium
async def test_stop_ends_the_conversation_and_another_can_be_started_from_the_keyboard(talk, bot):
    await talk.click("#stop")
    await bot.until(lambda: bot.closed == 1, "the end of the first conversation")
    await talk.js("document.querySelector('#start').focus()")
    await talk.press("Enter")
    await bot.until(lambda: len(bot.messages) == 2, "hello again")
    await bot.new_frames(10)


@needs_chromium
async def test_every_control_is_reached_with_the_tab_key(talk):
    reached = set()
    for _ in range(16):
        await talk.press("Tab")
        reached.add(await talk.js("document.activeElement.id || document.activeElement.tagName"))
    assert {"mute", "stop", "microphone", "speaker", "captions", "typed", "send", "SUMMARY"} <= reached


@needs_chromium
async def test_leaving_the_page_hangs_up(talk, bot):
    await talk.command("Page.navigate", url="about:blank")
    await bot.until(lambda: bot.closed == 1, "the end of the conversation")


@needs_chromium
@pytest.mark.parametrize(("code", "said"), [(1013, "Too many"), (1008, "key"), (1011, "lost")])
async def test_a_connection_that_ends_is_explained(page, bot, code, said):
    bot.refuse_with = code
    await page.click("#start")
    await page.until("!document.querySelector('#problem').hidden")
    assert said in await page.text("#problem")
    bot.refuse_with = None
    await page.click("#start")
    await bot.until(lambda: bot.messages, "hello")
    assert await page.js("document.querySelector('#problem').hidden")


@needs_chromium
async def test_errors_of_the_bot_are_shown_and_fatal_ones_end(talk, bot):
    await bot.send("error", message="The speech service stumbled.", fatal=False)
    await talk.until("document.querySelector('#problem').textContent.includes('stumbled')")
    assert await talk.js("!document.querySelector('#stop').disabled")
    await bot.send("error", message="The model is gone.", fatal=True)
    await talk.until("document.querySelector('#problem').textContent.includes('gone')")
    await bot.until(lambda: bot.closed == 1, "the end of the conversation")


@needs_chromium
async def test_random_weights_are_announced_and_speech_is_not(browser, bot):
    async with browser.tab(bot.url) as page:
        await page.until("document.querySelector('#facts').textContent")
        assert "noise, not speech" in await page.text("#noise")
        assert "“what time is it”" in await page.text("#hints")
    bot.config |= {"random_weights": False, "hints": []}
    async with browser.tab(bot.url) as page:
        await page.until("document.querySelector('#facts').textContent")
        assert await page.js("document.querySelector('#noise').hidden && document.querySelector('#hints').hidden")


@needs_chromium
async def test_the_transport_can_be_chosen_only_where_there_are_two(browser, bot, page):
    await page.until("document.querySelector('#facts').textContent")
    assert await page.js("document.querySelector('#over').hidden")
    bot.config["transports"] = ["websocket", "webrtc"]
    async with browser.tab(bot.url) as other:
        await other.until("!document.querySelector('#over').hidden")
        names = "[...document.querySelector('#transport').options].map(o => o.text)"
        assert await other.js(names) == ["WebSocket", "WebRTC"]


@needs_chromium
async def test_a_refused_microphone_is_explained(page, bot):
    await page.js("navigator.mediaDevices.getUserMedia = async () => { throw new DOMException('', 'NotAllowedError') }")
    await page.click("#start")
    await page.until("!document.querySelector('#problem').hidden")
    assert "refused" in await page.text("#problem") and not bot.messages


@needs_chromium
async def test_a_page_that_is_not_on_a_secure_origin_says_how_to_get_there(browser, bot):
    async with browser.tab(f"http://{FOREIGN_HOST}:{bot.port}/") as page:
        await page.until("!document.querySelector('#problem').hidden")
        assert await page.js("document.querySelector('#start').disabled")
        assert f"http://localhost:{bot.port}/" in await page.text("#problem")


@needs_chromium
@pytest.mark.parametrize("allow", ["microphone; autoplay", ""], ids=["allowed", "not allowed"])
async def test_inside_a_frame_of_another_site_it_works_where_the_frame_allows_it(browser, bot, allow):
    inner = f"http://localhost:{bot.port}/?inner"
    async with (
        browser.tab(f"{bot.url}/around?{urlencode({'frame': inner, 'allow': allow})}"),
        browser.frame("?inner") as frame,
    ):
        await frame.click("#start")
        if allow:
            await bot.new_frames(20)
            await bot.play(0.2)
            await frame.until("Number(document.querySelector('#played').textContent) >= 199")
        else:
            await frame.until("!document.querySelector('#problem').hidden")
            assert 'allow="microphone; autoplay"' in await frame.text("#problem")


@needs_chromium
async def test_the_page_asks_nobody_but_its_bot(browser, bot):
    async with browser.tab("about:blank") as page:
        await page.command("Page.navigate", url=bot.url)
        await page.click("#start")
        await bot.until(lambda: bot.messages, "hello")
        await bot.play(0.2)
        await page.until("Number(document.querySelector('#played').textContent) > 0")
        hosts = {re.match(r"[a-z]+://[^/]*", url).group() for url in page.requested if not url.startswith("data:")}
        assert hosts == {bot.url}


@needs_chromium
async def test_the_key_of_the_pages_address_goes_with_every_request(browser, bot):
    async with browser.tab("about:blank") as page:
        await page.command("Page.navigate", url=f"{bot.url}/?key=a%2Fb")
        await page.click("#start")
        await bot.until(lambda: bot.messages, "hello")
        assert bot.keys == ["a/b"]
        assert [url for url in page.requested if "agent/config" in url] == [f"{bot.url}/agent/config?key=a%2Fb"]


@needs_chromium
async def test_a_piece_of_audio_that_is_late_is_counted_and_the_next_start_is_later(talk, bot):
    await bot.play(4 * PIECE_S, paced=False)
    await talk.until("Number(document.querySelector('#played').textContent) > 0")
    lead = await talk.number("#lead")
    for _ in range(20):  # whenever it runs dry; how soon the test sees it is up to the machine
        await talk.until("Number(document.querySelector('#queued').textContent) === 0")
        await bot.play(2 * PIECE_S, paced=False)
    await talk.until("Number(document.querySelector('#underruns').textContent) > 0")
    assert await talk.number("#lead") > lead


@pytest.mark.slow  # in real time, three processes at once: beside other tests on two cores the audio runs dry
@needs_chromium
@needs("pocketsphinx")
async def test_a_conversation_with_the_real_agent(tmp_path, checkpoint_cache):
    """Three turns of recorded speech, the last of which interrupts; what the page shows is what both have said."""
    with running_agent(AgentSettings(turn_end="timeout", seed=1)) as url:
        async with visit(tmp_path, url) as page:
            said = "[...document.querySelectorAll('#captions .user .said')].map(s => s.textContent)"
            assert await page.js(said) == [text for _, text in SPOKEN]
            assert "Once upon a time" in await page.text("#captions .cut .said")
            assert "everybody cheered" in await page.text("#captions .cut s")
            assert "everybody cheered" not in await page.text("#captions .cut .said")
            assert "noise, not speech" in await page.text("#noise")
            assert await page.number("#played") > 1_000 and await page.number("#sent") > 500
            for kind in ("transcript_ms", "first_token_ms", "first_audio_ms", "page_ms", "silence_ms"):
                assert await page.number(f"#tiles [data-name={kind}]") > 0
            assert await page.js("document.querySelectorAll('#turns tr').length") == len(SPOKEN)
            assert page.errors == []


@needs_chromium
@needs("aiortc", "pocketsphinx")
@pytest.mark.skipif(not REACHABLE, reason="no network interface but loopback, which WebRTC does not use")
async def test_the_same_page_talks_over_webrtc(browser, checkpoint_cache):
    """The greeting: its caption over the data channel, its sound over the peer connection."""
    spy = (
        "const Peer = RTCPeerConnection; RTCPeerConnection = function (...a) { return (window.peer = new Peer(...a)) }"
    )
    energy = (
        "peer.getStats().then(all => [...all.values()].some(s => s.type === 'inbound-rtp' && s.totalAudioEnergy > 0))"
    )
    with running_agent(AgentSettings(turn_end="timeout", seed=1)) as url:
        async with browser.tab(url) as page:
            await page.js(spy)
            await page.until("document.querySelector('#transport').options.length === 2")
            await page.js("document.querySelector('#transport').value = 'webrtc'")
            await page.click("#start")
            await page.until("document.querySelector('#captions .bot .said')?.textContent === 'Hello, I am listening.'")
            await page.until(f"await {energy}")
            await page.click("#stop")
            assert page.errors == []
