"""Everything that is measured: what a figure means, which machine it belongs to, and how it is taken.

* metrics: figures of many streams and frames (of one stream: mktts.engine.metrics); environment: the machine they
  belong to, what can run there, and how fast its memory is
* bench: timings, beside the peers'; load: real-time listeners; parity: proofs against independent truths
* trace: one launch of the frame kernel; inspection: what is in a checkpoint; recogniser: what was understood"""
