"""Timings: of this machine, and of ours beside other programs on one card.

* command: `python -m mktts bench`
* here: one checkpoint on this machine; codec: the codec by itself
* runner: every section as a process of its own; sections, peer_sections: what each measures; frames, settings: what
  they share; peers: the other programs; graph_oracle: PyTorch's operators as CUDA graphs
* load: how many real-time listeners are carried
"""
