"""Every error this package raises on purpose. Each message says what was expected, what came, and what to do."""


class MkttsError(Exception):
    """Base class: catch this to catch everything mktts raises on purpose."""

    exit_status = 2  # of a command that it ends: bad input; 1 where the failure lies inside


class CheckpointError(MkttsError):
    """A checkpoint cannot be found, read, or does not have the Qwen3-TTS 12 Hz layout."""


class TextError(MkttsError, ValueError):
    """The text (or instruction) cannot be spoken: empty, not a string, or over the limit."""


class PromptError(MkttsError, ValueError):
    """Language, speaker, voice or layout does not fit the checkpoint."""


class VoiceError(MkttsError, ValueError):
    """Reference audio or a saved voice is unusable."""


class SamplingError(MkttsError, ValueError):
    """A sampling setting is out of range."""


class OptionsError(MkttsError, ValueError):
    """A streaming option (chunk schedule, buffer, limit, seed) is out of range."""


class CodecError(MkttsError, ValueError):
    """Codes or codec state do not fit the codec decoder."""


class AudioError(MkttsError, ValueError):
    """Audio that cannot be written: wrong shape, dtype, values or rate, or a file name that is no known format."""


class CapacityError(MkttsError):
    """A stream asks for more than there is: positions of its keys and values; a slot, pages or time for a listener."""


class BusyError(CapacityError):
    """Every place is taken for now, of a server or of the engine in this process: ask again later."""

    exit_status = 1
    capacity: int | None = None  # listeners served at once, where that is known


class BackendUnavailable(MkttsError):
    """The requested backend or device cannot run on this machine."""


class EngineError(MkttsError):
    """The worker that owns the model failed or was closed."""

    exit_status = 1


class ConnectionLost(EngineError):
    """A server cannot be reached, or was lost or stopped in the middle: a later try may find it, or another one."""


class SentencesError(MkttsError, ValueError):
    """A table of sentences cannot be read, or the folder that its speech goes to cannot be used for it."""


class MetricsError(MkttsError, ValueError):
    """A figure cannot be computed or recorded: no audio, not a number, not a scalar."""


class BatchError(MkttsError):
    """A notebook grid is wrong (unknown parameter, missing notebook) or a run in it failed."""


class ServerError(MkttsError):
    """The server cannot start as it was asked to: an unsafe address, a missing key, a wrong limit."""


class AccessError(MkttsError):
    """A server wants a key, or another one."""


class AgentError(MkttsError):
    """The voice agent cannot be built or run as asked: a missing key or package, a wrong choice, a phrase it lacks."""


class PackageMissing(AgentError):
    """A part of the agent needs a package that this system has no wheel of: what stands on it is skipped by name."""
