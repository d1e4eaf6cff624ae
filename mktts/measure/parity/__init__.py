"""Prompt, codes, codec and kernel against independent truths.

* command: `python -m mktts parity`; sections: its parts; document: its file; budget: its minutes
* upstream: prompts and codes against qwen-tts, on the CPU
* codec: two decodings of the same codes; serving_codec: how far the codec of a CUDA device is from fp32
* kernel: the megakernel against fp32, next to bf16 PyTorch; text: the same of the text decoder; probe: how both look
  inside a frame; forced: the sums of their errors
* batch: the same of the batched frame, on crowds of streams (crowd, crowd_errors) whose lanes show what they do
  (lanes_probe); batch_codec: the codec of many streams
"""
