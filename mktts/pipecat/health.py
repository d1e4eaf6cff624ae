"""What a server says about itself at GET /health."""

from __future__ import annotations

import asyncio
import http.client
import json
import urllib.error
import urllib.request
from dataclasses import dataclass

from mktts.errors import AccessError, ConnectionLost, EngineError

_MAX_BYTES = 1 << 20


@dataclass(frozen=True)
class ServerHealth:
    """The part of mktts.server.schemas.Health that a client needs. speakers, languages: in lower case."""

    status: str
    checkpoint: str
    model_type: str
    random_weights: bool
    sample_rate_hz: int
    speakers: tuple[str, ...]
    languages: tuple[str, ...]


async def ask_health(base: str, timeout_s: float) -> ServerHealth:
    """Asks the server at `base` (http://host:port). Raises ConnectionLost where none answers, EngineError where what
    answers is none of ours, AccessError."""
    return await asyncio.to_thread(_ask, f"{base}/health", timeout_s)


def _ask(url: str, timeout_s: float) -> ServerHealth:
    try:
        try:
            with urllib.request.urlopen(url, timeout=timeout_s) as answer:
                body = answer.read(_MAX_BYTES)
        except urllib.error.HTTPError as error:
            if error.code in (401, 403):
                raise AccessError(f"{url} answers {error.code}: this machine may not ask") from None
            if error.code != 503:  # an unhealthy server's status, with the same body
                raise
            body = error.read(_MAX_BYTES)
        return _parse(json.loads(body))
    except (OSError, http.client.HTTPException) as error:
        reason = getattr(error, "reason", None) or error
        raise ConnectionLost(
            f"no answer from {url}: {reason}; start a server there with python -m mktts serve"
        ) from None
    except (ValueError, KeyError, TypeError, AttributeError):
        raise EngineError(f"{url} does not answer as an mktts server of this version does") from None


def _parse(found: dict) -> ServerHealth:
    model = found["model"]
    return ServerHealth(
        status=found["status"],
        checkpoint=model["checkpoint"],
        model_type=model["type"],
        random_weights=model["random_weights"],
        sample_rate_hz=int(found["sample_rate_hz"]),
        speakers=tuple(name.lower() for name in found["speakers"]),
        languages=tuple(name.lower() for name in found["languages"]),
    )
