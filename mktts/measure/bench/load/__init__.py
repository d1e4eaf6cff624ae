"""How many real-time listeners the synthesizer carries, from text to consumed chunk: `python -m mktts bench --load`.

* command: the arguments, the table; sections: what can be measured, each a command of a few minutes
* settings: what all sections measure alike; texts: what is said, at a context of so many rows
* listener: one listener's arithmetic; visits: who comes when, and what for; crowd: all of them on one event loop,
  whose record is an attendance
* point: one load held for its time, in figures; book: the file that points and figures are merged into
* served: the same of a server by its address; remote: its streams; fleet: listeners in processes of their own
* frames: ticks by themselves; soak: minutes of everything at once; mixed: both engines beside each other;
  others: another implementation, a process (seat) for each listener

**Listeners** are streams that are open at once, from the call of `stream` to its last chunk, the mean over the held
time. Each takes every chunk as soon as it is there and plays from its first PCM on, in real time, without a prebuffer.
**Time to first PCM** counts from the planned arrival, so that whatever comes late to the call itself counts too; an
arrival that is refused, fails, or is still waiting when the run ends has an infinite one. An **underrun** is a chunk
that was consumed after all PCM before it had been played; the listener has waited then, and plays on from there.
"""
