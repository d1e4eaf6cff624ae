"""`python -m mktts parity`: what this package computes, against independent truths.

* upstream: prompts and codes, bit for bit qwen-tts's, on the CPU
* kernel: the megakernel's error to fp32, next to bf16 PyTorch's; batch: the same of the batched frame
* codec: streamed, served and batched decodes, against one pass in fp32
* ratio: the measure of kernel and batch; command: the sections and their document"""
