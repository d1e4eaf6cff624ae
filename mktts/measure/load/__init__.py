"""Measures how many real-time listeners are served in time: `python -m mktts bench --load`, `--url URL`.

**Listeners** arrive by a Poisson process, whether or not earlier ones have been served. Each reads every chunk as soon
as it is available and plays from its first PCM on, in real time, without a prebuffer. **Time to first PCM** is measured
from the planned arrival; it is infinite for an arrival that is refused, fails, or still waits at the end of the run. An
**underrun** is a chunk that arrived after all earlier PCM had been played; the listener waits for it and plays on. A
listener is **in time** if it was not refused, did not fail, and had no underrun. A load is **carried** if every
listener was in time for its whole duration."""
