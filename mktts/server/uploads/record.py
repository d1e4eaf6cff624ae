"""What is kept about an uploaded voice, beside the voice itself."""

from __future__ import annotations

import json
import re
from dataclasses import asdict, dataclass

from mktts.errors import VoiceError

_NAME = re.compile(r"[a-z0-9][a-z0-9_.-]{0,63}")


@dataclass(frozen=True)
class UploadRecord:
    """name: in lower case. consent: the statement, as it was sent. created_at, expires_at: seconds since 1970.
    mime_type, file_size: of the recording, in bytes; it is not kept. speaker_description: what the caller wrote.
    """

    name: str
    consent: str
    created_at: int
    expires_at: int
    mime_type: str
    file_size: int
    ref_text: str | None = None
    speaker_description: str | None = None

    def written(self) -> str:
        """As text, for the voice's file."""
        return json.dumps(asdict(self), ensure_ascii=False)

    @classmethod
    def read(cls, text: str) -> UploadRecord:
        """Of what `written` made. Raises VoiceError for anything else."""
        try:
            return cls(**json.loads(text))
        except (ValueError, TypeError) as error:
            raise VoiceError(f"expected what is noted about an uploaded voice, got something else: {error}") from None


def name_of(word: str) -> str | None:
    """The name that `word` stands for, in any case; None where no voice may be called so."""
    name = word.lower()
    return name if _NAME.fullmatch(name) else None
