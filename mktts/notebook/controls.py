"""Widgets for a notebook's parameters, with a Start button that works with asynchronous cells."""

from __future__ import annotations

import asyncio
import html
from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import Any

from mktts.errors import MkttsError

LINE_CHARS = 40  # a longer text gets a box of several lines

Choices = Sequence[str] | tuple[float, float]


def controls(choices: Mapping[str, Choices] | None = None, **parameters: Any) -> Controls:
    """One widget per notebook parameter (`TEXT=TEXT, SEED=SEED`), plus Start.

    A widget changes only what the parameter already defines, so a headless run, where nobody turns the knobs,
    computes exactly what the parameters say. `choices` turns a string parameter into a drop-down, and a number into a
    slider from the first to the second of two numbers.
    """
    return Controls(choices or {}, parameters)


class Controls:
    """The panel of `controls`. `values` are the present settings, under the parameters' names."""

    def __init__(self, choices: Mapping[str, Choices], parameters: Mapping[str, Any]) -> None:
        import ipywidgets

        unknown = sorted(set(choices) - set(parameters))
        if unknown:
            raise MkttsError(f"controls: choices for {unknown}, which are no parameters of the panel")
        self._widgets = {name: _widget(name, value, choices.get(name)) for name, value in parameters.items()}
        self.start_button = ipywidgets.Button(description="Start", icon="play")
        self.message = ipywidgets.HTML()
        self.panel = ipywidgets.VBox([*self._widgets.values(), ipywidgets.HBox([self.start_button, self.message])])
        self._start: Callable[[], Awaitable[Any]] | None = None
        self._loop: asyncio.AbstractEventLoop | None = None

    @property
    def values(self) -> dict[str, Any]:
        """Parameter name -> present value."""
        return {name: widget.value for name, widget in self._widgets.items()}

    def show(self, start: Callable[[], Awaitable[Any]], *below: Any) -> None:
        """Displays the panel and, under it, the widgets `below`. Start runs `start()` on the kernel's event loop.

        Call it from a cell: the cell's loop is the one that Start uses, for as long as the kernel lives. (Since
        ipykernel 7 a button's callback may arrive on another thread, that of the front end's subshell.) One run at a
        time: Start is disabled during it.
        """
        import ipywidgets
        from IPython.display import display

        self._start, self._loop = start, asyncio.get_running_loop()
        self.start_button.on_click(lambda _: asyncio.run_coroutine_threadsafe(self._pressed(), self._loop))
        display(ipywidgets.VBox([self.panel, *below]))

    async def run(self) -> None:
        """What Start does, awaited by a cell: an error ends the cell instead of standing in the panel."""
        if self._start is None:
            raise MkttsError("expected show(start) before run()")
        self.start_button.disabled, self.message.value = True, ""
        try:
            await self._start()
        finally:
            self.start_button.disabled = False

    async def _pressed(self) -> None:
        try:
            await self.run()
        except Exception as error:  # nobody awaits a button's task: the panel is where its error can be read
            self.message.value = html.escape(f"{type(error).__name__}: {error}")


def button(label: str, press: Callable[[], Any], icon: str = "") -> Any:
    """A button, to end a cell with, that calls `press` once and is disabled from then on."""
    import ipywidgets

    shown = ipywidgets.Button(description=label, icon=icon)

    def pressed(_: Any) -> None:
        if not shown.disabled:
            shown.disabled = True
            press()

    shown.on_click(pressed)
    return shown


def _widget(name: str, value: Any, choices: Choices | None) -> Any:
    import ipywidgets

    common = {"description": name, "layout": ipywidgets.Layout(width="46em"), "style": {"description_width": "11em"}}
    if choices is not None and isinstance(value, (int, float)):
        low, high = choices
        if not low <= value <= high:
            raise MkttsError(f"{name}={value!r} is not between {low} and {high}")
        slider = ipywidgets.IntSlider if isinstance(value, int) else ipywidgets.FloatSlider
        step = {} if isinstance(value, int) else {"step": 0.05}
        return slider(value=value, min=low, max=high, continuous_update=False, **step, **common)
    if choices is not None:
        if value not in choices:
            raise MkttsError(f"{name}={value!r} is not among its choices {list(choices)}")
        return ipywidgets.Dropdown(options=list(choices), value=value, **common)
    line = ipywidgets.Textarea if isinstance(value, str) and len(value) > LINE_CHARS else ipywidgets.Text
    kinds = {bool: ipywidgets.Checkbox, int: ipywidgets.IntText, float: ipywidgets.FloatText, str: line}
    kind = kinds.get(type(value))
    if kind is None:
        raise MkttsError(f"{name}={value!r}: expected bool, int, float or str, found {type(value).__name__}")
    return kind(value=value, **common)
