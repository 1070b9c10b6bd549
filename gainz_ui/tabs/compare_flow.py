"""Side by side: one generator that watches a comparison and fills all the cards, every 100 ms. Leaving the page stops it.

Knows the tab's widgets by name and the compare service; several listeners on one trigger would run one after another in the
browser.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Callable
from dataclasses import replace
from typing import Any

import gradio as gr

from backends.base import DraftSpec, GainzError, InvalidRequest, Message, Request, Sampling
from gainz_ui import html
from gainz_ui.i18n import language
from gainz_ui.page import Page, asker
from gainz_ui.services.compare import Comparison, plan, room, to_dict
from gainz_ui.tabs import compare_view as show, draft_view
from gainz_ui.tabs.snippets import address_of, call_snippets, snippets
from gainz_ui.widgets import shown

PERIOD, HEARTBEAT = 0.1, 0.25
PRIVATE = {"api_visibility": "private", "show_progress": "hidden"}
Update = dict[Any, Any]


class Flow:
    """``read``: setting values → Sampling."""

    def __init__(self, page: Page, parts: dict[str, Any], read: Callable[[Any], Sampling]) -> None:
        self.page, self.parts, self.read = page, parts, read
        self.running: dict[str, Comparison] = {}        # by session: what Stop stops

    def wire(self, widgets: list[Any]) -> None:
        p = self.parts
        inputs = self.inputs(widgets)
        started = [p["run"].click, p["prompt"].submit]
        gr.on(started, self.run, inputs, self.outputs(), concurrency_limit=None, trigger_mode="once", **PRIVATE)
        p["stop"].click(self.stop, None, None, queue=False, **PRIVATE)
        p["save"].click(self.file, p["answers"], p["answers_file"], queue=False, **PRIVATE)

    def inputs(self, widgets: list[Any]) -> list[Any]:
        p = self.parts
        return [p["models"], p["prompt"], p["system"], p["in_turn"], p["plain"], p["draft"], p["draft_length"], *widgets]

    def outputs(self) -> list[Any]:
        p = self.parts
        cards = [part for pair in p["cards"] for part in pair]
        return [*cards, p["sides"], p["plan"], p["run"], p["stop"], p["save"], p["answers"], p["api"], self.page.version]

    async def run(self, request: gr.Request, names: list[str] | None, prompt: str, system: str, in_turn: bool, plain: bool,
                  draft: str | None, draft_length: int | None, *settings: Any) -> AsyncIterator[Update]:
        words, p = language(request), self.parts
        try:
            asked = replace(make_request(prompt, system, plain, self.read(settings), draft_view.spec(draft, draft_length)), key=asker(request))
            chosen = await asyncio.to_thread(plan, self.page.studio, names or [], in_turn, room(asked))
            comparison = await asyncio.to_thread(Comparison, self.page.studio, chosen, asked)
        except GainzError as error:
            yield {p["plan"]: shown(html.refusal(words, error))}
            return
        self.running[request.session_hash] = comparison
        code = _code(request, names, prompt, system, in_turn, plain, asked)
        try:
            yield {**self._everything(words, comparison), p["api"]: code, p["run"]: gr.Button(visible=False),
                   p["stop"]: gr.Button(visible=True), p["save"]: gr.Button(visible=False)}
            async for update in self._watch(words, comparison):
                yield update
        finally:                        # also where the page went away
            comparison.stop()
            self.running.pop(request.session_hash, None)

    async def _watch(self, words: str, comparison: Comparison) -> AsyncIterator[Update]:
        p, seen, silent, shown_cards = self.parts, -1, 0.0, {}
        while comparison.running:
            if comparison.version != seen:
                seen, silent = comparison.version, 0.0
                yield {**self._cards(words, comparison, shown_cards), p["answers"]: to_dict(comparison, comparison.shots())}
            elif silent >= HEARTBEAT:
                silent = 0.0
                yield gr.skip()
            await asyncio.sleep(PERIOD)
            silent += PERIOD
        yield {**self._everything(words, comparison), p["answers"]: to_dict(comparison, comparison.shots()),
               p["run"]: gr.Button(visible=True), p["stop"]: gr.Button(visible=False), p["save"]: gr.Button(visible=True),
               self.page.version: self.page.studio.changed.version}

    def _everything(self, words: str, comparison: Comparison) -> Update:
        """Also what has not changed: the browser drops what reaches a tab that it is just drawing for the first time."""
        p = self.parts
        return {p["plan"]: shown(show.about(words, comparison.plan)), p["sides"]: gr.Row(visible=True),
                **self._boxes(len(comparison.sides)), **self._cards(words, comparison, {})}

    def _boxes(self, count: int) -> Update:
        return {box: gr.Column(visible=number < count) for number, (box, _) in enumerate(self.parts["cards"])}

    def _cards(self, words: str, comparison: Comparison, before: dict[int, str]) -> Update:
        """Only the cards that changed: the browser draws a card anew whenever it is sent."""
        shots, out = comparison.shots(), {}
        for number in range(len(shots)):
            text = show.card(words, shots, number, comparison.plan)
            if before.get(number) != text:
                before[number] = out[self.parts["cards"][number][1]] = text
        return out

    def stop(self, request: gr.Request) -> None:
        """The comparison ends, and its generator with the last state of it."""
        running = self.running.get(request.session_hash)
        if running is not None:
            running.stop()

    def file(self, answers: Any) -> str:
        return html.file("gainz-compare.json", json.dumps(answers, ensure_ascii=False, indent=1), "application/json")


def make_request(prompt: str, system: str, plain: bool, sampling: Sampling, draft: DraftSpec | None = None) -> Request:
    text = (prompt or "").strip() if not plain else prompt or ""
    if not text:
        raise InvalidRequest("There is no prompt.", field="prompt", remedy="Write what the models should answer.")
    if plain:
        return Request(text, sampling, draft)
    head = (Message("system", system.strip()),) if (system or "").strip() else ()
    return Request((*head, Message("user", text)), sampling, draft)


def _code(request: gr.Request, names: Any, prompt: str, system: str, in_turn: bool, plain: bool, asked: Request) -> str:
    sampling, draft = asked.sampling, asked.draft
    arguments = {"prompt": prompt, "models": list(names or []), "max_tokens": sampling.max_tokens,
                 "temperature": sampling.temperature,
                 "seed": sampling.seed, "system": system or None, "in_turn": in_turn, "plain": plain,
                 "options": {key: getattr(sampling, key) for key, off in (("top_k", 0), ("top_p", 1.0))
                             if getattr(sampling, key) != off},
                 "draft": draft.name if draft else None, "draft_length": draft.length if draft else None}
    return snippets(*call_snippets("compare", arguments, address_of(request)))

