"""From a notebook's parameters to utterances: arguments of `Synthesizer.stream`, lists of texts, turns and loads."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import fields, replace
from typing import TYPE_CHECKING, Any

from mktts.common import checked_int
from mktts.errors import MkttsError, OptionsError
from mktts.model.sampling import Choice, Sampling

if TYPE_CHECKING:
    from mktts.checkpoint import Checkpoint

TEMPERATURES = (0.05, 2.0)  # what a slider offers
# Parameter -> field of `Choice`, and the value that leaves it to the checkpoint: -1 of whole numbers, 0 of others.
_FIELDS = {field.name.upper(): field.name for field in fields(Choice) if field.name != "do_sample"}
_BLANK = {name: -1 if isinstance(getattr(Choice(), field), int) else 0 for name, field in _FIELDS.items()}
_DRAWING = (*_FIELDS, "GREEDY")


def at_least(smallest: int, **parameters: int) -> None:
    """Raises OptionsError naming the parameter that is not a whole number of at least `smallest`."""
    for name, value in parameters.items():
        checked_int(name, value, at_least=smallest)


def schedule(text: str) -> tuple[int, ...]:
    """The parameter SCHEDULE, "1,1,2,4,8", as frames per chunk. Raises OptionsError."""
    try:
        frames = tuple(int(part) for part in text.split(","))
    except ValueError:
        frames = ()
    if not frames or min(frames) < 1:
        raise OptionsError(f'SCHEDULE must be frames per chunk, like "1,1,2,4,8", each at least 1, got {text!r}')
    return frames


def texts(parameter: str) -> list[str]:
    """The parameter TEXTS: texts separated by |. Raises OptionsError where one is empty."""
    found = [text.strip() for text in parameter.split("|")]
    if not all(found):
        raise OptionsError(f"TEXTS must be texts separated by |, none of them empty, got {parameter!r}")
    return found


def loads(name: str, parameter: str) -> tuple[int, ...]:
    """Numbers of listeners: "1,4,8" -> (1, 4, 8), "" -> (). Raises OptionsError, with the parameter's name."""
    try:
        found = tuple(int(word) for word in parameter.split(",")) if parameter else ()
    except ValueError:
        found = (0,)
    if found and min(found) < 1:
        raise OptionsError(f'{name} must be numbers of listeners, like "1,4,8", each at least 1, got {parameter!r}')
    return found


def turns(script: str) -> list[tuple[str, float | None]]:
    """The parameter SCRIPT, "hello; 2.5: stop please", as (words, seconds into the bot's speech or None).

    Raises OptionsError.
    """
    found = []
    for turn in script.split(";"):
        after, colon, words = turn.rpartition(":")
        try:
            after_s = float(after) if colon else None
        except ValueError:
            after_s = -1.0
        if not words.strip() or (after_s is not None and not 0 <= after_s < float("inf")):
            raise OptionsError(
                f'SCRIPT must be turns separated by ;, each "words" or "SECONDS: words", got {turn.strip()!r}'
            )
        found.append((words.strip(), after_s))
    return found


def filled_in(checkpoint: Checkpoint, **parameters: Any) -> dict[str, Any]:
    """The parameters with the checkpoint's own value where they leave the choice to it: SPEAKER "", TEMPERATURE and
    TOP_P 0, TOP_K -1. What a panel of controls shows."""
    talker = checkpoint.sampling().talker
    own = {
        "SPEAKER": ("", checkpoint.config.default_speaker or ""),
        **{name: (_BLANK[name], getattr(talker, field)) for name, field in _FIELDS.items()},
    }
    chosen = {name: value for name, (blank, value) in own.items() if parameters.get(name) == blank}
    return {**parameters, **chosen}


def choices(checkpoint: Checkpoint) -> dict[str, Any]:
    """What `nb.controls` may offer: speakers, languages, a range of temperatures."""
    config = checkpoint.config
    return {
        "SPEAKER": list(config.speakers) or [""],
        "LANGUAGE": config.spoken_languages,
        "TEMPERATURE": TEMPERATURES,
    }


def more(checkpoint: Checkpoint) -> list[str]:
    """The parameters that a panel of controls folds away: what this checkpoint does not take, and fine settings."""
    config = checkpoint.config
    takes = {
        "SPEAKER": bool(config.speakers),
        "LANGUAGE": len(config.spoken_languages) > 2,  # "auto" and more than one
        "INSTRUCT": config.takes_instruct,
        "VOICE": config.type.clones,
    }
    return [*(name for name, does in takes.items() if not does), "TOP_K", "GREEDY", "MAX_FRAMES", "SCHEDULE"]


def stream_arguments(checkpoint: Checkpoint, **parameters: Any) -> dict[str, Any]:
    """Notebook parameters as keyword arguments of `Synthesizer.stream`; "" means the checkpoint's own default.

    Knows TEXT, LANGUAGE, SPEAKER (default: the first built-in one), INSTRUCT, VOICE (a saved voice's path), SEED,
    MAX_FRAMES, SCHEDULE ("1,1,2,4,8"), and TEMPERATURE, TOP_K, TOP_P, GREEDY, which hold for all sixteen codes of a
    frame. Raises MkttsError for another name, or what the value is refused with.
    """
    from mktts.engine.options import StreamOptions
    from mktts.model.voice import Voice

    convert: dict[str, Callable[[Any], Any]] = {
        "TEXT": str,
        "LANGUAGE": str,
        "SPEAKER": lambda name: name or checkpoint.config.default_speaker,
        "INSTRUCT": lambda text: text or None,
        "VOICE": lambda path: Voice.load(path) if path else None,
        "SEED": int,
        "MAX_FRAMES": int,
    }
    unknown = sorted(set(parameters) - {*convert, "SCHEDULE", *_DRAWING})
    if unknown:
        raise MkttsError(f"expected parameters among {sorted([*convert, 'SCHEDULE', *_DRAWING])}, found {unknown}")
    arguments = {name.lower(): convert[name](value) for name, value in parameters.items() if name in convert}
    if "SCHEDULE" in parameters:
        arguments["options"] = StreamOptions(schedule=schedule(parameters["SCHEDULE"]))
    if drawing := {name: parameters[name] for name in _DRAWING if name in parameters}:
        arguments["sampling"] = _sampling(checkpoint, **drawing)
    return arguments


def _sampling(checkpoint: Checkpoint, GREEDY: bool = False, **given: Any) -> Sampling:
    """The checkpoint's settings, changed where a parameter is not the talker's own value."""
    own = checkpoint.sampling()
    changes = {
        _FIELDS[name]: value
        for name, value in given.items()
        if value not in (_BLANK[name], getattr(own.talker, _FIELDS[name]))
    }
    drawn = replace(own, talker=replace(own.talker, **changes), predictor=replace(own.predictor, **changes))
    return drawn.greedy() if GREEDY else drawn
