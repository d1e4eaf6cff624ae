"""What requests may call the voices: the checkpoint's speakers, saved voices, and names that stand for one of them."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from itertools import cycle

from mktts.errors import ServerError
from mktts.server.schemas import DEFAULT

# OpenAI's voices. Clients and user interfaces that were made for them send no other name.
_OPENAI = {
    "female": ("alloy", "coral", "fable", "marin", "nova", "sage", "shimmer"),
    "male": ("ash", "ballad", "cedar", "echo", "onyx", "verse"),
}
OPENAI_VOICES = (*_OPENAI["female"], *_OPENAI["male"])
# As the model card of Qwen3-TTS-12Hz-CustomVoice describes its speakers; slt, rms and awb are the small voice's.
_SPEAKERS = {
    "female": ("vivian", "serena", "ono_anna", "sohee", "slt"),
    "male": ("uncle_fu", "dylan", "eric", "ryan", "aiden", "rms", "awb"),
}


def voice_aliases(
    names: Iterable[str], dialects: Iterable[str] = (), given: Mapping[str, str] | None = None
) -> dict[str, str]:
    """Which of `names` each alias stands for: all of OpenAI's names, and those of `given` over them.

    OpenAI's are dealt out to speakers of the same sex, or to all where that is not known; not to `dialects`, who speak
    a dialect, unless there is nobody else. Where there are no names, every alias stands for DEFAULT.
    Raises ServerError for an alias of a voice that there is not, or with the name of one.
    """
    names = [name.lower() for name in names]
    plain = [name for name in names if name not in set(dialects)] or names or [DEFAULT]
    aliases = {}
    for sex, voices in _OPENAI.items():
        turns = cycle([name for name in plain if name in _SPEAKERS[sex]] or plain)
        aliases |= {alias: next(turns) for alias in voices if alias not in names}
    for alias, name in (given or {}).items():
        if name.lower() not in (*names, DEFAULT):
            known = ", ".join([*names, DEFAULT])
            raise ServerError(f"--voice-alias {alias}={name}: expected one of {known}, got {name!r}")
        if alias.lower() in names:
            raise ServerError(f"--voice-alias {alias}={name}: there is a voice {alias!r}; take another name")
        aliases[alias.lower()] = name.lower()
    return aliases
