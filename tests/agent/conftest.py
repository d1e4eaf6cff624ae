"""A browser whose microphone beeps, a bot that does what the test says, and the page between them."""

from __future__ import annotations

import wave

import numpy as np
import pytest
from chromium import chromium
from page_bot import page_bot

BEEP_HZ, MICROPHONE_RATE_HZ = 600, 48_000


@pytest.fixture(scope="module")
def browser(tmp_path_factory):
    """A Chromium whose microphone hears a beep of 0.3 s every 0.6 s."""
    folder = tmp_path_factory.mktemp("chromium")
    times = np.arange(MICROPHONE_RATE_HZ * 6 // 10) / MICROPHONE_RATE_HZ
    beep = 0.5 * np.sin(2 * np.pi * BEEP_HZ * times) * (times < 0.3)
    with wave.open(str(folder / "beeps.wav"), "wb") as out:
        out.setparams((1, 2, MICROPHONE_RATE_HZ, 0, "NONE", ""))
        out.writeframes((beep * 32_767).astype("<i2").tobytes() * 20)
    with chromium(folder, folder / "beeps.wav") as running:
        yield running


@pytest.fixture
async def bot():
    async with page_bot() as served:
        yield served


@pytest.fixture
async def page(browser, bot):
    """The page, before anybody has started a conversation."""
    async with browser.tab(bot.url) as tab:
        yield tab
        assert tab.errors == []


@pytest.fixture
async def talk(page, bot):
    """The page in a conversation."""
    await page.click("#start")
    await bot.until(lambda: bot.messages, "hello")
    await bot.new_frames(25)
    return page
