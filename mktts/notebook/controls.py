"""Widgets for a notebook's parameters, with Start and Stop buttons that work with asynchronous cells."""

from __future__ import annotations

import asyncio
import html
from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import Any

from mktts.errors import MkttsError

LINE_CHARS = 40  # a longer text gets a box of several lines


def controls(choices: Mapping[str, Sequence[str]] | None = None, **parameters: Any) -> Controls:
    """One widget per notebook parameter (`TEXT=TEXT, SEED=SEED`), plus Start and Stop.

    A widget changes only what the parameter already defines, so a headless run, where nobody turns the knobs,
    computes exactly what the parameters say. `choices` turns a string parameter into a drop-down.
    """
    return Controls(choices or {}, parameters)


class Controls:
    """The panel of `controls`. `values` are the present settings, under the parameters' names."""

    def __init__(self, choices: Mapping[str, Sequence[str]], parameters: Mapping[str, Any]) -> None:
        import ipywidgets

        unknown = sorted(set(choices) - set(parameters))
        if unknown:
            raise MkttsError(f"controls: choices for {unknown}, which are no parameters of the panel")
        self._widgets = {name: _widget(name, value, choices.get(name)) for name, value in parameters.items()}
        self.start_button = ipywidgets.Button(description="Start", icon="play")
        self.stop_button = ipywidgets.Button(description="Stop", icon="stop")
        self.message = ipywidgets.HTML()
        buttons = ipywidgets.HBox([self.start_button, self.stop_button, self.message])
        self.panel = ipywidgets.VBox([*self._widgets.values(), buttons])
        self._loop: asyncio.AbstractEventLoop | None = None

    @property
    def values(self) -> dict[str, Any]:
        """Parameter name -> present value."""
        return {name: widget.value for name, widget in self._widgets.items()}

    def show(self, start: Callable[[], Awaitable[Any]], stop: Callable[[], Any]) -> None:
        """Displays the panel. Start runs `start()` on the kernel's event loop, Stop calls `stop()`.

        Call it from a cell: the cell's loop is the one that Start uses. (Since ipykernel 7 a button's callback may
        arrive on another thread, that of the front end's subshell.) One run at a time: Start is disabled during it.
        """
        from IPython.display import display

        self._loop = asyncio.get_running_loop()
        self.start_button.on_click(lambda _: asyncio.run_coroutine_threadsafe(self._run(start), self._loop))
        self.stop_button.on_click(lambda _: stop())
        display(self.panel)

    async def _run(self, start: Callable[[], Awaitable[Any]]) -> None:
        self.start_button.disabled, self.message.value = True, ""
        try:
            await start()
        except Exception as error:  # nobody awaits a button's task: the panel is where its error can be read
            self.message.value = html.escape(f"{type(error).__name__}: {error}")
        finally:
            self.start_button.disabled = False


def _widget(name: str, value: Any, options: Sequence[str] | None) -> Any:
    import ipywidgets

    layout, style = ipywidgets.Layout(width="46em"), {"description_width": "11em"}
    if options is not None:
        if value not in options:
            raise MkttsError(f"{name}={value!r} is not among its choices {list(options)}")
        return ipywidgets.Dropdown(options=list(options), value=value, description=name, layout=layout, style=style)
    line = ipywidgets.Textarea if isinstance(value, str) and len(value) > LINE_CHARS else ipywidgets.Text
    kinds = {bool: ipywidgets.Checkbox, int: ipywidgets.IntText, float: ipywidgets.FloatText, str: line}
    kind = kinds.get(type(value))
    if kind is None:
        raise MkttsError(f"{name}={value!r}: expected bool, int, float or str, found {type(value).__name__}")
    return kind(value=value, description=name, layout=layout, style=style)
