"""Timings of this machine, and beside them those of faster-qwen3-tts and of upstream: `python -m mktts bench`.

* command: the arguments, the document, the table; every section is a process of its own
* sections: what each measures, of ours and of other implementations
"""
