"""A synthesizer in a process of its own, behind the interface of one in this process.

A server of many listeners has two busy threads: the engine's worker, and the event loop with its sockets. In one
process they share one interpreter, whose lock each gives up and waits for thousands of times a second; in two, each
has its own.

* `synthesizer`: in the server's process; what it hands out are streams like any other
* `maker`: the other process, which owns the model
* `wire`: what the two say to each other, pickled, over a socket that nobody else has
"""

from mktts.synth.apart.synthesizer import ApartSynthesizer

__all__ = ["ApartSynthesizer"]
