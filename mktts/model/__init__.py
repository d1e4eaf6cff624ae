"""Talker and code predictor: the Qwen3 stack, prompts, tokenizer, sampling, the oracle, the Backend protocol."""
