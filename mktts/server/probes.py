"""The routes by which others watch a server: is it well, does it want requests, how does it do."""

from __future__ import annotations

from typing import Any

from fastapi import FastAPI
from fastapi.responses import JSONResponse, PlainTextResponse, Response

from mktts.server import meters
from mktts.server.schemas import Health, Ready
from mktts.server.studio import Studio


def add_probes(app: FastAPI, studio: Studio, locked: list[Any], anyone: dict[Any, Any], known: dict[Any, Any]) -> None:
    """locked: the dependencies of routes behind the key. anyone, known: documented refusals without and with a key.

    /health is also at /v1/health and /ping, where other servers and the clouds that run them have it.
    """

    @app.head("/ping", include_in_schema=False)
    @app.get("/ping", include_in_schema=False)
    @app.head("/v1/health", include_in_schema=False)
    @app.get("/v1/health", include_in_schema=False)
    @app.head("/health", include_in_schema=False)
    @app.get("/health", response_model=Health, responses={503: {"model": Health, "description": "Not ok."}, **anyone})
    async def health() -> Response:
        """What is served, and whether it can be used."""
        found = studio.health
        return JSONResponse(found.model_dump(), 200 if found.status == "ok" else 503)

    @app.head("/ready", include_in_schema=False)
    @app.get("/ready", response_model=Ready, responses={503: {"model": Ready, "description": "Not ready."}, **anyone})
    async def ready() -> Response:
        """Whether this server wants more requests: not while it fails or stops."""
        wants_more = studio.health.status == "ok"
        return JSONResponse(Ready(ready=wants_more).model_dump(), 200 if wants_more else 503)

    @app.get("/metrics", response_class=PlainTextResponse, dependencies=locked, responses=known)
    async def metrics() -> Response:
        """Prometheus metrics."""
        return Response(studio.meters.page(), headers={"Content-Type": meters.CONTENT_TYPE})
