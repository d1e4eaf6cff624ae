"""`serve --replicas N`: complete servers as replicas of Ray Serve at one address, each with a model of its own.

The sound goes through Ray Serve's proxy, which does not tell a replica that a client reads slowly; docs/serving.md has
the way without it.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import logging
import os
import signal
import time
from collections.abc import Callable, Mapping
from typing import Any
from urllib.parse import urlsplit

from mktts.errors import BackendUnavailable, EngineError, ServerError
from mktts.server.limits import Limits

_POLL_S = 0.5
_STOP_S = 15.0  # besides the time of grace, for a replica to close its model

log = logging.getLogger(__name__)


class Replica:
    """A complete server: `serve.ingress` serves its application.

    open_service: loads the model. access: as `make_app`. own_cluster: whether the cluster is of this machine alone.
    """

    async def __init__(
        self, open_service: Callable[[], tuple[Any, Any]], access: Mapping[str, Any], own_cluster: bool
    ) -> None:
        from mktts.server.app import make_app

        logging.getLogger("mktts").setLevel(logging.INFO)
        if own_cluster:
            _listen_on_loopback()
        # In a thread: loading takes longer than Ray waits for a sign of life.
        synthesizer, self._service = await asyncio.to_thread(open_service)
        self._app = make_app(self._service, **access)
        self._open = contextlib.ExitStack()
        self._open.enter_context(synthesizer)

    def __serve_build_asgi_app__(self) -> Any:
        async def app(scope: Any, receive: Any, send: Any) -> None:  # to a FastAPI, Ray Serve would add error handlers
            await self._app(scope, receive, send)

        return app

    async def check_health(self) -> None:
        """Raises ServerError when the model fails every stream: then the replica is replaced."""
        if self._service.health.status == "failing":
            raise ServerError("the model has failed several streams in a row")

    async def stop(self) -> None:
        """Refuses new streams, and returns when none is open."""
        await self._service.stop()

    async def __del__(self) -> None:
        if hasattr(self, "_open"):
            await asyncio.to_thread(self._open.close)


def serve_replicas(
    arguments: argparse.Namespace,
    limits: Limits,
    access: Mapping[str, Any],
    url: str,
    open_service: Callable[[], tuple[Any, Any]],
) -> int:
    """Serves at `url`, which is free, until a signal; 0 after SIGTERM. open_service, access: as `Replica`.

    Raises BackendUnavailable without Ray, ServerError where the cluster cannot be reached or has fewer devices than
    replicas, and EngineError where the replicas do not start.
    """
    address, where = arguments.ray_address, urlsplit(url)
    # Before Ray is imported, whose processes all read them. In a thread of its own, the application would not learn
    # that a client went away. A cluster of its own is for this machine alone, here as on Windows.
    os.environ.update(RAY_USAGE_STATS_ENABLED="0", RAY_SERVE_RUN_USER_CODE_IN_SEPARATE_THREAD="0")
    if address is None:
        os.environ["RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER"] = "0"
    try:
        import ray
        from ray import serve
    except ModuleNotFoundError:
        message = 'several replicas need Ray Serve, which is not installed: pip install -e ".[ray]" in the checkout'
        raise BackendUnavailable(message) from None
    for name in ("ray.serve", "ray._private.authentication"):
        logging.getLogger(name).setLevel(logging.ERROR)
    settings = {} if address else {"include_dashboard": False}
    try:
        ray.init(address or "local", namespace="serve", log_to_driver=False, logging_level=logging.WARNING, **settings)
    except Exception as error:  # Ray raises Exception itself
        raise ServerError(f"no Ray cluster at {address or 'this machine'}: {str(error).strip()}") from None
    stopped_by: list[int] = []
    for number in (signal.SIGINT, signal.SIGTERM):  # Ray has put its own handlers in place
        signal.signal(number, lambda number, frame: stopped_by.append(number))
    try:
        deployment = serve.deployment(
            serve.ingress()(Replica),
            name="mktts",
            num_replicas=arguments.replicas,
            ray_actor_options=_resources(ray.cluster_resources(), arguments.replicas, arguments.device),
            max_ongoing_requests=1_000_000,  # no limit of Ray's: the service admits, and says how many it serves
            graceful_shutdown_timeout_s=limits.grace_s + _STOP_S,
            health_check_period_s=1.0,
            logging_config={"enable_access_log": False},  # addresses may hold keys
        )
        try:
            serve.start(proxy_location="HeadOnly", http_options={"host": where.hostname, "port": where.port})
            handle = serve.run(deployment.bind(open_service, access, address is None), name="mktts")
        except Exception as error:  # of whichever process of Ray's it was
            reason = str(error).strip().rpartition("\n")[2]
            raise EngineError(f"the replicas did not start: {reason}") from None
        log.info("%d replicas of %s at %s", arguments.replicas, arguments.checkpoint, url)
        while not stopped_by:
            time.sleep(_POLL_S)  # a signal that reaches one of Ray's threads does not end a wait without a limit
        log.info("stopping: open streams may go on for %g s", limits.grace_s)
        with contextlib.suppress(Exception):  # of a replica whose process has died
            handle.broadcast("stop").results(timeout_s=limits.grace_s + _STOP_S)
        serve.shutdown()
    finally:
        ray.shutdown()
    if stopped_by[0] == signal.SIGINT:
        raise KeyboardInterrupt
    return 0


def _listen_on_loopback() -> None:
    """Keeps the port for calls between deployments, which Ray Serve opens on every interface, on this machine."""
    from ray.serve._private import replica

    add = replica.add_port_to_grpc_server
    replica.add_port_to_grpc_server = lambda server, address: add(server, address.replace("[::]", "127.0.0.1"))


def _resources(available: Mapping[str, float], replicas: int, device: str) -> dict[str, float]:
    """What each replica gets of the cluster's resources. Raises ServerError where there is less than is asked for."""
    gpus, cpus = int(available.get("GPU", 0)), int(available.get("CPU", 1))
    if replicas < 1:
        raise ServerError(f"--replicas must be 1 or more, got {replicas}")
    if ":" in device:
        raise ServerError(f"--device {device}: every replica has a GPU of its own; leave it out, or give cuda or cpu")
    if device == "cuda" or (device == "auto" and gpus):
        if replicas > gpus:
            raise ServerError(f"a replica needs a GPU of its own: expected at most {gpus} --replicas, got {replicas}")
        return {"num_gpus": 1, "num_cpus": min(1.0, cpus / gpus)}
    return {"num_cpus": min(1.0, int(100 * cpus / replicas) / 100)}
