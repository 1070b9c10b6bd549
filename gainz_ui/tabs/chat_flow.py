"""What happens in a chat: ask, edit, ask again, continue, stop, come back. Listeners are async generators that poll an
`Answer` every 80 ms and hold no thread; the engine decides how many run at once. Knows the widgets by name only.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass, replace
from typing import Any

import gradio as gr

from backends.base import GainzError, InvalidRequest, ModelInfo, Request, Sampling
from gainz_ui import html, shield
from gainz_ui.i18n import language, tr
from gainz_ui.page import Page, asker
from gainz_ui.services.answers import Answer
from gainz_ui.services.chat import Chat, answer_room, archive, fit
from gainz_ui.tabs import chat_view as show, draft_view as drafting
from gainz_ui.tabs.snippets import address_of, chat_snippets, snippets
from gainz_ui.widgets import shown

PERIOD, HEARTBEAT = 0.08, 0.25          # seconds between two updates; after how long without one a sign of life is sent
Update = dict[Any, Any]


@dataclass(frozen=True)
class Asked:
    """What an answer belongs to: everything that its watchers need, also those that come back later."""

    chat: Chat
    info: ModelInfo | None
    sampling: Sampling
    prompt_tokens: int
    prefix: str = ""                    # the part of the answer that was there before "continue"


class Flow:
    """The chat tab's listeners. ``parts``: its widgets by name; ``read``: setting values → Sampling."""

    def __init__(self, page: Page, parts: dict[str, Any], read: Callable[[Any], Sampling]) -> None:
        self.page, self.parts, self.read = page, parts, read

    # ------------------------------------------------------------------------------------------ asking
    async def send(self, request: gr.Request, data: Any, text: str, *settings: Any) -> AsyncIterator[Update]:
        """A new question."""
        chat = Chat.of(data)
        if not (text or "").strip():
            yield gr.skip()
            return
        yield {self.parts["composer"]: ""}
        async for update in self._ask(request, chat.say("user", text.strip()), settings):
            yield update

    async def again(self, request: gr.Request, data: Any, *settings: Any) -> AsyncIterator[Update]:
        """The last question once more; its answer so far is replaced."""
        chat = Chat.of(data).until_question()
        if not chat.turns:
            yield gr.skip()
            return
        async for update in self._ask(request, chat, settings):
            yield update

    async def edit(self, request: gr.Request, event: gr.EditData, data: Any, *settings: Any) -> AsyncIterator[Update]:
        """A changed question is answered anew, a changed answer is kept as it now reads."""
        words, chat = language(request), Chat.of(data)
        index = show.turn_of(chat, event.index if isinstance(event.index, int) else event.index[0])
        written = shield.bare(str(event.value))
        if index is None or not written.strip():
            yield {self.parts["chatbot"]: show.messages(words, chat)}
            return
        changed = chat.edit(index, written)
        if chat.turns[index].role == "user":
            async for update in self._ask(request, changed, settings):
                yield update
        else:
            yield {self.parts["chat"]: changed.to_json(), self.parts["chatbot"]: show.messages(words, changed)}

    async def go_on(self, request: gr.Request, data: Any, *settings: Any) -> AsyncIterator[Update]:
        """Continue an answer that was cut short."""
        chat = Chat.of(data)
        if not chat.turns or chat.turns[-1].role != "assistant":
            yield gr.skip()
            return
        async for update in self._ask(request, chat, settings, go_on=True):
            yield update

    async def _ask(self, request: gr.Request, chat: Chat, settings: Any, go_on: bool = False) -> AsyncIterator[Update]:
        words = language(request)
        model, system, overflow, draft, draft_length, *values = settings
        chat = replace(chat, system=system or "")
        prefix = chat.turns[-1].content if go_on else ""
        yield self._asking(words, chat, prefix)
        try:
            asked = await asyncio.to_thread(self._prepare, chat, model, overflow, self.read(values), prefix)
        except GainzError as error:
            yield self._refused(words, chat, error)
            return
        wire = Request(asked.chat.sent(), asked.sampling, drafting.spec(draft, draft_length), continue_last=go_on, key=asker(request))
        kept = asked.chat.cut(len(asked.chat.turns) - 1) if go_on else asked.chat
        asked = replace(asked, chat=kept)
        answer = self.page.answers.begin(chat.id, lambda cancel: self.page.studio.submit(wire, model, cancel), asked)
        code = snippets(*chat_snippets(wire, model, address_of(request)))
        yield {self.parts["chat"]: asked.chat.to_json(), self.parts["api"]: code, **self._running(words, asked, answer)}
        async for update in self.watch(words, answer):
            yield update

    def _prepare(self, chat: Chat, model: str | None, overflow: str, sampling: Sampling, prefix: str) -> Asked:
        studio = self.page.studio
        info = studio.model(model).info
        room = answer_room(sampling, info.context)
        fitted, prompt = fit(chat, lambda sent: len(studio.tokenize(sent, model)), info.context, room, overflow) \
            if info.context else (chat, 0)
        return Asked(fitted, info, sampling, prompt, prefix)

    def _asking(self, words: str, chat: Chat, prefix: str) -> Update:
        """At once, before anything is counted: an engine that has to come back first takes seconds."""
        shown_chat = chat.cut(len(chat.turns) - 1) if prefix else chat
        return {
            self.parts["chat"]: chat.to_json(),
            self.parts["chatbot"]: show.messages(words, shown_chat, prefix),
            self.parts["notice"]: _hide(),
            self.parts["stats"]: shown(""),
            **self._busy(),
        }

    def _refused(self, words: str, chat: Chat, error: GainzError) -> Update:
        """The question stays in sight, with the reason; nothing was sent."""
        return {
            self.parts["chat"]: chat.to_json(),
            self.parts["chatbot"]: show.messages(words, chat),
            self.parts["notice"]: _tell(words, error),
            **self._idle(retry=True),
        }

    # ------------------------------------------------------------------------------------------ watching
    async def watch(self, words: str, answer: Answer) -> AsyncIterator[Update]:
        """Updates until the answer has ended. A page that goes away leaves the answer its grace time."""
        answers, asked = self.page.answers, answer.about
        answers.watch(asked.chat.id)
        try:
            seen, silent, buttons = 0, 0.0, self._busy()        # the buttons once: a widget that is told the same costs the browser, too
            while answer.running:
                if answer.version > seen:
                    seen, silent = answer.version, 0.0
                    yield self._running(words, asked, answer) | buttons
                    buttons = {}
                elif silent >= HEARTBEAT:
                    silent = 0.0
                    yield gr.skip()
                await asyncio.sleep(PERIOD)
                silent += PERIOD
        finally:
            answers.leave(asked.chat.id)
        if answers.get(asked.chat.id) is answer:            # else another question has taken its place
            yield self._ended(words, asked, answer)         # kept: whether a page has it shows only in the chat that it comes back with

    def _running(self, words: str, asked: Asked, answer: Answer) -> Update:
        view = answer.view()
        stats = show.figures(view, asked.info, asked.prompt_tokens, asked.sampling)
        return {self.parts["chatbot"]: show.messages(words, asked.chat, asked.prefix + view.text),
                self.parts["stats"]: shown(show.strip(words, stats, view) + drafting.marks(view.runs, asked.prefix))}

    def _ended(self, words: str, asked: Asked, answer: Answer) -> Update:
        view = answer.view()
        stats, text = show.figures(view, asked.info, asked.prompt_tokens, asked.sampling), asked.prefix + view.text
        chat = asked.chat.say("assistant", text, stats) if text or view.error is None else asked.chat
        cut = view.finish in show.CUT_SHORT and bool(text)
        return {self.parts["chat"]: chat.to_json(), self.parts["chatbot"]: show.messages(words, chat),
                self.parts["stats"]: shown(show.strip(words, stats) + drafting.marks(view.runs, asked.prefix)),
                self.parts["notice"]: _tell(words, view.error) if view.error else _hide(),
                **self._idle(go_on=cut, retry=view.error is not None)}

    # ------------------------------------------------------------------------------------------ other moments
    def stop(self, data: Any) -> None:
        self.page.answers.stop(Chat.of(data).id)

    async def come_back(self, request: gr.Request, data: Any) -> AsyncIterator[Update]:
        """The page was opened, reloaded or shown again: the chat as it was, and the answer that went on meanwhile. Where there was
        none, one may have been begun by now: that stands."""
        if not data:
            yield gr.skip()
            return
        words = language(request)
        try:
            chat = Chat.of(data)
        except InvalidRequest as error:
            yield {self.parts["chat"]: Chat().to_json(), self.parts["notice"]: _tell(words, error)}
            return
        answer = self.page.answers.get(chat.id)
        if answer is not None and answer.about.chat.turns == chat.turns:
            async for update in self.watch(words, answer):
                yield (
                    {self.parts["system"]: chat.system, **update}
                    if isinstance(update, dict) and "__type__" not in update
                    else update
                )
            return
        self.page.answers.drop(chat.id)                     # a page has it
        yield self.shown(words, chat)

    def shown(self, words: str, chat: Chat) -> Update:
        """A chat that is not being answered. One that ends with a question says that the answer is missing."""
        last = chat.turns[-1] if chat.turns else None
        missing = last is not None and last.role == "user"
        stats = last.stats if last is not None else None
        notice = shown(html.notice("warn", tr(words, "interrupted"), [tr(words, "interrupted_help")]))
        return {self.parts["chat"]: chat.to_json(), self.parts["chatbot"]: show.messages(words, chat),
                self.parts["system"]: chat.system, self.parts["stats"]: shown(show.strip(words, stats)),
                self.parts["notice"]: notice if missing else _hide(),
                **self._idle(go_on=bool(stats) and stats.get("finish") in show.CUT_SHORT, retry=missing)}

    def undo(self, request: gr.Request, data: Any) -> Update:
        """Take the last question and its answer back; the question returns to where it was typed."""
        chat = Chat.of(data).until_question()
        if not chat.turns:
            return {self.parts["composer"]: gr.skip()}
        self.page.answers.stop(chat.id)
        question, rest = chat.turns[-1].content, chat.cut(len(chat.turns) - 1)
        return {**self.shown(language(request), rest), self.parts["composer"]: question}

    def new(self, request: gr.Request, data: Any, earlier: Any) -> Update:
        """An empty chat with the same system prompt; the old one goes to the earlier ones."""
        old = Chat.of(data)
        self.page.answers.stop(old.id)
        kept = archive(earlier or [], old)
        return {**self.shown(language(request), Chat(system=old.system)), self.parts["earlier"]: kept,
                self.parts["history"]: gr.Dropdown(choices=titles(kept), value=None), self.parts["composer"]: ""}

    def open(self, request: gr.Request, chosen: str | None, data: Any, earlier: Any) -> Update:
        """An earlier chat takes the current one's place."""
        found = next((item for item in earlier or [] if item.get("id") == chosen), None)
        if found is None:
            return {self.parts["history"]: gr.skip()}
        old = Chat.of(data)
        self.page.answers.stop(old.id)
        kept = archive([item for item in earlier if item is not found], old)
        return {**self.shown(language(request), Chat.of(found)), self.parts["earlier"]: kept,
                self.parts["history"]: gr.Dropdown(choices=titles(kept), value=None)}

    # ------------------------------------------------------------------------------------------ buttons
    def _busy(self) -> Update:
        return {self.parts["send"]: gr.Button(visible=False), self.parts["stop"]: gr.Button(visible=True),
                self.parts["continue"]: gr.Button(visible=False), self.parts["retry"]: gr.Button(visible=False)}

    def _idle(self, go_on: bool = False, retry: bool = False) -> Update:
        return {self.parts["send"]: gr.Button(visible=True), self.parts["stop"]: gr.Button(visible=False),
                self.parts["continue"]: gr.Button(visible=go_on), self.parts["retry"]: gr.Button(visible=retry)}


def so_far(page: Page, data: Any) -> Chat:
    """The chat with what has been written of an answer that still comes."""
    chat = Chat.of(data)
    answer = page.answers.get(chat.id)
    text = answer.about.prefix + answer.view().text if answer is not None and answer.about.chat.turns == chat.turns else ""
    return chat.say("assistant", text) if text else chat


def titles(earlier: Any) -> list[tuple[str, str]]:
    return [(Chat.of(item).title or "…", item["id"]) for item in earlier or []]


def _tell(words: str, error: GainzError) -> Any:
    return shown(html.refusal(words, error))


def _hide() -> Any:
    return shown("")
