"""Measurements: definitions of the figures, the machine they were taken on, and the tools that take them.

* metrics: figures of many streams and frames (of one stream: mktts.engine.metrics); environment: the machine, what can
  run on it, and its memory bandwidth
* bench: timings, also of other implementations; load: real-time listeners; parity: comparisons with references
* trace: phases within a launch of the frame kernel; inspection: contents of a checkpoint; recogniser: word errors"""
