"""The agent's mind where a server of OpenAI's shape is named: what that server is asked, and that its words come."""

from __future__ import annotations

import json
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest
from pipecat.frames.frames import LLMContextFrame, LLMFullResponseEndFrame, LLMTextFrame
from pipecat.processors.aggregators.llm_context import LLMContext
from pipecat_fakes import Talk

from mktts.agent.mind import make_mind
from mktts.agent.settings import from_environment

WORDS = ["I am", " a small", " model."]


@pytest.fixture
def server():
    """Streams WORDS as chat completions; `asked` holds (path, body) of each request."""
    asked = []

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            body = self.rfile.read(int(self.headers["Content-Length"]))
            asked.append((self.path, json.loads(body)))
            self.send_response(200)
            self.send_header("Content-Type", "text/event-stream")
            self.end_headers()
            for word in WORDS:
                choice = {"index": 0, "delta": {"role": "assistant", "content": word}, "finish_reason": None}
                part = {"id": "1", "object": "chat.completion.chunk", "created": 0, "model": "m", "choices": [choice]}
                self.wfile.write(f"data: {json.dumps(part)}\n\n".encode())
            self.wfile.write(b"data: [DONE]\n\n")

        def log_message(self, *_: object) -> None:
            pass

    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as running:
        threading.Thread(target=running.serve_forever, daemon=True).start()
        yield f"http://127.0.0.1:{running.server_port}/v1", asked
        running.shutdown()


async def test_a_server_of_ones_own_thinks_without_a_key(server):
    url, asked = server
    settings = from_environment({"OPENAI_BASE_URL": url, "OPENAI_MODEL": "mine"}, instructions="Be brief.")
    talk = Talk(make_mind(settings))
    async with talk:
        await talk.say(LLMContextFrame(LLMContext([{"role": "user", "content": "Who are you?"}])))
        await talk.until(lambda: talk.of(LLMFullResponseEndFrame))
    assert [frame.text for frame in talk.of(LLMTextFrame)] == WORDS
    ((path, body),) = asked
    assert (path, body["model"], body["stream"]) == ("/v1/chat/completions", "mine", True)
    assert [(message["role"], message["content"]) for message in body["messages"]] == [
        ("system", "Be brief."),
        ("user", "Who are you?"),
    ]
