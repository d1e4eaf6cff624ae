"""The models of a synthesizer by engine, and which of them serves a new stream."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch

from mktts.errors import EngineError, SamplingError
from mktts.model.sampling import Sampling
from mktts.speech.job import EngineName

if TYPE_CHECKING:
    from mktts.batch.executor import Together
    from mktts.batch.model import LaneModel
    from mktts.synth.generation import StepModel
    from mktts.synth.upstream_model import UpstreamModel

# Streams that are served singly where both engines are there: on an H200 two frames of the megakernel take 2.9 ms and
# three 4.3; one frame of many together takes 4.0 to 4.5.
SINGLE_STREAMS = 2
# And those that rest beside them, for want of text or of a reader: all may go on at once, and take turns then. Half of
# the listeners whom the megakernel carries on an H200.
OPEN_SINGLY = 8


class Models:
    """`single`, `together`, or both. The second may come later: made beside the first when more streams are open than
    are served singly; until then those take turns."""

    def __init__(
        self,
        single: StepModel | UpstreamModel | None,
        together: Together | None = None,
        later: Callable[[], Together] | None = None,
    ) -> None:
        self._single, self._together = single, together
        self._later = later
        self._making = False
        self._singly = SINGLE_STREAMS  # that are due at once and served so
        self.on_made: Callable[[Together], None] = lambda executor: None

    @property
    def room(self) -> int:
        """Streams that are made at once."""
        return 1 if self._together is None else self._together.model.lanes.slots

    @property
    def many(self) -> bool:
        """Whether many streams are made together, or will be once enough are open."""
        return self._together is not None or self._later is not None or self._making

    @property
    def together(self) -> Together | None:
        """The executor of the batch engine."""
        return self._together

    def any(self) -> StepModel | UpstreamModel | LaneModel:
        """One of them, to check requests with. Raises EngineError after `let_go`."""
        if self._single is not None:
            return self._single
        if self._together is None:
            raise EngineError("the synthesizer is closed: load another one")
        return self._together.model

    def prepare(self) -> None:
        """For a server: makes the second model now, where one is to come; and where streams of both would share a CPU,
        all of them are made together, so that one of the two knows how many are carried."""
        later, self._later = self._later, None
        if later is not None:
            self._making = True
            self._make(later)
        if self._together is not None and self._single is not None and not self._single.overlaps:
            self._singly = 0

    def check(self, sampling: Sampling) -> None:
        """Raises EngineError after `let_go`, and SamplingError for rng="torch" where there is no single engine."""
        if self.any() is not self._single and sampling.rng == "torch":
            raise SamplingError(
                "the batch engine draws with rng='philox': for rng='torch' take backend='torch', engine='single'"
            )

    def pick(
        self, due: int, singly: int, sampling: Sampling
    ) -> tuple[StepModel | UpstreamModel | LaneModel, EngineName]:
        """Who serves a stream that begins. due: others that wait neither for text nor for their reader, on either
        engine. singly: open on the single one, whether they wait or not. Raises as `check`."""
        self.check(sampling)
        model = self.any()
        if model is not self._single:
            return model, "batch"
        if (due < self._singly and singly < OPEN_SINGLY) or sampling.rng == "torch":
            return model, "single"
        if self._together is None:
            self._begin()
            return model, "single"
        return self._together.model, "batch"

    def each(self) -> list[tuple[StepModel | UpstreamModel | LaneModel, EngineName]]:
        """All of them, by the name of the engine. Raises EngineError after `let_go`."""
        self.any()
        together = None if self._together is None else self._together.model
        named: list[tuple[Any, EngineName]] = [(self._single, "single"), (together, "batch")]
        return [(model, name) for model, name in named if model is not None]

    def let_go(self) -> None:
        """Frees the models, as far as nobody else holds them."""
        self._single = self._together = self._later = None

    def _begin(self) -> None:
        """Makes the second model in a thread of its own, once. A program that ends meanwhile waits for it: compilers
        that are cut off abort the process."""
        later, self._later = self._later, None
        if later is not None:
            self._making = True
            threading.Thread(target=self._make, args=(later,), name="mktts-batch-loading", daemon=False).start()

    def _make(self, later: Callable[[], Together]) -> None:
        try:
            with torch.inference_mode():
                executor = later()
            self.on_made(executor)
        except Exception as reason:
            logging.getLogger(__name__).warning("streams go on taking turns, the batch engine cannot run: %s", reason)
        else:
            if self._single is not None:
                self._together = executor
        finally:
            self._making = False
