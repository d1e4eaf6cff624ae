"""What ticks take here, and how early the next one is planned: learnt from those that ran."""

from __future__ import annotations

from mktts.batch.lanes import Made
from mktts.batch.tick import Tick
from mktts.batch.tick_model import TickFit, TickModel

_EARLY_S = 2e-3  # until some ran
# A gap on the device says that a tick was planned too late: the next is planned earlier by this part of the gap. Where
# there is none, it is planned a little later every time, until there is one: about a twentieth of that lead in the end.
_GAP_PART = 0.6
_RELAX = 0.97
_MOST_EARLY_S = 0.05


class Pace:
    """early_s: before the tick that runs ends, when the next one is planned."""

    def __init__(self, believed: TickModel) -> None:
        """believed: what a tick takes, before any was seen."""
        self._device, self._steps = TickFit(believed), TickFit(believed)
        self.early_s = _EARLY_S

    @property
    def model(self) -> TickModel:
        """What a tick takes on the device."""
        return self._device.model

    @property
    def step_model(self) -> TickModel:
        """What a tick takes with the pause before it, where there is one: a host may be slower than its device."""
        return self._steps.model

    def observe(self, tick: Tick, made: Made, follows: bool) -> None:
        """A tick was read. follows: it was launched while the one before it ran."""
        paused_s = made.idle_s if follows else 0.0
        self._device.observe(*tick.bucket, tick.context_rows, made.took_s)
        self._steps.observe(*tick.bucket, tick.context_rows, made.took_s + paused_s)
        if follows:
            self.early_s = min(_RELAX * self.early_s + _GAP_PART * paused_s, _MOST_EARLY_S)
