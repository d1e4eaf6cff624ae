"""A listener's player, which starts with the first PCM and plays in real time. Times are given; there is no clock."""

from __future__ import annotations


class Player:
    """dry_s: when all PCM so far has been played; None before the first. Seconds of one clock."""

    __slots__ = ("dry_s",)

    def __init__(self) -> None:
        self.dry_s: float | None = None

    def play(self, now_s: float, duration_s: float) -> tuple[float, float]:
        """PCM of so many seconds is there at `now_s`. Returns when it begins to sound, and for how many seconds the
        listener had nothing to hear before; 0 for the first PCM."""
        dry_s = now_s if self.dry_s is None else self.dry_s
        starts_s = max(now_s, dry_s)
        self.dry_s = starts_s + duration_s
        return starts_s, max(0.0, now_s - dry_s)

    def lead_s(self, now_s: float) -> float:
        """Seconds until it runs dry, negative since it did; 0 before the first PCM."""
        return 0.0 if self.dry_s is None else self.dry_s - now_s

    def pause(self, until_s: float) -> None:
        """What comes by then is not late: the listener, or who writes the text, held it up."""
        if self.dry_s is not None:
            self.dry_s = max(self.dry_s, until_s)
