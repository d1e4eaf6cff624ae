"""One complete server as a replica of Ray Serve: model, studio and application, made in the replica's own process."""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import logging
import time
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from mktts.errors import ServerError
from mktts.server.limits import Limits
from mktts.server.problems import RETRY_AFTER_S, Problem
from mktts.server.replicas import scaling
from mktts.server.replicas.opening import open_studio, reference_sources

if TYPE_CHECKING:
    from fastapi import FastAPI

    from mktts.server.studio import Studio
    from mktts.synth import Synthesizer
    from mktts.synth.apart import ApartSynthesizer

_POLL_S = 0.05

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Plan:
    """What a replica needs to become a server; it is pickled on its way there.

    arguments: of `serve`, files and folders as absolute paths. keys, origins, hosts: as `make_app` takes them.
    """

    arguments: argparse.Namespace
    limits: Limits
    keys: tuple[str, ...]
    origins: tuple[str, ...]
    hosts: tuple[str, ...]


class Replica:
    """What Ray Serve makes, asks, and lets go; `serve.ingress` puts the application on the replica's socket.

    Every method is a coroutine, because others would be called from other threads than the event loop's.
    """

    async def __init__(self, plan: Plan) -> None:
        from mktts.server.replicas.protocols import serve_with

        self._synthesizer, self._studio, self._app = await asyncio.to_thread(_open, plan)
        self._open_end = contextlib.ExitStack()
        self._tasks: list[asyncio.Task[None]] = []
        serve_with(self._studio)
        if self._synthesizer.serves_many:
            from mktts.speech.serving import many_streams

            self._open_end.enter_context(many_streams())
        if self._studio.uploads is not None:
            from mktts.server.process import sweep

            self._tasks.append(asyncio.create_task(sweep(self._studio.uploads)))

    def __serve_build_asgi_app__(self) -> Any:
        return _Plain(self._app)

    async def check_health(self) -> None:
        """Raises ServerError when the model fails every stream: then the replica is replaced."""
        if self._studio.health.status == "failing":
            raise ServerError("the model has failed several streams in a row")

    async def record_autoscaling_stats(self) -> dict[str, float]:
        health = self._studio.health
        return {scaling.OPEN: float(health.streams_open), scaling.CAPACITY: float(health.streams_max)}

    async def stop(self) -> None:
        """Begins nothing new, and returns when nothing is open: what still is after the grace is ended, and says so."""
        studio = self._studio
        studio.stopping = True
        end_s = time.monotonic() + studio.limits.grace_s
        while studio.streams_open and time.monotonic() < end_s:
            await asyncio.sleep(_POLL_S)
        studio.cancel_all(Problem(503, "stopping", "the server stopped", retry_after_s=RETRY_AFTER_S))
        await asyncio.sleep(_POLL_S)  # the last messages go out before the connections are closed

    async def __del__(self) -> None:
        for task in getattr(self, "_tasks", ()):
            task.cancel()
        if hasattr(self, "_open_end"):
            self._open_end.close()
            await asyncio.to_thread(self._synthesizer.close)


class _Plain:
    """An application that is nothing but one: Ray Serve would add its own handler of errors to a FastAPI."""

    def __init__(self, app: Any) -> None:
        self._app = app

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        if scope["type"] != "lifespan":
            await self._app(scope, receive, send)
            return
        for _ in range(2):
            message = await receive()
            await send({"type": f"{message['type']}.complete"})


def _open(plan: Plan) -> tuple[Synthesizer | ApartSynthesizer, Studio, FastAPI]:
    """In a thread: loading takes longer than Ray waits for a sign of life."""
    from mktts.server.app import make_app

    arguments = plan.arguments
    ours = logging.getLogger("mktts")
    ours.setLevel(logging.INFO)
    for handler in logging.getLogger("ray.serve").handlers:  # into the replica's own file
        ours.addHandler(handler)
    synthesizer, studio = open_studio(arguments, plan.limits)
    sources = reference_sources(arguments.reference_host, arguments.reference_folder)
    return synthesizer, studio, make_app(studio, plan.keys, plan.origins, sources, plan.hosts)
