"""Command-line options that are made of a settings dataclass: one field, one option."""

import argparse
import dataclasses
import types
from typing import Any, Literal, Union, get_args, get_origin, get_type_hints


def option(default: Any, text: str, *, name: str | None = None, metavar: str | None = None) -> Any:
    """A field of a settings dataclass that is a command-line option too.

    default: the field's. text: its help, to which a default that says something is added. name: of the option, where
    it is not the field's with dashes (and without `_s`, of seconds). metavar: what the help calls the value."""
    return dataclasses.field(default=default, metadata={"help": text, "name": name, "metavar": metavar})


def add_options(parser: Any, settings: type, *, unset: bool = False) -> None:
    """Adds an option for every field of `settings` that `option` made.

    parser: a parser or a group of one. unset: what is not given is None, and the help says what happens then.
    A Literal becomes choices, a bool a switch with its opposite, a tuple an option that may come again, and None is the
    default where the type has it."""
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
    """The fields of `settings` that the parsed options stand for."""
    return {field.name: getattr(arguments, field.name) for field in _options(settings)}


def _options(settings: type) -> list[dataclasses.Field]:
    return [field for field in dataclasses.fields(settings) if "help" in field.metadata]
