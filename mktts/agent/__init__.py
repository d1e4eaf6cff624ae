"""A voice agent on Pipecat: speech to text, a language model, and Qwen3-TTS as its voice (`conversation.build`).

With no key and no network, speech to text is pocketsphinx with a grammar and the language model a table of answers."""
