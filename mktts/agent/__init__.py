"""A voice agent on Pipecat: speech to text, a language model, and Qwen3-TTS as its voice.

`conversation.build(transport, settings)` makes the pipeline; the other modules put a transport under it:

    scripted.py   a conversation without a person: recorded user speech, latencies, a stereo file
    web.py        the page, its WebSocket and WebRTC
    command.py    `python -m mktts agent`

With no key and no network, speech to text is pocketsphinx with a grammar and the language model is a table of answers.
Deepgram, OpenAI or any server of OpenAI's shape take their place where the environment names them (`settings.py`)."""
