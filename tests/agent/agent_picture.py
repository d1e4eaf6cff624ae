"""A conversation with the real agent through its page, in Chromium with recorded user speech as its microphone.

`PYTHONPATH=tests python tests/agent/agent_picture.py FILE` takes a picture of the page after it, where Chromium is.
"""

import asyncio
import contextlib
import sys
import tempfile
from collections.abc import AsyncIterator
from pathlib import Path

import numpy as np
from chromium import BINARY, MICROPHONE_RATE_HZ, Tab, visited
from loguru import logger
from served import running_agent

from mktts.agent import user_speech
from mktts.agent.settings import AgentSettings
from mktts.audio import from_pcm16, resample

# seconds of silence, then what the user says; "stop please" comes while the story is told
SPOKEN = ((4.5, "what time is it"), (6.0, "tell me a story"), (4.5, "stop please"))
SILENCE_AFTER_S = 20.0


@contextlib.asynccontextmanager
async def visit(folder: Path, url: str, transport: str = "websocket") -> AsyncIterator[Tab]:
    """The page at `url` once the story has been interrupted and the bot has said its last; files go to `folder`."""
    noise = np.random.default_rng(0)  # a little of it instead of digital silence, as a microphone has it
    pieces = []
    for gap_s, text in (*SPOKEN, (SILENCE_AFTER_S, None)):
        pieces.append(noise.integers(-8, 9, round(gap_s * user_speech.USER_RATE_HZ)))
        if text:
            pieces.append(user_speech.load(text))
    user = resample(from_pcm16(np.concatenate(pieces)), user_speech.USER_RATE_HZ, MICROPHONE_RATE_HZ)
    async with visited(url, folder, user, repeat=False) as page:
        await page.until(f"document.querySelector('#transport [value={transport}]')")
        await page.js(f"document.querySelector('#transport').value = '{transport}'")
        await page.click("#start")
        # The user speaks by the clock, whatever the bot does; only the order of things is waited for.
        await page.until(f"document.querySelector('#captions').textContent.includes('You{SPOKEN[-1][1]}')")
        await page.until("document.querySelector('#captions li:last-child.bot:not(.cut):not(.open)')")
        await page.until("document.querySelector('#bot').value === 0")
        yield page


async def _picture(path: Path) -> None:
    with tempfile.TemporaryDirectory() as folder, running_agent(AgentSettings(turn_end="timeout", seed=1)) as url:
        async with visit(Path(folder), url) as page:
            path.parent.mkdir(parents=True, exist_ok=True)
            await page.picture(path)


if __name__ == "__main__":
    logger.remove()
    if BINARY is None:
        sys.exit(print(f"no Chromium on this machine: {sys.argv[1]} is left as it is"))
    asyncio.run(_picture(Path(sys.argv[1])))
