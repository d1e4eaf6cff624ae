"""What went wrong with one utterance, in Pipecat's terms."""

from __future__ import annotations

from dataclasses import dataclass

from pipecat.frames.frames import ErrorFrame
from pipecat.utils.errors import ErrorCategory

from mktts.errors import (
    AccessError,
    BusyError,
    CapacityError,
    ConnectionLost,
    OptionsError,
    PromptError,
    SamplingError,
    TextError,
    VoiceError,
)

_OF_THE_TEXT = (TextError, CapacityError)  # the next sentence may do
_OF_THE_SETTINGS = (PromptError, VoiceError, SamplingError, OptionsError)  # until they are changed


@dataclass
class SpeechFailedFrame(ErrorFrame):
    """An utterance that ended before its text did.

    It travels through the audio context after everything that was spoken; what follows it was not spoken.

    Parameters:
        context_id: The audio context whose text was not all spoken.
        permanent: Whether the service can speak no more until its settings change.
    """

    context_id: str | None = None
    permanent: bool = False


def speech_failed(error: Exception, context_id: str) -> SpeechFailedFrame:
    """The frame for what an utterance raised.

    Text that cannot be spoken leaves the service usable, and so does a server that is lost or has no place free: the
    next sentence may find it again. Settings that do not fit the checkpoint do not, and neither does a failed engine:
    after a CUDA error every later call fails too.
    """
    if isinstance(error, BusyError):
        category, permanent = ErrorCategory.RATE_LIMIT, False
    elif isinstance(error, ConnectionLost):
        category, permanent = ErrorCategory.SERVER, False
    elif isinstance(error, _OF_THE_TEXT):
        category, permanent = ErrorCategory.APPLICATION, False
    elif isinstance(error, _OF_THE_SETTINGS):
        category, permanent = ErrorCategory.INVALID_REQUEST, True
    elif isinstance(error, AccessError):
        category, permanent = ErrorCategory.AUTHENTICATION, True
    else:
        category, permanent = ErrorCategory.SERVER, True
    return SpeechFailedFrame(
        error=f"Speech failed: {type(error).__name__}: {error}",
        exception=error,
        category=category,
        context_id=context_id,
        permanent=permanent,
    )
