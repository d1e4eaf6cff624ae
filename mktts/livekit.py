"""Qwen3-TTS as a LiveKit TTS plugin (livekit-agents 1.8), through a server or in this process:

from mktts.livekit import TTS

session = AgentSession(tts=TTS("http://127.0.0.1:8000", voice="vivian"), ...)"""

import asyncio
import json
import re
from collections.abc import AsyncIterator, Coroutine, Sequence
from contextlib import asynccontextmanager
from typing import Any

try:
    from livekit.agents import DEFAULT_API_CONNECT_OPTIONS as _USUAL
    from livekit.agents import APIConnectionError, APIConnectOptions, APIStatusError, utils
    from livekit.agents import tts as framework
    from livekit.agents.types import TimedString
except ModuleNotFoundError:
    raise ModuleNotFoundError("mktts.livekit needs: pip install livekit-agents==1.8.9", name="livekit") from None
from websockets.asyncio.client import ClientConnection, connect
from websockets.exceptions import InvalidStatus, WebSocketException

from mktts.engine.options import StreamOptions, WordTime
from mktts.engine.stream import Session
from mktts.errors import EngineError, MkttsError, OptionsError
from mktts.model.voice import Voice
from mktts.spec import SAMPLE_RATE_HZ
from mktts.synth import Synthesizer

Piece = tuple[bytes, Sequence[WordTime]]  # 16-bit PCM, and all words whose times are known so far
Speech = tuple[Coroutine, AsyncIterator[Piece]]  # the coroutine that feeds the text, and the resulting audio

_PCM = {"sample_rate": SAMPLE_RATE_HZ, "num_channels": 1}
_SILENCE = bytes(2 * SAMPLE_RATE_HZ // 50)  # for text without a word, because LiveKit treats no audio as a failure
_STATUS = {"invalid_request_error": 400, "rate_limit_error": 429, "server_error": 500}  # LiveKit retries all but 400


class TTS(framework.TTS):
    """The `tts` of an AgentSession, fed token by token. Its streams raise APIStatusError and APIConnectionError."""

    def __init__(
        self,
        source: Synthesizer | str,
        *,
        api_key: str | None = None,
        voice: str | Voice | None = None,
        language: str = "auto",
        instruct: str | None = None,
        seed: int | None = None,
    ) -> None:
        """Stores the settings; the connection is opened by the first stream, or by `prewarm`.

        source: the address of a server, or a synthesizer, which the caller loads and closes. api_key: the server's.
        voice: the name of a speaker or of a voice on the server, or a `Voice` for a synthesizer; None takes the first.
        language, instruct, seed: as in `StreamSettings`. Markup is stripped from the text.
        Raises OptionsError if `source` is a string but not an address."""
        super().__init__(capabilities=framework.TTSCapabilities(streaming=True, aligned_transcript=True), **_PCM)
        style = {"language": language, "instruct": instruct, "seed": seed}
        self._synthesizer = None if isinstance(source, str) else source
        if self._synthesizer is not None:
            style["voice" if isinstance(voice, Voice) else "speaker"] = voice
            self._style = {**style, "options": StreamOptions(markup="strip", word_times=True)}
        elif found := re.fullmatch(r"(?:http|ws)(s?)://([^?#]+?)/*", source):
            self._address = f"ws{found[1]}://{found[2]}/tts/ws"
            self._headers = {} if api_key is None else {"Authorization": f"Bearer {api_key}"}
            style |= {"speaker": voice, "markup": "strip", "word_timestamps": True}
            self._style = {key: value for key, value in style.items() if value is not None}
        else:
            raise OptionsError(f"expected an address such as http://127.0.0.1:8000, got {source!r}")
        self._sockets = utils.ConnectionPool(connect_cb=self._connect, close_cb=ClientConnection.close)

    @property
    def provider(self) -> str:
        return "mktts"

    def synthesize(self, text: str, *, conn_options: APIConnectOptions = _USUAL) -> framework.ChunkedStream:
        return self._synthesize_with_stream(text, conn_options=conn_options)

    def stream(self, *, conn_options: APIConnectOptions = _USUAL) -> framework.SynthesizeStream:
        return SpokenTokens(tts=self, conn_options=conn_options)

    def prewarm(self) -> None:
        """Connects to the server ahead of the first utterance."""
        if self._synthesizer is None:
            self._sockets.prewarm()

    async def aclose(self) -> None:
        await self._sockets.aclose()

    @asynccontextmanager
    async def speech(self, tokens: AsyncIterator[str], timeout_s: float) -> AsyncIterator[Speech]:
        """Opens an utterance that speaks `tokens`; leaving the block cancels it. timeout_s: for the connection."""
        try:
            if self._synthesizer is None:
                async with self._sockets.connection(timeout=timeout_s) as socket:
                    try:
                        await _send(socket, "start", **self._style)
                        yield _feed_there(socket, tokens), _pieces_from_there(socket)
                    except BaseException:
                        socket.transport.abort()  # an orderly close would wait for data still in flight
                        raise
                return
            session = self._synthesizer.open(**self._style)
            try:
                yield _feed_here(session, tokens), _pieces_from_here(session)
            finally:
                session.cancel()
        except InvalidStatus as error:
            raise APIStatusError(str(error), status_code=error.response.status_code) from error
        except (OSError, WebSocketException) as error:  # TimeoutError is an OSError
            raise APIConnectionError(f"{error}; is python -m mktts serve running there?") from error
        except MkttsError as error:
            raise APIStatusError(str(error), status_code=500 if error.exit_status == 1 else 400) from error

    async def _connect(self, timeout_s: float) -> ClientConnection:
        return await connect(self._address, additional_headers=self._headers, open_timeout=timeout_s, compression=None)


class SpokenTokens(framework.SynthesizeStream):
    """An utterance of `TTS`: call `push_text` for each part of the text, then `end_input`."""

    async def _run(self, output_emitter: framework.AudioEmitter) -> None:
        output_emitter.initialize(request_id=utils.shortuuid(), mime_type="audio/pcm", stream=True, **_PCM)
        output_emitter.start_segment(segment_id=utils.shortuuid())
        written = ""
        while not any(map(str.isalnum, written)):  # start only with a word: the server's wait for text has a timeout
            token = await anext(self._input_ch, None)
            if not isinstance(token, str):
                output_emitter.push(_SILENCE if written.strip() else b"")
                return
            written += token
        self._mark_started()
        async with self._tts.speech(self._tokens(written), self._conn_options.timeout) as (feeding, pieces):
            both = [asyncio.create_task(work) for work in (feeding, self._push(pieces, output_emitter))]
            try:
                await asyncio.gather(*both)
            finally:
                await utils.aio.cancel_and_wait(*both)

    async def _tokens(self, token: object) -> AsyncIterator[str]:
        """Yields the tokens of the input until its end. token: the first of them."""
        while isinstance(token, str):  # any other object marks the end of the input
            yield token
            token = await anext(self._input_ch, None)

    async def _push(self, pieces: AsyncIterator[Piece], output_emitter: framework.AudioEmitter) -> None:
        told = said = 0  # words and characters already pushed
        async for pcm, words in pieces:
            for word in words[told:]:
                start, said = said, max(said, self._pushed_text.find(word.word, said)) + len(word.word)
                text = self._pushed_text[start:said]  # includes the space before the word
                output_emitter.push_timed_transcript(TimedString(text, start_time=word.start_s, end_time=word.end_s))
            told = len(words)
            output_emitter.push(pcm)


async def _feed_here(session: Session, tokens: AsyncIterator[str]) -> None:
    async for token in tokens:
        session.feed(token)
    session.finish()


async def _feed_there(socket: ClientConnection, tokens: AsyncIterator[str]) -> None:
    async for token in tokens:
        await _send(socket, "text", text=token)
    await _send(socket, "finish")


async def _send(socket: ClientConnection, type: str, **fields: Any) -> None:
    await socket.send(json.dumps({"type": type, **fields}))


async def _pieces_from_here(session: Session) -> AsyncIterator[Piece]:
    async for chunk in session:
        yield chunk.pcm16, session.words
    if session.finish_reason == "cancelled":
        raise EngineError("the synthesizer was closed in the middle of an utterance: load another")
    yield b"", session.words


async def _pieces_from_there(socket: ClientConnection) -> AsyncIterator[Piece]:
    words: list[WordTime] = []
    async for message in socket:
        if isinstance(message, bytes):
            yield message, words
            continue
        said = json.loads(message)
        if error := said.get("error"):
            raise APIStatusError(error["message"], status_code=_STATUS[error["type"]], body=error)
        if said["type"] == "finished":
            yield b"", [WordTime(**word) for word in said["words"] or ()]
            return
        words += [WordTime(**word) for word in said.get("words", ())]
    raise APIConnectionError("the server closed the connection in the middle of an utterance")
