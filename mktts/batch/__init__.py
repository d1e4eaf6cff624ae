"""Many utterances in one step of the model.

scheduler, board, tick, tick_model, admission and pages decide, without a device; simulate plays them. talker,
predictor, draws, noise, keys_values, lane_stack, codec and codec_lanes make frames and sound in plain PyTorch
operators; cuda_lanes, frame, slots, weights, device and kernels run a tick as one CUDA graph.
"""
