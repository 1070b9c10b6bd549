"""What is loaded at the start, by the rule that docs/architecture.md states; and that a failed start can be tried again."""

from __future__ import annotations

from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import pytest

from backends.base import BrokenFile, FetchFailed
from gainz_ui.services import starter
from gainz_ui.services.catalog import CatalogEntry
from gainz_ui.services.startup import Startup
from gainz_ui.services.tasks import Tasks
from gainz_ui.settings import Settings


class Shelf:
    """A studio and a store in one: names in, loads noted."""

    def __init__(self, *names: str, broken: tuple[str, ...] = ()) -> None:
        self.entries = [CatalogEntry(name, Path(name), 1, reason="damaged" if name in broken else "") for name in names]
        self.broken, self.held, self.loads = broken, [], []
        self.fetched, self.offline = 0, False

    def catalog(self):
        return self.entries

    def loaded(self):
        return {name: None for name in self.loads}

    def load(self, name, options, progress, cancel):
        if name in self.broken:
            raise BrokenFile(f"{name} is damaged.")
        self.loads.append(name)

    @contextmanager
    def not_ready(self, reason):
        self.held.append(reason)
        yield

    def ensure_starter(self, progress, cancel):
        self.fetched += 1
        if self.offline:
            raise FetchFailed("The starter model could not be fetched.")
        return starter.NAME


def start(shelf: Shelf, **settings) -> Startup:
    made = Startup(replace(Settings(), **settings), shelf, shelf, Tasks())
    assert made.begin().wait(10)
    return made


@pytest.mark.parametrize("names,settings,loaded,fetched", [
    ((), {}, [starter.NAME], 1),
    ((), {"starter": False}, [], 0),
    (("only",), {}, ["only"], 0),
    (("only",), {"starter": False}, [], 0),
    (("a", "b"), {}, [], 0),
    (("a", starter.NAME), {}, [starter.NAME], 0),
    (("a", "b"), {"load": ("b", "a")}, ["b", "a"], 0),
    (("a", "b"), {"load": ("b",), "starter": False}, ["b"], 0)])
def test_the_rule(names, settings, loaded, fetched):
    shelf = Shelf(*names)
    made = start(shelf, **settings)
    assert shelf.loads == loaded and shelf.fetched == fetched and made.error is None
    assert made.task.result == tuple(loaded)


def test_a_damaged_model_beside_a_good_one():
    assert start(shelf := Shelf("bad", "good", broken=("bad",))).error is None and shelf.loads == ["good"]


def test_one_that_fails_does_not_keep_the_others_out():
    made = start(shelf := Shelf("bad", "good", broken=("bad",)), load=("bad", "good"))
    assert shelf.loads == ["good"] and made.task.state == "failed" and made.task.error.code == "broken_file"
    assert made.error is None                       # a model is loaded: the server serves


def test_offline_then_online():
    shelf = Shelf()
    shelf.offline = True
    made = start(shelf)
    assert made.error.code == "fetch_failed" and shelf.held == ["fetching the starter model"]
    shelf.offline = False
    assert made.begin().wait(10) and made.error is None and shelf.loads == [starter.NAME]
