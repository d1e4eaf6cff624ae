"""Everything that is measured: what a figure means, which machine it belongs to, and how it is taken.

* metrics: figures of many streams and frames (of one stream: mktts.speech.metrics); environment: the machine they
  belong to; machine: what that machine can do
* bench: timings, beside the peers'; parity: proofs against independent truths
* inspection: what is in a checkpoint; checkpoint_maker: random ones made in child processes
* tables: values as tables show them
* recogniser, word_errors: what was understood; tracks: when each side of a conversation sounds
"""
