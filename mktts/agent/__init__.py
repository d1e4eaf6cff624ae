"""A voice agent on Pipecat: speech to text, a language model, and Qwen3-TTS as its voice (`conversation.build`).

Without keys and network, pocketsphinx with a grammar does speech to text, and a table of answers is the model."""
