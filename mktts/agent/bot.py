"""A bot file for Pipecat's development runner, and for its evals, which connect to that runner:

    python -m mktts agent bot                   # then ws://localhost:7860/ws, or WebRTC
    python -m mktts agent bot -- -t webrtc

The environment chooses ears, mind and voice (`mktts.agent.settings`). A call over a telephone provider works as for any
bot of Pipecat's, with its keys.
"""

from __future__ import annotations

import argparse
import sys
from typing import Any

from pipecat.evals.transport import EvalTransportParams
from pipecat.runner.types import RunnerArguments
from pipecat.runner.utils import create_transport
from pipecat.transports.base_transport import TransportParams
from pipecat.transports.websocket.fastapi import FastAPIWebsocketParams

from mktts.agent.conversation import build
from mktts.agent.ears import find_ears
from mktts.agent.settings import AgentSettings, from_environment

_AUDIO = {"audio_in_enabled": True, "audio_out_enabled": True}


def _websocket() -> FastAPIWebsocketParams:
    from pipecat.serializers.protobuf import ProtobufFrameSerializer

    return FastAPIWebsocketParams(**_AUDIO, serializer=ProtobufFrameSerializer())


TRANSPORTS = {
    "webrtc": lambda: TransportParams(**_AUDIO),
    "websocket": _websocket,
    "eval": lambda: EvalTransportParams(**_AUDIO),
    **dict.fromkeys(("twilio", "telnyx", "plivo", "exotel"), lambda: FastAPIWebsocketParams(**_AUDIO)),
}


async def bot(runner_args: RunnerArguments) -> None:
    """Pipecat's entry point: one conversation over the transport that the runner was asked for.

    Args:
        runner_args: Arguments from the runner.
    """
    settings = from_environment()
    transport = await create_transport(runner_args, TRANSPORTS)
    await talk(transport, settings, runner_args)


async def talk(transport: Any, settings: AgentSettings, runner_args: RunnerArguments) -> None:
    """Greets whoever connects, and ends when they have gone."""
    conversation = build(transport, settings, rtvi=True, idle_timeout_s=runner_args.pipeline_idle_timeout_secs)

    @transport.event_handler("on_client_connected")
    async def connected(*_: Any) -> None:
        await conversation.greet()

    @transport.event_handler("on_client_disconnected")
    async def disconnected(*_: Any) -> None:
        await conversation.worker.cancel()

    await conversation.run(handle_sigint=runner_args.handle_sigint)


EXAMPLES = """examples:
  python -m mktts agent bot                   # then ws://localhost:7860/ws, or WebRTC
  python -m mktts agent bot -- -t webrtc

What follows `--` goes to Pipecat's runner; `python -m mktts agent bot -- --help` lists it."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("runner", nargs="*", metavar="-- ARGUMENT", help="of Pipecat's runner")


def main(arguments: argparse.Namespace) -> int:
    """Says what the bot is made of and hands over to Pipecat's runner, which finds `bot` in the module it started."""
    from pipecat.runner import run

    settings = from_environment()
    find_ears(settings)
    for line in settings.describe():
        print(line)
    sys.modules["__main__"].bot = bot
    sys.argv = ["mktts agent bot", *arguments.runner]
    run.main()
    return 0
