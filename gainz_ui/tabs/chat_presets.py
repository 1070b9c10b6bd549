"""Presets: named sets of sampling values and a system prompt. Built-in ones, and a person's own, kept in the browser. The
settings as they stand are kept there, too, so that a reload changes nothing."""

from __future__ import annotations

from typing import Any

import gradio as gr

from backends.base import GainzError
from gainz_ui import html
from gainz_ui.forms import Form
from gainz_ui.i18n import T, language, tr
from gainz_ui.page import Page
from gainz_ui.services.chat import PRESETS, preset_name
from gainz_ui.widgets import shown

PRIVATE = {"api_visibility": "private", "show_progress": "hidden"}


class Presets:
    def __init__(self, page: Page, parts: dict[str, Any], form: Form) -> None:
        self.parts, self.form = parts, form
        self.saved, self.settings = page.browser["presets"], page.browser["settings"]
        self.page = page

    def wire(self) -> None:
        parts = self.parts
        kept = [parts["preset"], parts["overflow"], *self.form.widgets]
        fill = [parts["system"], *self.form.widgets]
        parts["preset"].input(self.choose, [parts["preset"], self.saved, parts["system"]], fill, **PRIVATE).then(
            _kept, kept, self.settings, queue=False, **PRIVATE)
        gr.on(
            [widget.input for widget in [parts["overflow"], *self.form.widgets]],
            _kept,
            kept,
            self.settings,
            queue=False,
            **PRIVATE,
        )
        given = [parts["preset_name"], self.saved, parts["system"], *self.form.widgets]
        parts["preset_save"].click(self.save, given, [self.saved, parts["preset"], parts["preset_note"]], **PRIVATE)
        parts["preset_delete"].click(
            self.delete, [parts["preset"], self.saved], [self.saved, parts["preset"], parts["preset_note"]], **PRIVATE
        )
        self.page.on_load(self.restore, [self.settings, self.saved], kept)

    def choose(self, name: str, saved: Any, system: str) -> list[Any]:
        """A built-in preset leaves the system prompt as it is."""
        if name in PRESETS:
            return [gr.skip(), *self.form.write(PRESETS[name])]
        found = (saved or {}).get(name)
        if found is None:
            return [gr.skip()] * (1 + len(self.form.widgets))
        return [found.get("system", system), *self.form.write(found["sampling"])]

    def save(self, request: gr.Request, name: str, saved: Any, system: str, *values: Any):
        """Values that the engine would refuse are refused here."""
        words = language(request)
        try:
            name = preset_name(name or "")
            self.form.make(values)
        except GainzError as error:
            return gr.skip(), gr.skip(), shown(html.refusal(words, error))
        saved = {**(saved or {}), name: {"system": system or "", "sampling": self.form.read(values)}}
        note = html.notice("good", tr(words, "preset_saved", name=name))
        return saved, gr.Dropdown(choices=_choices(saved), value=name), shown(note)

    def delete(self, request: gr.Request, name: str, saved: Any):
        words, saved = language(request), dict(saved or {})
        if saved.pop(name, None) is None:
            return gr.skip(), gr.skip(), shown(html.notice("warn", tr(words, "preset_built_in")))
        note = html.notice("good", tr(words, "preset_deleted", name=name))
        return saved, gr.Dropdown(choices=_choices(saved), value="balanced"), shown(note)

    def restore(self, settings: Any, saved: Any) -> list[Any]:
        """The settings as they were; those of another version of the form are left alone."""
        names, saved = [*PRESETS, *(saved or {})], saved or {}
        preset = gr.Dropdown(choices=_choices(saved), value="balanced")
        rest = [gr.skip()] * (1 + len(self.form.widgets))
        if not isinstance(settings, list) or len(settings) != 2 + len(self.form.widgets):
            return [preset, *rest]
        chosen = settings[0] if settings[0] in names else "balanced"
        return [gr.Dropdown(choices=_choices(saved), value=chosen), *settings[1:]]


def _choices(saved: Any) -> list[tuple[Any, str]]:
    return [(T(f"preset_{name}"), name) for name in PRESETS] + [(name, name) for name in saved]


def _kept(*values: Any) -> list[Any]:
    return list(values)
