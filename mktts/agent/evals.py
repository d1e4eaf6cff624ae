"""Pipecat's evals against a running bot: `python -m mktts agent evals [ws://localhost:7860/ws]`.

Start the bot first, with `python -m mktts agent bot`. Exit status 0 when every scenario has passed.
"""

from __future__ import annotations

import argparse
import asyncio
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from pipecat.evals.scenario import EvalScenarioFile
from pipecat.evals.session import EvalSession, EvalSessionParams

from mktts.agent.ears import PocketsphinxSTTService, find_ears
from mktts.agent.settings import AgentSettings

SCENARIOS = Path(__file__).parent / "scenarios.yaml"
_EVENT_LIMIT_MS = 20_000


def ear(config: Mapping[str, Any]) -> PocketsphinxSTTService:
    """What the harness hears the bot with; no scenario asks what it understood, so random weights pass, too."""
    return PocketsphinxSTTService()


async def run(url: str) -> dict[str, list[str]]:
    """What was wrong in each scenario, by its name; an empty list where it has passed."""
    wrong = {}
    for scenario in EvalScenarioFile.load(SCENARIOS):
        params = EvalSessionParams(default_timeout_ms=_EVENT_LIMIT_MS)
        result = await EvalSession.from_scenario(scenario, url, params=params).run()
        reasons = [str(failure) for failure in result.failures]
        wrong[scenario.name] = reasons or ([] if result.passed else ["failed without a reason"])
    return wrong


EXAMPLES = """examples:
  python -m mktts agent bot
  python -m mktts agent evals ws://localhost:7860/ws

Start the bot first. Exit status 0 when every scenario has passed."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "url", nargs="?", default="ws://localhost:7860/ws", metavar="URL", help="of the bot (default: %(default)s)"
    )


def main(arguments: argparse.Namespace) -> int:
    """Runs every scenario and says how each went."""
    find_ears(AgentSettings())  # the harness' own
    wrong = asyncio.run(run(arguments.url))
    for name, reasons in wrong.items():
        print(f"{name}: {'; '.join(reasons) or 'passed'}")
    return int(any(wrong.values()))
