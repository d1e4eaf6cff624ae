"""`python -m mktts parity`: what this package computes, against independent truths.

* upstream: prompts and codes, bit for bit qwen-tts's, on the CPU
* kernel: the megakernel's error to fp32, next to bf16 PyTorch's; ratio: its measure
* codec: streamed and served decodes, against one pass in fp32
* command: the sections and their document"""
