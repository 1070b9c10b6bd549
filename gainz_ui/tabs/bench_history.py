"""Benchmarks that were run: find, open, run again, hold against a baseline, take over a setting, save in other formats."""

from __future__ import annotations

from collections.abc import AsyncIterator
from typing import Any

import gradio as gr

from backends.base import GainzError, InvalidRequest
from gainz_ui import html
from gainz_ui.i18n import language, tr
from gainz_ui.page import Page
from gainz_ui.services.bench import exports, history as past
from gainz_ui.services.compare import load_options
from gainz_ui.tabs import bench_view as show
from gainz_ui.tabs.bench_flow import Flow
from gainz_ui.tabs.bench_form import ProtocolForm, SideForm
from gainz_ui.tabs.models_view import work
from gainz_ui.widgets import shown

PRIVATE = {"api_visibility": "private", "show_progress": "hidden"}
LISTED, PERIOD, CONTEXT = 40, 0.3, 8192
Update = dict[Any, Any]


class Past:
    def __init__(self, page: Page, parts: dict[str, Any], flow: Flow, history: past.History, sides: tuple[SideForm, SideForm],
                 protocol: ProtocolForm) -> None:
        self.page, self.parts, self.flow, self.history, self.sides, self.protocol = page, parts, flow, history, sides, protocol

    def wire(self) -> None:
        p, quiet = self.parts, {**PRIVATE, "queue": False}
        listing = [p["runs"], p["baseline"], p["none"]]
        asked = [p["filter"], p["runs"], p["baseline"], p["report"]]
        opened = p["open"].click(self.open, p["runs"], [p["past_said"], *self.flow.result()], **PRIVATE)
        for trigger in (p["kept"].change, p["filter"].change, p["refresh"].click, opened.then):
            trigger(self.list, asked, listing, **quiet)
        self.page.on_load(self.list, asked, listing, queue=False)
        widgets = [*self.sides[0].widgets, *self.sides[1].widgets, *self.protocol.widgets]
        p["again"].click(self.refill, p["runs"], [p["past_said"], *widgets], **quiet)
        gr.on([p["compare"].click, p["baseline"].input], self.compare, [p["report"], p["baseline"]], [p["changes"]], **quiet)
        for arm in "ab":
            p[f"use_{arm}"].click(self._use(arm), p["report"], [p["used"], self.page.version], concurrency_limit=None, **PRIVATE)
        for name in exports.FORMATS:
            p[f"save_{name}"].click(self._save(name), p["report"], p["file"], **quiet)

    # ------------------------------------------------------------------------------------------ the list
    def list(self, request: gr.Request, words: str | None, chosen: str | None, baseline: str | None,
             shows: dict[str, Any] | None) -> tuple[Any, Any, Any]:
        """``shows``: the report that is open; it is no baseline of itself."""
        said = language(request)
        found = self.history.entries(show.searched(said, words or ""))
        choices = [(show.label(said, entry), entry.name) for entry in found[:LISTED]]
        names = {name for _, name in choices}
        itself = (shows or {}).get("name")
        one_line = [(label.replace("\n", " · "), name) for label, name in choices if name != itself]
        empty = "" if found else html.notice("plain", tr(said, "bench_none_found" if words else "bench_none"), live=False)
        return (gr.Radio(choices=choices, value=chosen if chosen in names else None, visible=bool(choices)),
                gr.Dropdown(choices=one_line, value=baseline if baseline in names - {itself} else None), shown(empty))

    def open(self, request: gr.Request, name: str | None) -> Update:
        words = language(request)
        try:
            return {self.parts["past_said"]: shown(""), **self.flow.filled(words, self._chosen(name))}
        except GainzError as error:
            return {self.parts["past_said"]: shown(html.refusal(words, error))}

    def refill(self, request: gr.Request, name: str | None) -> Update:
        """The form as it was then; nothing is run before somebody says so."""
        words, p = language(request), self.parts
        try:
            report = self._chosen(name)
            a, b = past.configs(report)
            values = [*self.sides[0].write(a), *self.sides[1].write(b), *self.protocol.write(report)]
        except GainzError as error:
            return {p["past_said"]: shown(html.refusal(words, error))}
        widgets = [*self.sides[0].widgets, *self.sides[1].widgets, *self.protocol.widgets]
        return {p["past_said"]: shown(html.notice("good", tr(words, "bench_form_filled"))), **dict(zip(widgets, values, strict=True))}

    def _chosen(self, name: str | None) -> dict[str, Any]:
        if not name:
            raise InvalidRequest("No benchmark is chosen.", field="name", remedy="Choose one of the list.")
        return self.history.open(name)

    def compare(self, request: gr.Request, report: dict[str, Any] | None, baseline: str | None) -> Any:
        words = language(request)
        try:
            if report is None:
                raise InvalidRequest("There is no result to compare.", field="report", remedy="Run a benchmark or open one.")
            before = self._chosen(baseline)
        except GainzError as error:
            return shown(html.refusal(words, error))
        return shown(show.changes(words, past.changes(before, report), past.speeds(before, report)))

    # ------------------------------------------------------------------------------------------ use and save
    def _use(self, arm: str) -> Any:
        async def use(request: gr.Request, report: dict[str, Any] | None) -> AsyncIterator[Update]:
            """Load what this side was; a draft is named, since the chat chooses it with each question."""
            words, p = language(request), self.parts
            if report is None:
                return
            config = past.configs(report)[0 if arm == "a" else 1]
            task = self.page.tasks.start("load", config.model, lambda progress, cancel: self._load(config, progress, cancel))
            async for _ in task.looks(PERIOD):
                yield {p["used"]: shown(work(words, [task]))}
            if task.error is not None:
                yield {p["used"]: shown(html.refusal(words, task.error))}
                return
            told = [tr(words, "bench_use_draft", draft=config.draft.name)] if config.draft else []
            yield {p["used"]: shown(html.notice("good", tr(words, "bench_in_use", config=str(config)), told)),
                   self.page.version: self.page.studio.changed.version}
        return use

    def _load(self, config: Any, progress: Any, cancel: Any) -> Any:
        """What the side leaves open is as it was measured: as loaded, else the benchmark's usual."""
        studio = self.page.studio
        present, entry = studio.loaded().get(config.model), studio.entry(config.model)
        usual = dict(present.options) if present else load_options(studio, config.model, CONTEXT) if entry.local else {}
        return studio.load(config.model, usual | dict(config.options), progress, cancel)

    def _save(self, name: str) -> Any:
        ending, kind, make = exports.FORMATS[name]

        def save(report: dict[str, Any] | None) -> str:
            return html.file(f"gainz-bench-{report.get('name', 'report')}{ending}", make(report), kind) if report else ""
        return save
