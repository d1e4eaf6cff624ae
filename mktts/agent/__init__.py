"""A voice agent on Pipecat: ears (speech to text), a mind (a language model), Qwen3-TTS as its voice.

`conversation.build(transport, settings)` makes the pipeline; everything else puts a transport under it:

    scripted.py   a conversation without a person: recorded user speech, latencies, a stereo file
    web.py        the page, its WebSocket and WebRTC
    bot.py        a bot file for Pipecat's development runner and evals
    command.py    `python -m mktts agent`

With no key and no network the ears are pocketsphinx with a grammar and the mind is a short script; Deepgram, OpenAI or
any server of OpenAI's shape take their place where the environment names them (`settings.py`).
"""
