"""What every tab is given: the services, and the few components that tabs share. No logic of any tab."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from gainz_ui.services.answers import Answers
from gainz_ui.services.keys import label


def asker(request: Any) -> str:
    """The label of the key that a gr.Request came with, "" = none was asked for."""
    wire = getattr(request, "request", None)
    return label(wire.scope) if wire is not None else ""


@dataclass
class Page:
    """``version``: a hidden number that changes when models come or go: tabs listen to its ``change``. ``tabs``: the gr.Tabs, so
    that a button may open another tab. ``on_load``: what is to run when a page opens. ``places``: by name, what makes the HTML of an
    element with that ``data-place``, for a language: page.js asks for it while it is in sight. ``followed``: the components that
    show by themselves that a listener is at work on them."""

    studio: Any
    settings: Any
    store: Any
    tasks: Any
    doctor: Any
    answers: Answers
    jobs: Any = None                    # services.jobs.Jobs
    startup: Any = None                 # services.startup.Startup, where the server has one
    version: Any = None
    tabs: Any = None
    monitor: Any = None                 # services.monitor.Monitor
    browser: dict[str, Any] = field(default_factory=dict)      # gr.BrowserStates by name
    places: dict[str, Callable[[str], str]] = field(default_factory=dict)
    loads: list[dict[str, Any]] = field(default_factory=list)  # keyword arguments for Blocks.load
    followed: list[Any] = field(default_factory=list)

    def on_load(self, fn: Callable, inputs: Any = None, outputs: Any = None, **more: Any) -> None:
        self.loads.append({"fn": fn, "inputs": inputs, "outputs": outputs, **more})

    def startup_task(self) -> Any:
        return self.startup.task if self.startup is not None else None

    def startup_error(self) -> Any:
        return self.startup.error if self.startup is not None else None

    def start_again(self) -> None:
        if self.startup is not None:
            self.startup.begin()


@dataclass(frozen=True)
class Tab:
    """One file in tabs/ defines ``TAB``. ``title``: key of a text; ``build`` makes the tab's layout and listeners."""

    title: str
    order: int
    build: Callable[[Page], None]
