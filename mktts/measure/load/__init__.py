"""How many real-time listeners are served in time: `python -m mktts bench --load`, `--url URL`.

**Listeners** come by a Poisson process, whether earlier ones are served or not. Each takes every chunk as soon as it is
there and plays from its first PCM on, in real time, without a prebuffer. **Time to first PCM** counts from the planned
arrival; an arrival that is refused, fails, or still waits when the run ends has an infinite one. An **underrun** is a
chunk that came after all PCM before it had been played; the listener has waited then, and plays on from there. A
listener is **in time** who was not refused, did not fail, and had no underrun. A load is carried where every listener
was in time for the whole of it."""
