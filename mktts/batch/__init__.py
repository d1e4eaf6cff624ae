"""Many utterances at once.

<<<<<<< HEAD
scheduler, board, tick, tick_model, admission, pages and simulate decide and simulate, without a device. executor,
utterance and model serve streams by what they decide, on `lanes`: plain makes a tick of PyTorch operators, cuda_lanes
one CUDA graph.
=======
scheduler, board, tick, tick_model, admission and pages decide, without a device; simulate plays them. talker,
predictor, draws, noise, keys_values, lane_stack, codec and codec_lanes make frames and sound in plain PyTorch
operators; cuda_lanes, frame, slots and weights make frames as CUDA graphs, cuda_codec and memory sound, both by
kernels. Nothing opens streams on them yet.
>>>>>>> wt-codec
"""
