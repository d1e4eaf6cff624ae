"""Notebook 03 in a real kernel, once its widgets are shown: a page's messages start it again, Stop ends what runs."""

from __future__ import annotations

import asyncio
from pathlib import Path

import nbformat
import pytest
from nbclient import NotebookClient

NOTEBOOK = Path(__file__).resolve().parents[2] / "notebooks" / "03_streaming.ipynb"
PATIENCE_S = 60.0


class Page:
    """What a browser would send to the kernel, and what came back from it since the last press."""

    def __init__(self, client):
        self.client, self.kernel, self.states = client, client.kc, client.widget_state

    def model(self, **wanted):
        """The id of the one widget whose state has all of `wanted`."""
        (found,) = [number for number, state in self.states.items() if wanted.items() <= state.items()]
        return found

    def send(self, model, data):
        content = {"comm_id": model, "data": data}
        self.kernel.shell_channel.send(self.kernel.session.msg("comm_msg", content))

    async def until(self, done):
        """Reads the kernel's messages until `done(model, data)` of one of them is true; returns all of them."""
        seen = []
        while True:
            message = await asyncio.wait_for(self.kernel._async_get_iopub_msg(), PATIENCE_S)
            if message["msg_type"] != "comm_msg":
                continue
            model, data = message["content"]["comm_id"], message["content"]["data"]
            seen.append((model, data))
            if done(model, data):
                return seen


@pytest.fixture
async def page(monkeypatch, tmp_path):
    """The notebook, run with few frames as far as its widgets (all of it: test_notebooks.py); its kernel lives on."""
    monkeypatch.setenv("PYTHONPATH", str(NOTEBOOK.parents[1]))
    notebook = nbformat.read(NOTEBOOK, as_version=4)
    source = f"MAX_FRAMES, PIECE_DELAY_S, RUN_DIR, TEXT = 6, 0.001, {str(tmp_path)!r}, 'One two three.'"
    (widgets,) = [index for index, cell in enumerate(notebook.cells) if "await panel.run()" in cell.source]
    del notebook.cells[widgets + 1 :]
    notebook.cells.insert(2, nbformat.v4.new_code_cell(source))
    client = NotebookClient(notebook, timeout=120, resources={"metadata": {"path": str(NOTEBOOK.parent)}})
    async with client.async_setup_kernel():
        for index, cell in enumerate(notebook.cells):
            await client.async_execute_cell(cell, index)
        yield Page(client)


@pytest.mark.slow
async def test_start_speaks_again_after_a_run_and_stop_ends_it(page):
    start, player = page.model(description="Start"), page.model(status="live PCM")
    message = page.model(_model_name="HTMLModel")
    click = {"method": "custom", "content": {"event": "click"}}

    def enabled_again(model, data):
        return model == start and data.get("state", {}).get("disabled") is False

    def kinds(seen):
        return [data["content"]["kind"] for model, data in seen if model == player and data["method"] == "custom"]

    for _ in range(2):
        page.send(start, click)
        seen = await page.until(enabled_again)
        assert kinds(seen)[0] == "begin" and kinds(seen)[-1] == "end" and kinds(seen).count("pcm") >= 3
        assert not any("Error" in str(data) for model, data in seen if model == message)

    text = page.model(description="TEXT")
    frames = page.model(description="MAX_FRAMES")
    page.send(text, {"method": "update", "state": {"value": "One two three four five six. " * 10}, "buffer_paths": []})
    page.send(frames, {"method": "update", "state": {"value": 2_000}, "buffer_paths": []})
    page.send(start, click)
    await page.until(lambda model, data: model == player and data.get("content", {}).get("kind") == "pcm")
    page.send(player, {"method": "update", "state": {"stop_requested": True}, "buffer_paths": []})
    seen = await page.until(enabled_again)
    assert kinds(seen)[-1] == "end" and kinds(seen).count("pcm") < 40  # 2 000 frames are 250 chunks
