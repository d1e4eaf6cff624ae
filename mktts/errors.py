"""Every error this package raises on purpose. A message says what was expected, what was found, and what to do."""


class MkttsError(Exception):
    """Base class: catch this to catch everything mktts raises on purpose."""

    exit_status = 2  # of a command that fails with it: 2 for bad input, 1 for an internal failure


class CheckpointError(MkttsError):
    """A checkpoint cannot be found or read, or does not have the Qwen3-TTS 12 Hz layout."""


class TextError(MkttsError, ValueError):
    """The text (or instruction) cannot be spoken: empty, not a string, or over the limit."""


class PromptError(MkttsError, ValueError):
    """The language, speaker, voice or layout does not fit the checkpoint."""


class VoiceError(MkttsError, ValueError):
    """Reference audio or a saved voice is unusable."""


class SamplingError(MkttsError, ValueError):
    """A sampling setting is out of range."""


class OptionsError(MkttsError, ValueError):
    """A streaming option (chunk schedule, buffer, limit, seed) is out of range."""


class CodecError(MkttsError, ValueError):
    """Codes or codec state do not fit the codec decoder."""


class AudioError(MkttsError, ValueError):
    """Audio cannot be written: wrong shape, dtype, values or rate, or a file name of an unknown format."""


class CapacityError(MkttsError):
    """A stream needs more than is available: key-value positions, a slot, pages, or time on the device."""


class BusyError(CapacityError):
    """The server, or the engine in this process, is at capacity: retry later."""

    exit_status = 1
    capacity: int | None = None  # streams served at once, if known


class BackendUnavailable(MkttsError):
    """The requested backend or device cannot run on this machine."""


class EngineError(MkttsError):
    """The worker that owns the model failed or was closed."""

    exit_status = 1


class ConnectionLost(EngineError):
    """A server cannot be reached, or the connection was lost during a stream: a retry may succeed."""


class SentencesError(MkttsError, ValueError):
    """A table of sentences cannot be read, or its output folder cannot be used."""


class MetricsError(MkttsError, ValueError):
    """A metric cannot be computed or recorded: no audio, not a number, not a scalar."""


class BatchError(MkttsError):
    """A notebook grid is wrong (unknown parameter, missing notebook) or a run in it failed."""


class ServerError(MkttsError):
    """The server cannot start with these settings: an unsafe address, a missing key, an invalid limit."""


class AccessError(MkttsError):
    """A server requires an API key, or rejected the one that was sent."""


class AgentError(MkttsError):
    """The voice agent cannot be built or run as asked: a missing key, package or phrase, or an invalid choice."""


class PackageMissing(AgentError):
    """A part of the agent needs a package that has no wheel for this system; tests of that part are skipped."""
