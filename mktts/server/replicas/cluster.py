"""`serve --replicas`: a Ray cluster, HAProxy before its replicas, and what becomes of them until a signal comes."""

from __future__ import annotations

import argparse
import contextlib
import importlib.util
import logging
import math
import os
import signal
import tempfile
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from types import FrameType
from typing import Any

from mktts.errors import BackendUnavailable, EngineError, ServerError
from mktts.server.access.address import listen, url_of
from mktts.server.access.hosts import is_loopback
from mktts.server.replicas import scaling
from mktts.server.replicas.arguments import Scale
from mktts.server.replicas.ingress import DRAIN_S, environment
from mktts.server.replicas.opening import read_aliases, read_voices, reference_sources
from mktts.server.replicas.orphans import FOLDER_PREFIX, Orphan, orphans
from mktts.server.replicas.replica import Plan, Replica
from mktts.synth.ray_cluster import connect

APPLICATION = DEPLOYMENT = "mktts"
_NEEDED = 'several replicas need Ray Serve, which is not installed: pip install -e ".[ray]" in the checkout'
_NO_LIMIT = 1_000_000  # of requests that Ray lets into a replica: the studio admits, and says how many it carries
_HEALTH_PERIOD_S, _HEALTH_TIMEOUT_S = 1.0, 20.0
_STOP_S = 15.0  # beside the grace: within which an orderly end comes to its own
_LONGEST_BASE = 8  # characters of a folder for temporary files
_UP_S, _POLL_S = 60.0, 1.0

log = logging.getLogger(__name__)


def serve_replicas(plan: Plan, scale: Scale) -> int:
    """Serves until a signal; 0 after SIGTERM.

    Raises BackendUnavailable where Ray is not installed, and ServerError where the address is taken, or there are fewer
    devices than replicas.
    """
    _require_ray()
    arguments, limits = plan.arguments, plan.limits
    _check_model(arguments)
    port = arguments.port
    if scale.address is None:
        refuse_left_behind(orphans(), port)
        with listen(arguments.host, port, limits) as bound:  # before Ray, which would only log that it cannot
            host, port = bound.getsockname()[:2]
            url = url_of(bound)
    else:
        host, url = arguments.host, f"http://{arguments.host}:{port}"
    plan = replace(plan, arguments=_with_whole_paths(arguments))
    longest_s = limits.max_duration_s + limits.stall_s
    with _folder() as folder:
        variables = environment(folder, scale.session_header, longest_s)
        # The signals last: Ray has put its own handlers in place.
        with _cluster(scale.address, variables) as ray, _signals() as stop:
            if scale.address is not None:
                _refuse_hidden_nodes(ray, host)
            from ray import serve

            logging.getLogger("ray.serve").setLevel(logging.ERROR)
            _start(serve, host, port, "HeadOnly" if scale.address is None else "EveryNode")
            count, resources = _placed(ray.cluster_resources(), scale.count, arguments.device)
            deployment = _deployment(serve, scale, count, resources, longest_s)
            try:
                _deploy(serve, deployment.bind(plan))
                _wait_until_up(url, stop)
                log.info(
                    "%s%d replica%s of %s at %s; their logs: %s",
                    "up to " if scale.count is None else "", count, "" if count == 1 else "s",
                    arguments.checkpoint, url,
                    Path(ray._private.worker.global_worker.node.get_logs_dir_path()) / "serve",
                )  # fmt: skip
                _watch(serve, stop, lambda: _deploy(serve, deployment.bind(plan)))
                log.info("stopping: open streams may go on for %g s", limits.grace_s)
                _within(lambda: _stop_replicas(serve, limits.grace_s + _STOP_S), limits.grace_s + _STOP_S, stop)
            finally:
                _within(lambda: _shutdown(serve), _STOP_S, stop)
    if stop.number == signal.SIGINT:
        raise KeyboardInterrupt
    return 0


def _require_ray() -> None:
    try:
        found = importlib.util.find_spec("ray.serve")
    except ModuleNotFoundError:
        found = None
    if found is None:
        raise BackendUnavailable(_NEEDED)


def refuse_left_behind(found: list[Orphan], port: int) -> None:
    """Raises ServerError for a proxy of an earlier run on `port`; names those on other ports in the log."""
    for orphan in found:
        what = f"a proxy that an earlier run left behind (haproxy, process {orphan.pid})"
        if port and port in orphan.ports:
            raise ServerError(f"port {port} is held by {what}: end it with `kill {orphan.pid}`")
        log.warning("%s listens on port %s; `kill %d` ends it", what, ", ".join(map(str, orphan.ports)), orphan.pid)


@contextlib.contextmanager
def _folder() -> Iterator[Path]:
    """For the proxy's files: this user's alone, because its socket takes commands, and of a short name."""
    base = tempfile.gettempdir()
    with tempfile.TemporaryDirectory(
        prefix=FOLDER_PREFIX, dir=base if len(base) <= _LONGEST_BASE else "/tmp", ignore_cleanup_errors=True
    ) as folder:
        yield Path(folder)


class _Stop(threading.Event):
    """Set by a signal. number: of the first one. twice: a second one came: end at once. again: SIGHUP came."""

    number: int | None = None
    twice = again = False

    def renew(self, number: int, frame: FrameType | None) -> None:
        self.again = True

    def take(self, number: int, frame: FrameType | None) -> None:
        self.twice = self.is_set()
        self.number = self.number or number
        self.set()


@contextlib.contextmanager
def _signals() -> Iterator[_Stop]:
    stop = _Stop()
    handlers = {signal.SIGINT: stop.take, signal.SIGTERM: stop.take, signal.SIGHUP: stop.renew}
    before = {number: signal.signal(number, handler) for number, handler in handlers.items()}
    try:
        yield stop
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


@contextlib.contextmanager
def _cluster(address: str | None, variables: dict[str, str]) -> Iterator[Any]:
    """The module ray, connected: to a cluster of its own on this machine, or to the one that runs at `address`."""
    if address is None:
        os.environ.update(variables)
    else:  # its processes run already: those of the application get the variables with the job
        local = {name for name in variables if name.endswith("BINARY_PATH")}
        variables = {name: value for name, value in variables.items() if name not in local}
        os.environ.update(variables)
    import ray

    there = {} if address is None else {"runtime_env": {"env_vars": variables}}
    try:
        connect(ray, address, namespace="serve", **there)
    except (OSError, ValueError, RuntimeError) as error:
        where = "start here" if address is None else f"be reached at {address}"
        raise ServerError(f"Ray could not {where}: {_first_line(error)}") from None
    try:
        yield ray
    finally:
        ray.shutdown()


def _refuse_hidden_nodes(ray: Any, host: str) -> None:
    nodes = sum(bool(node["Alive"]) for node in ray.nodes())
    if nodes > 1 and is_loopback(host):
        raise ServerError(
            f"the cluster has {nodes} machines, whose replicas the proxy cannot reach at {host}: "
            "give --host 0.0.0.0 and a key"
        )


def _placed(available: dict[str, float], wanted: int | None, device: str) -> tuple[int, dict[str, float]]:
    """How many replicas at most, and what each gets. Raises ServerError where there is less than is asked for.

    available: the cluster's resources. device: the argument of `serve`.
    """
    gpus, cpus = int(available.get("GPU", 0)), int(available.get("CPU", 1))
    if ":" in device:
        raise ServerError(f"--device {device}: every replica has a GPU of its own; leave it out, or give cuda or cpu")
    if device == "cuda" or (device == "auto" and gpus):
        if not gpus or (wanted or 1) > gpus:
            raise ServerError(
                f"a replica needs a GPU of its own: expected at most {gpus} --replicas, got {wanted or 1}"
            )
        return wanted or gpus, {"num_gpus": 1, "num_cpus": min(1.0, cpus / gpus)}
    count = wanted or max(1, cpus // 2)
    share = cpus / count
    return count, {"num_cpus": float(math.floor(share)) if share >= 1 else math.floor(share * 100) / 100}


def _deployment(serve: Any, scale: Scale, count: int, resources: dict[str, float], longest_s: float) -> Any:
    """What Ray Serve is to run, less the plan of a replica. longest_s: that a replica may take to finish."""
    size: dict[str, Any] = {"num_replicas": count}
    if scale.count is None:
        size = {
            "autoscaling_config": {
                "min_replicas": 1,
                "max_replicas": count,
                "upscale_delay_s": scaling.UPSCALE_S,
                "downscale_delay_s": scaling.DOWNSCALE_S,
                "metrics_interval_s": scaling.PERIOD_S,
                "look_back_period_s": scaling.LOOK_BACK_S,
                "policy": {"policy_function": f"{scaling.__name__}:{scaling.by_open_streams.__name__}"},
            }
        }
    return serve.deployment(
        serve.ingress()(Replica),
        name=DEPLOYMENT,
        ray_actor_options=resources,
        max_ongoing_requests=_NO_LIMIT,
        graceful_shutdown_timeout_s=longest_s + DRAIN_S,
        graceful_shutdown_wait_loop_s=0.2,
        health_check_period_s=_HEALTH_PERIOD_S,
        health_check_timeout_s=_HEALTH_TIMEOUT_S,
        logging_config={"enable_access_log": False},
        **size,
    )


def _start(serve: Any, host: str, port: int, where: str) -> None:
    try:
        serve.start(proxy_location=where, http_options={"host": host, "port": port})
    except Exception as error:  # of whichever process of Ray's it was
        raise EngineError(f"Ray Serve and its proxy did not start: {_last_line(error)}") from None


def _deploy(serve: Any, application: Any) -> None:
    try:
        serve.run(application, name=APPLICATION, route_prefix="/")
    except RuntimeError as error:
        raise EngineError(f"the replicas did not start: {_last_line(error)}") from None


def _wait_until_up(url: str, stop: threading.Event) -> None:
    """Raises ServerError when the address does not lead to a replica of ours: Ray only logs a port that is taken."""
    end_s, found = time.monotonic() + _UP_S, "nothing"
    while not stop.is_set():
        try:
            with urllib.request.urlopen(f"{url}/ready", timeout=_POLL_S) as answer:
                if answer.headers.get("X-Request-Id"):
                    return
                found = "another server"
        except urllib.error.HTTPError as error:
            found = f"HTTP {error.code}"
        except OSError as error:
            found = str(error)
        if time.monotonic() > end_s:
            raise ServerError(f"the replicas are up and {url} does not lead to them: got {found}")
        stop.wait(_POLL_S / 5)


def _watch(serve: Any, stop: _Stop, deploy: Callable[[], None]) -> None:
    """Until `stop`: says in the log how many replicas there are, when that changes; on SIGHUP replaces them all."""
    before: dict[str, int] | None = None
    while not stop.wait(_POLL_S):
        if stop.again:
            stop.again = False
            log.info("replacing the replicas one after the other; those that go finish what they speak")
            threading.Thread(target=_renew, args=(deploy,), daemon=True).start()
        try:
            status = serve.status().applications[APPLICATION]
        except Exception as error:  # the controller is being replaced; replicas and proxy go on without it
            log.warning("Ray Serve does not answer: %s", _first_line(error))
            continue
        states = status.deployments[DEPLOYMENT].replica_states
        now = {str(getattr(state, "value", state)).lower(): count for state, count in states.items() if count}
        if now != before and before is not None:
            log.info("replicas: %s", ", ".join(f"{count} {state}" for state, count in sorted(now.items())) or "none")
        before = now


def _renew(deploy: Callable[[], None]) -> None:
    try:
        deploy()
    except EngineError as error:
        log.error("%s; those that there were go on", error)


def _stop_replicas(serve: Any, seconds: float) -> None:
    try:
        serve.get_app_handle(APPLICATION).broadcast("stop").results(timeout_s=seconds)
    except Exception as error:  # of a replica that is just going, or whose process has died
        log.warning("not every replica ended its streams: %s", _first_line(error))


def _shutdown(serve: Any) -> None:
    with contextlib.suppress(Exception):  # whatever it is, Ray ends next
        serve.shutdown()


def _within(work: Callable[[], None], seconds: float, stop: _Stop) -> None:
    """Waits for `work` so long, and no longer than to a second signal; what has not ended then ends with Ray."""
    thread = threading.Thread(target=work, daemon=True)
    thread.start()
    end_s = time.monotonic() + seconds
    while thread.is_alive() and not stop.twice and time.monotonic() < end_s:
        thread.join(_POLL_S / 10)


def _check_model(arguments: argparse.Namespace) -> None:
    """Raises what a replica would raise for a checkpoint, a voice or an alias: here it is one line, and at once."""
    from mktts.checkpoint import open_checkpoint

    open_checkpoint(arguments.checkpoint, arguments.revision)
    read_voices(arguments.voice)
    read_aliases(arguments.voice_alias)
    reference_sources(arguments.reference_host, arguments.reference_folder)


def _with_whole_paths(arguments: argparse.Namespace) -> argparse.Namespace:
    """The same with absolute paths, because a replica's working folder is another one."""
    whole = argparse.Namespace(**vars(arguments))
    del whole.run  # the command's function: nothing to be sent
    if Path(whole.checkpoint).is_dir():
        whole.checkpoint = str(Path(whole.checkpoint).resolve())
    whole.voice = [f"{name}={Path(file).resolve()}" for name, _, file in (word.partition("=") for word in whole.voice)]
    for name in ("voice_folder", "reference_folder"):
        folder = getattr(whole, name)
        setattr(whole, name, None if folder is None else folder.resolve())
    return whole


def _first_line(error: Exception) -> str:
    return str(error).strip().partition("\n")[0]


def _last_line(error: Exception) -> str:
    return str(error).strip().rpartition("\n")[2].strip()
