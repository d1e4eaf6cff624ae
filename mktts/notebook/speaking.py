"""Converts a notebook's parameters to arguments of `Synthesizer.stream`, to a panel of widgets, and to texts."""

from dataclasses import replace
from typing import Any

from mktts.checkpoint import Checkpoint
from mktts.common import checked_int, whole_numbers
from mktts.engine.options import StreamOptions
from mktts.errors import MkttsError, OptionsError
from mktts.model.sampling import Sampling
from mktts.model.voice import Voice
from mktts.notebook.nb import Controls

TEMPERATURES = (0.05, 2.0)  # range of the slider
_OPEN = {"SPEAKER": "", "TEMPERATURE": 0, "TOP_K": -1}  # values that leave the choice to the checkpoint


def at_least(smallest: int, **parameters: int) -> None:
    """Raises OptionsError, with its name, for a parameter that is not an integer of at least `smallest`."""
    for name, value in parameters.items():
        checked_int(name, value, at_least=smallest)


def texts(parameter: str) -> list[str]:
    """Splits the parameter TEXTS at |. Raises OptionsError if a text is empty."""
    found = [text.strip() for text in parameter.split("|")]
    if not all(found):
        raise OptionsError(f"TEXTS must be texts separated by |, none of them empty, got {parameter!r}")
    return found


def panel(checkpoint: Checkpoint, **parameters: Any) -> Controls:
    """Makes the controls of a notebook's parameters. They show the checkpoint's value for a parameter that leaves the
    choice to it (SPEAKER "", TEMPERATURE 0, TOP_K -1), and collapse details and what the checkpoint does not take."""
    config, drawn = checkpoint.config, checkpoint.sampling().talker
    own = {"SPEAKER": config.default_speaker or "", "TEMPERATURE": drawn.temperature, "TOP_K": drawn.top_k}
    shown = {name: own[name] if value == _OPEN.get(name) else value for name, value in parameters.items()}
    speakers = list(config.speakers) or [""]
    offered = {"SPEAKER": speakers, "LANGUAGE": config.spoken_languages, "TEMPERATURE": TEMPERATURES}
    takes = {
        "SPEAKER": bool(config.speakers),
        "LANGUAGE": len(config.spoken_languages) > 2,  # "auto" and more than one
        "INSTRUCT": config.takes_instruct,
        "VOICE": config.type.clones,
    }
    folded = [name for name, does in takes.items() if not does]
    return Controls(offered, [*folded, "TOP_K", "GREEDY", "MAX_FRAMES", "SCHEDULE"], **shown)


def stream_arguments(checkpoint: Checkpoint, **parameters: Any) -> dict[str, Any]:
    """Converts notebook parameters to keyword arguments of `Synthesizer.stream`; "" is the checkpoint's default.

    Accepts TEXT, LANGUAGE, SPEAKER (default: the first built-in one), INSTRUCT, VOICE (a saved voice's path), SEED,
    MAX_FRAMES, SCHEDULE ("1,1,2,4,8"), and TEMPERATURE, TOP_K and GREEDY, which apply to all sixteen codes of a frame.
    Raises MkttsError for another name or an invalid value."""
    own = {"SPEAKER": checkpoint.config.default_speaker, "INSTRUCT": None, "VOICE": None}  # values for ""
    known = ("TEXT", "LANGUAGE", "SEED", "MAX_FRAMES", *own)
    drawing = {name: parameters.pop(name) for name in ("TEMPERATURE", "TOP_K", "GREEDY") if name in parameters}
    frames = parameters.pop("SCHEDULE", None)
    if unknown := sorted(set(parameters) - set(known)):
        raise MkttsError(f"expected parameters among {', '.join(known)}, found {', '.join(unknown)}")
    arguments = {name.lower(): value or own.get(name, value) for name, value in parameters.items()}
    if path := arguments.get("voice"):
        arguments["voice"] = Voice.load(path)
    if frames is not None:
        arguments["options"] = StreamOptions(schedule=whole_numbers("SCHEDULE", frames))
    if drawing:
        arguments["sampling"] = _sampling(checkpoint, **drawing)
    return arguments


def _sampling(checkpoint: Checkpoint, GREEDY: bool = False, **given: Any) -> Sampling:
    """The checkpoint's sampling, with the parameters that differ from the talker's own values."""
    own = checkpoint.sampling()
    fields = {name.lower(): value for name, value in given.items() if value != _OPEN[name]}
    changes = {field: value for field, value in fields.items() if value != getattr(own.talker, field)}
    drawn = replace(own, talker=replace(own.talker, **changes), predictor=replace(own.predictor, **changes))
    return drawn.greedy() if GREEDY else drawn
