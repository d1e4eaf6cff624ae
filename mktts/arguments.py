"""Command-line options derived from a settings dataclass: one option for each field."""

import argparse
import dataclasses
import types
from typing import Any, Literal, Union, get_args, get_origin, get_type_hints


def option(default: Any, text: str, *, name: str | None = None, metavar: str | None = None) -> Any:
    """Declares a field of a settings dataclass that is also a command-line option.

    default: the field's default. text: the help text; a default that is neither None nor () is appended to it. name:
    the option's name; None derives it from the field: dashes for underscores, without a final `_s` (seconds).
    metavar: the placeholder for the value in the help."""
    return dataclasses.field(default=default, metadata={"help": text, "name": name, "metavar": metavar})


def add_options(parser: Any, settings: type, *, unset: bool = False) -> None:
    """Adds a command-line option for every field of `settings` that was declared with `option`.

    parser: a parser or an argument group. unset: options that are not given become None instead of their default.
    A Literal becomes choices, a bool a pair of switches (--x, --no-x), and a tuple an option that may be repeated."""
    hints = get_type_hints(settings)
    for field in _options(settings):
        name, hint, default = field.name, hints[field.name], None if unset else field.default
        text, flag, metavar = (field.metadata[key] for key in ("help", "name", "metavar"))
        if get_origin(hint) in (Union, types.UnionType):
            hint = next(part for part in get_args(hint) if part is not type(None))
        if default not in (None, ()) and "default" not in text:
            text = f"{text} (default: %(default)s)"
        if hint is bool:
            how = {"action": argparse.BooleanOptionalAction}
        elif get_origin(hint) is tuple:
            how, default = {"action": "append", "metavar": metavar}, [*default]
        else:
            how = {"choices": get_args(hint)} if get_origin(hint) is Literal else {"type": hint}
            how["metavar"] = metavar or ("S" if name.endswith("_s") else None)
        flag = flag or f"--{name.removesuffix('_s').replace('_', '-')}"
        parser.add_argument(flag, dest=name, default=default, help=text, **how)


def given(settings: type, arguments: argparse.Namespace) -> dict[str, Any]:
    """Returns the fields of `settings`, by name, with the values of the parsed options."""
    return {field.name: getattr(arguments, field.name) for field in _options(settings)}


def _options(settings: type) -> list[dataclasses.Field]:
    return [field for field in dataclasses.fields(settings) if "help" in field.metadata]
