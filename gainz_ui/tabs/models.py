"""The models tab: what there is, what it needs, load, unload, bring in. Work runs as tasks that outlive the page."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from typing import Any

import gradio as gr

from backends.base import GainzError, MemoryEstimate
from gainz_ui import html
from gainz_ui.forms import Form
from gainz_ui.i18n import T, language, tr
from gainz_ui.page import Page, Tab
from gainz_ui.services import draft_making, variants
from gainz_ui.tabs import models_revisions, models_server, models_view as show
from gainz_ui.tabs.models_add import add_forms
from gainz_ui.tabs.models_draft import DraftCard, DraftForm
from gainz_ui.tabs.models_remove import RemoveForm
from gainz_ui.tabs.models_revisions import RevisionCard
from gainz_ui.tabs.models_server import ServerForm
from gainz_ui.tabs.models_variant import variant_form
from gainz_ui.tabs.snippets import address_of, call_snippets, snippets
from gainz_ui.tabs.models_working import WorkingForm
from gainz_ui.widgets import Html, shown

PRIVATE = {"api_visibility": "private", "show_progress": "hidden"}
PERIOD = 0.15
KINDS = frozenset(("load", "import", "pull", models_server.KIND, models_revisions.KIND, models_revisions.VERIFY, variants.KIND,
                   draft_making.KIND, draft_making.PLAN))            # work that this tab begins, shows and cancels; other tabs have theirs
FOLDED = ("threads", "device", "dtype", "kernels", "prefix_cache")


def build(page: Page) -> None:
    parts: dict[str, Any] = {}
    with gr.Row(elem_classes="gz-page"):
        with gr.Column(scale=2, min_width=300):
            with gr.Column(elem_classes="gz-card"):
                parts["catalog"] = gr.Radio([], label=T("catalog"), elem_id="gz-catalog", container=False)
                parts["nothing"] = Html(visible=False)
                with gr.Row(elem_classes="gz-actions"):
                    parts["rescan"] = gr.Button(T("rescan"), size="sm", elem_id="gz-rescan")
            add = add_forms(page)
            server = parts["server"] = ServerForm(page)
            add["add"].append(variant_form(page, parts["catalog"]))
            draft = DraftForm(page, parts["catalog"])
            add |= {"add": [*add["add"], *server.add, *draft.add], "said": {**add["said"], **server.said, **draft.said},
                    "after": {**server.after, **draft.after}}
        with gr.Column(scale=3, min_width=320, elem_classes="gz-card"):
            forms = _details(page, parts)
    add["add"] += parts["revisions"].add
    parts |= add
    with gr.Accordion(T("api_panel"), open=False, elem_classes="gz-card", elem_id="gz-api-models"):
        gr.Markdown(T("api_models_help"))
        parts["api"] = gr.Markdown(elem_id="gz-api-code-models", latex_delimiters=[])
    Models(page, parts, forms).wire()


def _details(page: Page, parts: dict[str, Any]) -> dict[str, tuple[Any, Form]]:
    """The right side; one form for each backend, of which the chosen model's is shown."""
    parts["details"] = Html(elem_id="gz-details")
    parts["notice"] = Html(visible=False, elem_id="gz-models-notice")
    forms: dict[str, tuple[Any, Form]] = {}
    with gr.Column(visible=False) as parts["loading"]:
        gr.Markdown(T("load_options"), elem_classes="gz-title")
        for backend in page.studio.registry.backends:
            with gr.Column(visible=False, elem_id=f"gz-options-{backend.name}") as box:
                form = Form(backend.options, advanced=FOLDED, title=T("more_options"), prefix=f"gz-{backend.name}")
            forms[backend.name] = (box, form)
        parts["memory"] = Html(elem_id="gz-memory")
    with gr.Row(elem_classes="gz-actions"):
        parts["load"] = gr.Button(T("load"), variant="primary", visible=False, elem_id="gz-load")
        parts["largest"] = gr.Button(T("use_largest"), visible=False, elem_id="gz-largest")
        parts["unload"] = gr.Button(T("unload"), visible=False, elem_id="gz-unload")
        parts["cancel"] = gr.Button(T("cancel"), variant="stop", visible=False, elem_id="gz-cancel")
    parts["work"] = Html(visible=False, elem_id="gz-work")
    parts["loaded"] = Html(visible=False, elem_id="gz-loaded")
    parts["working"] = WorkingForm(page)
    parts["revisions"] = RevisionCard(page, parts["catalog"])
    parts["draft"] = DraftCard(page)
    parts["remove"] = RemoveForm(page, parts["catalog"])
    return forms


class Models:
    """The tab's listeners."""

    def __init__(self, page: Page, parts: dict[str, Any], forms: dict[str, tuple[Any, Form]]) -> None:
        self.page, self.studio, self.parts, self.forms = page, page.studio, parts, forms

    def wire(self) -> None:
        p, page = self.parts, self.page
        widgets = self._widgets()
        listing = [p["catalog"], p["nothing"]]
        chosen = [p["details"], p["loading"], *(box for box, _ in self.forms.values()), p["memory"], p["load"], p["largest"],
                  p["unload"], p["loaded"]]
        quiet = {**PRIVATE, "queue": False}
        for trigger in (page.version.change, p["rescan"].click):
            trigger(self.list, p["catalog"], listing, **quiet).then(self.choose, [p["catalog"], *widgets], chosen, **quiet)
        page.on_load(self.open, p["catalog"], [*listing, *chosen], queue=False)
        p["catalog"].input(self.choose, [p["catalog"], *widgets], chosen, **quiet)
        gr.on([w.change for w in widgets], self.estimate, [p["catalog"], *widgets], [p["memory"], p["load"], p["largest"]],
              trigger_mode="always_last", **quiet)
        p["largest"].click(self.largest, [p["catalog"], *widgets], self._contexts(), **quiet)
        running = [p["work"], p["cancel"], p["load"], p["notice"], p["api"], page.version]
        working = p["working"]
        p["load"].click(self.load, [p["catalog"], *widgets], running, concurrency_limit=None, **PRIVATE).then(
            working.show, p["catalog"], [working.keep, working.retry, working.said], **quiet)
        working.wire(p["catalog"], page.version, self.load_with, running)
        p["cancel"].click(self.cancel, None, None, **quiet)
        p["unload"].click(self.unload, p["catalog"], [p["notice"], p["api"], p["unload"], p["loaded"], p["load"], working.keep, page.version],
                          **PRIVATE)
        for button, start, inputs in p["add"]:
            said = p["said"].get(start, p["notice"])
            brought = gr.on([button.click], _bound(self.bring, start, said), inputs, [*dict.fromkeys([*running, said])],
                            concurrency_limit=None, **PRIVATE)
            if start in p["after"]:
                brought.then(*p["after"][start], **quiet)
        p["server"].wire()
        p["revisions"].wire()
        p["remove"].wire(p["notice"])
        card = p["draft"]
        gr.on([p["catalog"].change, page.version.change], card.show, p["catalog"], [card.facts, card.plot], **quiet)
        page.on_load(self.watch_all, None, running, concurrency_limit=None)

    def _widgets(self) -> list[Any]:
        return [widget for _, form in self.forms.values() for widget in form.widgets]

    def _contexts(self) -> list[Any]:
        return [knob.widget for _, form in self.forms.values() for knob in form.knobs if knob.name == "context"]

    def _options(self, name: str, values: tuple[Any, ...]) -> dict[str, Any]:
        """The values of the form of this model's backend."""
        backend, at = self.studio.entry(name).backend, 0
        for key, (_, form) in self.forms.items():
            if key == backend:
                return form.read(values[at:at + len(form.knobs)])
            at += len(form.knobs)
        return {}

    # ------------------------------------------------------------------------------------------ looking
    def list(self, request: gr.Request, chosen: str | None):
        words, entries = language(request), self.studio.catalog()
        names, choices = [entry.name for entry in entries], [(show.label(words, entry), entry.name) for entry in entries]
        # a selection that stands is not sent back: meanwhile the person may have made another one
        value = {} if chosen in names else {"value": _chosen(entries, chosen)}
        folder = self.page.settings.models
        empty = "" if entries else html.empty(tr(words, "catalog_empty"), [tr(words, "catalog_empty_help", folder=folder)])
        return gr.Radio(choices=choices, visible=bool(entries), **value), shown(empty)

    def open(self, request: gr.Request, chosen: str | None) -> list[Any]:
        """Both sides at once, with the forms as they are when a page opens."""
        radio, nothing = self.list(request, chosen)
        name = _chosen(self.studio.catalog(), chosen)
        defaults = [knob.default for _, form in self.forms.values() for knob in form.knobs]
        return [radio, nothing, *self.choose(request, name, *defaults)]

    def choose(self, request: gr.Request, name: str | None, *values: Any) -> list[Any]:
        """Details, options and estimate of one model."""
        words, hidden = language(request), [gr.Column(visible=False)] * len(self.forms)
        off, none = gr.Button(visible=False), shown("")
        if not name:
            return [html.empty(tr(words, "choose_model")), gr.Column(visible=False), *hidden, "", off, off, off, none]
        try:
            entry, info = self.studio.entry(name), self.studio.loaded().get(name)
            about = self.studio.details(name) if entry.ready and entry.local else None
        except GainzError as error:
            return [html.refusal(words, error), gr.Column(visible=False), *hidden, "", off, off, off, none]
        boxes = [gr.Column(visible=entry.ready and key == entry.backend) for key in self.forms]
        memory, load, largest = self.estimate(request, name, *values) if entry.ready else ("", off, off)
        return [show.details(words, entry, about), gr.Column(visible=entry.ready), *boxes, memory, load, largest,
                gr.Button(visible=info is not None), shown(show.loaded(words, info)) if info is not None else none]

    def estimate(self, request: gr.Request, name: str | None, *values: Any):
        """(HTML, load button, button for the largest context)."""
        words = language(request)
        if not name:
            return "", gr.Button(visible=False), gr.Button(visible=False)
        try:
            entry = self.studio.entry(name)
            found = self.studio.estimate(name, self._options(name, values)) if entry.local else None
        except GainzError as error:
            return html.refusal(words, error), gr.Button(visible=True, interactive=False), gr.Button(visible=False)
        caption = T("reload") if entry.loaded else T("load")
        if found is None:
            return "", gr.Button(caption, visible=True, interactive=True), gr.Button(visible=False)
        return (show.memory(words, found), gr.Button(caption, visible=True, interactive=found.fits),
                gr.Button(visible=_larger_helps(found)))

    def largest(self, name: str, *values: Any) -> Any:
        """The largest context that fits, into the form; its change brings the new estimate."""
        context = self.studio.estimate(name, self._options(name, values)).largest_context
        updates = [gr.Number(value=context)] * len(self._contexts())
        return updates if len(updates) > 1 else updates[0]

    # ------------------------------------------------------------------------------------------ doing
    async def load(self, request: gr.Request, name: str, *values: Any) -> AsyncIterator[Any]:
        words, p = language(request), self.parts
        if not name:
            yield {p["notice"]: shown(html.notice("warn", tr(words, "choose_model")))}
            return
        try:
            options = await asyncio.to_thread(self._options, name, values)
        except GainzError as error:
            yield {p["notice"]: shown(html.refusal(words, error))}
            return
        async for update in self.load_with(request, name, options):
            yield update

    async def load_with(self, request: gr.Request, name: str, options: dict[str, Any]) -> AsyncIterator[Any]:
        words, p = language(request), self.parts
        task = self.page.tasks.start("load", name, lambda report, cancel: self.studio.load(name, options, report, cancel))
        code = snippets(*call_snippets("load", {"name": name, "options": options}, address_of(request)))
        yield {p["api"]: code, p["notice"]: shown("")}
        async for update in self._watch(words, task):
            yield update

    async def bring(
        self, start: Callable[..., tuple[str, str, Any]], said: Any, request: gr.Request, *values: Any
    ) -> AsyncIterator[Any]:
        """Import or pull: ``start`` gives kind, subject and work; ``said``: where this form tells how it went."""
        words = language(request)
        yield {said: shown("")}
        try:
            kind, subject, work = start(*values)
        except GainzError as error:
            yield {said: shown(html.refusal(words, error))}
            return

        def then_tell(report: Any, cancel: Any) -> str:
            name = work(report, cancel)
            self.studio.changed.emit()
            return name

        async for update in self._watch(words, self.page.tasks.start(kind, subject, then_tell), said):
            yield update

    async def watch_all(self, request: gr.Request) -> AsyncIterator[Any]:
        """A page that is opened while something runs takes up watching it."""
        running = self._running()
        if not running:
            yield gr.skip()
            return
        async for update in self._watch(language(request), running[-1]):
            yield update

    async def _watch(self, words: str, task: Any, said: Any = None) -> AsyncIterator[Any]:
        """Until ``task`` is over; its outcome goes to ``said``, else beside the chosen model."""
        p = self.parts
        async for _ in task.looks(PERIOD):
            board = show.work(words, self._running())
            yield {p["work"]: shown(board), p["cancel"]: gr.Button(visible=True), p["load"]: gr.Button(visible=False)}
        rest = self._running()
        yield {
            p["work"]: shown(show.work(words, rest)),
            p["cancel"]: gr.Button(visible=bool(rest)),
            p["load"]: gr.Button(visible=True),
            said or p["notice"]: shown(_outcome(words, task)),
            self.page.version: self.studio.changed.version,
        }

    def cancel(self) -> None:
        for task in self._running():
            task.cancel.set()

    def _running(self) -> list[Any]:
        return [task for task in self.page.tasks.running() if task.kind in KINDS]

    def unload(self, request: gr.Request, name: str) -> dict[Any, Any]:
        """What belongs to a loaded model goes with the answer: the signal that models changed takes a while to come round."""
        words, p, gone = language(request), self.parts, gr.Button(visible=False)
        code = snippets(*call_snippets("unload", {"name": name}, address_of(request)))
        try:
            self.studio.unload(name)
        except GainzError as error:
            return {p["notice"]: shown(html.refusal(words, error)), p["api"]: code}
        return {p["notice"]: shown(html.notice("good", tr(words, "unloaded", name=name))), p["api"]: code, p["unload"]: gone,
                p["loaded"]: shown(""), p["load"]: gr.Button(T("load")), p["working"].keep: gone, self.page.version: self.studio.changed.version}


def _chosen(entries: list[Any], chosen: str | None) -> str | None:
    """The entry that stays or becomes selected: a loaded one first."""
    names = [entry.name for entry in entries]
    return chosen if chosen in names else next((e.name for e in entries if e.loaded), names[0] if names else None)


def _bound(listener: Callable, *given: Any) -> Callable:
    """``listener`` with its first arguments given; Gradio wants a plain function with the request first."""
    async def listen(request: gr.Request, *values: Any):
        async for update in listener(*given, request, *values):
            yield update
    return listen


def _larger_helps(found: MemoryEstimate) -> bool:
    return bool(found.largest_context) and found.largest_context != found.context


def _outcome(words: str, task: Any) -> str:
    if task.state == "cancelled":
        return html.notice("warn", tr(words, "work_cancelled", name=task.subject))
    if task.error is not None:
        return html.refusal(words, task.error)
    return html.notice("good", tr(words, f"{task.kind}_done", name=task.subject, time=html.duration(task.seconds)))


TAB = Tab("tab_models", 20, build)
