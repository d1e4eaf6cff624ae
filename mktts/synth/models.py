"""The models of a synthesizer by engine, and which of them serves a new stream."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from mktts.errors import EngineError, SamplingError
from mktts.model.sampling import Sampling
from mktts.speech.job import EngineName

if TYPE_CHECKING:
    from mktts.batch.model import LaneModel
    from mktts.synth.generation import StepModel
    from mktts.synth.upstream_model import UpstreamModel

# Streams that are served singly where both engines are there: on an H200 two frames of the megakernel take 2.9 ms and
# three 4.3; one frame of many together takes 4.0 to 4.5.
SINGLE_STREAMS = 2


class Models:
    """`single`, `batch`, or both."""

    def __init__(self, single: StepModel | UpstreamModel | None, batch: LaneModel | None) -> None:
        self._single, self._batch = single, batch

    @property
    def room(self) -> int:
        """Streams that are made at once."""
        return 1 if self._batch is None else self._batch.lanes.slots

    def any(self) -> StepModel | UpstreamModel | LaneModel:
        """One of them, to check requests with. Raises EngineError after `let_go`."""
        model = self._single or self._batch
        if model is None:
            raise EngineError("the synthesizer is closed: load another one")
        return model

    def pick(self, open_streams: int, sampling: Sampling) -> tuple[StepModel | UpstreamModel | LaneModel, EngineName]:
        """Who serves a stream that is opened beside `open_streams` others. Raises EngineError after `let_go`, and
        SamplingError for rng="torch" where there is no single engine."""
        model = self.any()
        if self._batch is None:
            return model, "single"
        if self._single is None:
            if sampling.rng == "torch":
                raise SamplingError(
                    "the batch engine draws with rng='philox': for rng='torch' take backend='torch', engine='single'"
                )
            return self._batch, "batch"
        few = open_streams < SINGLE_STREAMS
        return (self._single, "single") if few or sampling.rng == "torch" else (self._batch, "batch")

    def each(self) -> list[tuple[StepModel | UpstreamModel | LaneModel, EngineName]]:
        """All of them, by the name of the engine. Raises EngineError after `let_go`."""
        self.any()
        named: list[tuple[Any, EngineName]] = [(self._single, "single"), (self._batch, "batch")]
        return [(model, name) for model, name in named if model is not None]

    def let_go(self) -> None:
        """Frees the models, as far as nobody else holds them."""
        self._single = self._batch = None
