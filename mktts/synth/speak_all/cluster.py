"""Many synthesizers, by Ray Data: an actor a GPU, which speaks its part of the sentences into the folder by itself.

Ray is imported here and nowhere else in this room. The folder must be the same for all machines. An actor writes the
audio and notes it in a part of the manifest, so that nothing is lost with the process that asked; that process gathers
the records and has the folder to itself.
"""

from __future__ import annotations

import json
import logging
import math
import os
import uuid
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, replace
from typing import Any

from mktts.common import python_path
from mktts.errors import BackendUnavailable, EngineError, MkttsError, OptionsError
from mktts.synth.ray_cluster import connect
from mktts.synth.speak_all.keeping import speak_into
from mktts.synth.speak_all.manifest import Manifest, Record
from mktts.synth.speak_all.progress import Progress
from mktts.synth.speak_all.sentences import Sentence
from mktts.synth.speak_all.work import Job

_MAX_BATCH = 4_096  # sentences that an actor is given in one piece: a few times those that it has open at once
_BATCHES = 2  # an actor, where there are fewer: the quick ones take from the slow ones
_OBJECTS_BYTES = 200 << 20  # of shared memory for Ray's objects on one machine: sentences and records, no sound


def speak_on_cluster(
    source: str,
    revision: str | None,
    model: dict[str, Any],
    address: str | None,
    replicas: int | None,
    job: Job,
    manifest: Manifest,
    sentences: Iterable[Sentence],
    progress: Progress,
) -> None:
    """By `replicas` synthesizers, or one for each GPU of the cluster. source, revision: of the checkpoint, as every
    machine can open it. model: arguments of `Synthesizer.load`. address: of a cluster; None begins one here.

    Raises BackendUnavailable without Ray or without a GPU to begin on, OptionsError for more replicas than GPUs,
    EngineError for what fails on the cluster.
    """
    rows = [{"sentence": json.dumps(asdict(sentence))} for sentence in sentences]
    job = replace(job, folder=job.folder.resolve())
    with _cluster(address, replicas) as ray:
        gpus = int(ray.cluster_resources().get("GPU", 0)) if model["device"] != "cpu" else 0
        if not (actors := replicas or gpus):
            raise BackendUnavailable(
                "the cluster has no GPU: name how many synthesizers are to run on CPUs: --replicas N"
            )
        if gpus and actors > gpus:
            raise OptionsError(f"--replicas must be at most the cluster's GPUs, {gpus}, got {actors}: Ray would wait")
        batch = max(1, min(math.ceil(len(rows) / (_BATCHES * actors)), _MAX_BATCH))
        spoken = ray.data.from_items(rows, override_num_blocks=math.ceil(len(rows) / batch)).map_batches(
            _Speaker,
            fn_constructor_args=(source, revision, model, job),
            batch_size=batch,
            compute=ray.data.ActorPoolStrategy(size=min(actors, len(rows))),
            num_gpus=1 if gpus else 0,
            num_cpus=1,
        )
        progress.begin()
        try:
            for row in spoken.iter_rows():
                record: Record = json.loads(row["record"])
                if "status" not in record:
                    raise EngineError(f"a synthesizer of the cluster failed: {record['error']}")
                manifest.append(record)
                progress.kept(record, len(record["text"]))
        except ray.exceptions.RayError as error:
            raise EngineError(f"the cluster failed: {_last_line(error)}") from None
    manifest.absorb()  # all of the parts is here


class _Speaker:
    """An actor: a synthesizer of its own."""

    def __init__(self, source: str, revision: str | None, model: dict[str, Any], job: Job) -> None:
        from mktts.checkpoint import open_checkpoint
        from mktts.synth.synthesizer import Synthesizer

        self._job = job
        self._part = Manifest(job.folder, part=uuid.uuid4().hex)
        self._error: Exception | None = None  # told to who asked, in a line: what is raised here, Ray tries again
        try:
            self._synthesizer = Synthesizer.load(open_checkpoint(source, revision), **model)
        except MkttsError as error:
            self._error = error

    def __call__(self, batch: dict[str, Any]) -> dict[str, list[str]]:
        """The records of a batch of sentences, which it has spoken; or one with an error and no status."""
        try:
            if self._error is None:
                return {"record": self._speak(batch)}
        except (MkttsError, OSError) as error:  # the engine is lost, or the disk is full
            self._error = error
        return {"record": [json.dumps({"error": str(self._error)})]}

    def _speak(self, batch: dict[str, Any]) -> list[str]:
        job, records = self._job, []
        sentences = [Sentence(**json.loads(line)) for line in batch["sentence"]]

        def kept(record: Record, chars: int) -> None:
            records.append(json.dumps(record))

        speak_into(
            job.folder, self._part, job.kind, self._synthesizer, sentences, job.manner, kept, at_once=job.at_once
        )
        return records


def require_ray() -> Any:
    """The package ray. Raises BackendUnavailable without it."""
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")  # it would send what it runs on to its makers
    try:
        import ray
        import ray.data
    except ImportError as error:
        raise BackendUnavailable(
            f'--ray needs the package ray[data]: {error}; pip install -e ".[ray]" in the checkout'
        ) from None
    return ray


@contextmanager
def _cluster(address: str | None, replicas: int | None) -> Iterator[Any]:
    """Ray, connected; what was begun here ends with the block."""
    ray = require_ray()
    logging.getLogger("ray.data").setLevel(logging.ERROR)
    # Actors on CPUs share the cores; one more is for what Ray Data does itself.
    cores = max((replicas or 0) + 1, os.cpu_count() or 1)
    here = {} if address else {"num_cpus": cores}
    began = not ray.is_initialized()
    if began:
        try:
            connect(ray, address, _OBJECTS_BYTES, runtime_env={"env_vars": python_path()}, **here)
        except (OSError, RuntimeError, ValueError) as error:
            raise EngineError(f"no cluster at {address or 'this machine'}: {_last_line(error)}") from None
    ray.data.DataContext.get_current().enable_progress_bars = False  # ours counts sentences
    try:
        yield ray
    finally:
        if began:
            ray.shutdown()


def _last_line(error: BaseException) -> str:
    """A remote error ends in what was raised there."""
    return next((line.strip() for line in reversed(str(error).splitlines()) if line.strip()), type(error).__name__)
