"""`python -m mktts agent`. Its dependencies are imported when it runs."""

import argparse
import json
import os
import signal
import sys
import threading
from typing import Any

from mktts.agent.settings import AgentSettings, from_environment
from mktts.arguments import add_options, given
from mktts.checkpoint.arguments import add_model_arguments, loading
from mktts.errors import AgentError
from mktts.server.settings import Address, Limits, access_of, listen, url_of

EXAMPLES = """examples:
  python -m mktts agent
  python -m mktts agent --checkpoint path/to/checkpoint --voice vivian
  python -m mktts agent --stt whisper --stt-model base.en --llm qwen3 --llm-checkpoint path/to/Qwen3-0.6B
  python -m mktts agent --llm openai --openai-url http://localhost:11434/v1 --openai-model llama3.2

It prints the address of a page; open it, and speak. Browsers allow the microphone on localhost and https only: from
another machine, forward the port (ssh -L 8000:localhost:8000 HOST).

environment:
  DEEPGRAM_API_KEY               speech to text by Deepgram; without it pocketsphinx, which knows a dozen phrases
  OPENAI_API_KEY                 OpenAI's model; without it and without a URL, scripted answers
  OPENAI_BASE_URL, OPENAI_MODEL  any OpenAI-compatible server, such as Ollama or vLLM; a key is then optional
  MKTTS_CHECKPOINT, MKTTS_VOICE  the voice, if no argument names one
  MKTTS_API_KEY                  the key of the page; required if other machines can reach it"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_model_arguments(parser, checkpoint=None)
    add_options(parser.add_argument_group("conversation"), AgentSettings, unset=True)
    add_options(parser.add_argument_group("address"), Address)
    parser.add_argument(
        "--handshake", action="store_true", help="for programs: the address as JSON; ends with its standard input"
    )


def main(arguments: argparse.Namespace) -> int:
    """Serves the page until a signal. Returns 0 after SIGTERM."""
    from mktts.agent.llm import close_shared_models
    from mktts.agent.web import create_server
    from mktts.pipecat import close_shared_synthesizers

    for part, kind, name in (("stt", "whisper", "stt_model"), ("llm", "qwen3", "llm_checkpoint")):
        if (value := getattr(arguments, name)) and getattr(arguments, part) != kind:
            option = name.replace("_", "-")
            raise AgentError(f"--{option} {value}: expected together with --{part} {kind}, which was not given")
    chosen = {**loading(arguments), **given(AgentSettings, arguments)}
    settings = from_environment(checkpoint=arguments.checkpoint, revision=arguments.revision, **chosen)
    from loguru import logger  # a dependency of Pipecat, which the imports above have required

    # With random weights the guard ends every utterance, so its warnings would be noise.
    levels = {"": "WARNING", "mktts.pipecat.service": "ERROR"} if settings.checkpoint.startswith("random:") else None
    logger.remove()
    logger.add(sys.stderr, level="WARNING", filter=levels)
    for line in settings.describe():
        print(line, file=sys.stderr if arguments.handshake else sys.stdout, flush=True)
    access = access_of(arguments)
    with listen(arguments.host, arguments.port, Limits()) as bound:
        server = create_server(settings, **access)
        bound.listen()  # before the address is printed, so that connections are queued from then on
        address = f"{url_of(bound)}/"
        open_line = f"open {address}{'?key=KEY' if access['api_key'] else ''}"
        print(json.dumps({"url": address}) if arguments.handshake else open_line, flush=True)
        if arguments.handshake:
            threading.Thread(target=_end_with_stdin, args=(server,), daemon=True).start()
        server.run([bound])
    close_shared_models()
    close_shared_synthesizers()
    if server.stopped_by == signal.SIGINT:
        raise KeyboardInterrupt
    return 0


def _end_with_stdin(server: Any) -> None:
    while os.read(sys.stdin.fileno(), 4096):
        pass
    server.should_exit = True
