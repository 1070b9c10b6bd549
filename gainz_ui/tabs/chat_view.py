"""What the chat tab shows, pure: a chat, an answer's state and figures in; messages and HTML out."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict
from typing import Any

from backends.base import ModelInfo, Sampling
from gainz_ui import html, shield
from gainz_ui.i18n import said, tr
from gainz_ui.services.answers import View
from gainz_ui.services.chat import Chat
from gainz_ui.tabs import draft_view

THINKING = ("<think>", "</think>")                        # around what a model says to itself: the Chatbot folds it
CUT_SHORT = {"length", "cancelled", "time_limit"}       # finishes after which an answer can be continued


def messages(language: str, chat: Chat, live: str | None = None) -> list[dict[str, Any]]:
    """For the Chatbot. Turns no longer sent stand above a line that says so; ``live``: the answer being written. What has a
    meaning in HTML is shown as it was written."""
    shown = [{"role": turn.role, "content": _shielded(turn.role, turn.content)} for turn in chat.turns]
    if live is not None:
        shown.append({"role": "assistant", "content": _shielded("assistant", live) or "…"})
    if chat.start:
        line = tr(language, "dropped_line", count=chat.start)
        shown.insert(chat.start, {"role": "assistant", "content": tr(language, "dropped_why"),
                                  "metadata": {"title": line, "status": "done"}})
    return shown


def _shielded(role: str, text: str) -> str:
    return shield.question(text) if role == "user" else shield.answer(text, THINKING)


def turn_of(chat: Chat, shown: int) -> int | None:
    """Which turn the message at ``shown`` is; None for the line about dropped turns."""
    if not chat.start or shown < chat.start:
        return shown
    return None if shown == chat.start else shown - 1


def figures(view: View, info: ModelInfo | None, prompt_tokens: int, sampling: Sampling) -> dict[str, Any]:
    """An answer's figures as plain JSON: shown below it, kept with its turn, exported."""
    usage, timing = view.usage, view.timing
    prompt = usage.prompt_tokens if usage and usage.prompt_tokens else prompt_tokens     # an engine that died counts nothing
    tokens = usage.completion_tokens if usage and usage.completion_tokens else view.tokens
    stats: dict[str, Any] = {
        "ttft_seconds": view.ttft,
        "tokens_per_second": view.speed,
        "completion_tokens": tokens,
        "prompt_tokens": prompt,
        "cached_tokens": usage.cached_tokens if usage else None,
        "total_seconds": timing.total_seconds if timing else view.seconds,
        "prefill_tokens_per_second": timing.prefill_tokens_per_second if timing else None,
        "queue_seconds": timing.queue_seconds if timing else None,
        "finish": view.finish,
        "temperature": sampling.temperature,
        "seed": sampling.seed,
        "context_used": prompt + (tokens or 0),
    }
    if info is not None:
        stats |= {
            "model": info.name,
            "revision": info.revision,
            "backend": info.backend,
            "format": info.format,
            "path": info.path,
            "kernels": info.kernels,
            "device": info.device,
            "dtype": info.dtype,
            "kv_type": info.kv_type,
            "context": info.context,
            "notes": list(info.notes),
        }
    if usage and usage.speculation:
        stats |= {"drafted": usage.drafted, "accepted": usage.accepted, "drafting": asdict(usage.speculation)}
    return stats


def strip(language: str, stats: Mapping[str, Any] | None, view: View | None = None) -> str:
    """The figures under the answer; while it is written, what it is doing as well."""
    if not stats:
        return ""
    say = lambda key, **values: tr(language, key, **values)  # noqa: E731
    ttft, speed = stats.get("ttft_seconds"), stats.get("tokens_per_second")
    ttft_value, _, ttft_unit = html.duration(ttft).partition(" ")
    rows = [(say("stat_ttft"), ttft_value, ttft_unit), (say("stat_speed"), f"{speed:.1f}" if speed else "–", "tok/s"),
            (say("stat_tokens"), _count(stats["completion_tokens"]), ""),
            (say("stat_prompt"), _count(stats["prompt_tokens"] or None), ""),
            (say("stat_cached"), _count(stats.get("cached_tokens")), "")]
    return (_activity(language, view) + html.tiles(rows) + draft_view.line(language, stats.get("drafting")) + _context(language, stats)
            + f'<p class="gz-served">{_served(language, stats)}</p>' + _notes(language, stats))


def _count(tokens: int | None) -> str:
    return "–" if tokens is None else html.number(tokens)


def _activity(language: str, view: View | None) -> str:
    """Waiting in the queue, reading the prompt: what goes on before the first token."""
    if view is None or view.done or view.tokens or view.text or view.progress is None:
        return ""
    progress = view.progress
    label = tr(language, f"stage_{progress.stage}", done=html.number(progress.done), total=html.number(progress.total)) \
        if progress.stage in {"queue", "prefill"} else stage(language, progress)
    share = progress.done / progress.total if progress.total else None
    return f'<div class="gz-activity"><p class="gz-served">{html.escape(label)}</p>{html.bar(share, label)}</div>'


def _context(language: str, stats: Mapping[str, Any]) -> str:
    whole, used = stats.get("context") or 0, stats["context_used"]
    if not whole:
        return ""
    label = tr(language, "stat_context")
    return (f'<div class="gz-context"><span>{html.escape(label)}</span>{html.bar(used / whole, label)}'
            f"<span>{html.number(used)} / {html.number(whole)}</span></div>")


def _served(language: str, stats: Mapping[str, Any]) -> str:
    """Which model, backend and kernels answered, and how the answer ended."""
    if not stats.get("model"):
        return ""
    path = tr(language, "path_" + stats["path"].replace("-", "_"))
    parts = [stats["format"], stats["backend"], path, said(language, stats["kernels"]), stats["device"], stats["dtype"],
             f"KV {stats['kv_type']}" if stats.get("kv_type") else ""]
    finish = stats.get("finish")
    end = tr(language, f"finish_{finish}") if finish else ""
    took = tr(language, "took", time=html.duration(stats["total_seconds"]))
    tags = "".join(html.tag(part) for part in parts if part)
    who, rest = tr(language, "served_by", model=stats["model"]), " · ".join(part for part in (took, end) if part)
    return f"{html.escape(who)} {tags}{html.escape(rest)}"


def _notes(language: str, stats: Mapping[str, Any]) -> str:
    """Fallbacks of the load: what was not as asked."""
    notes = stats.get("notes")
    return html.notice("warn", tr(language, "load_notes"), notes, live=False) if notes else ""


def gate(language: str, snapshot: Any, task: Any, error: Any, entries: int) -> str:
    """What stands in the chat's place while no model can answer: the first run's progress, or what to do."""
    if task is not None and task.running:
        return _first_run(language, task)
    if snapshot.loading:
        item = snapshot.loading[0]
        return html.empty(tr(language, "gate_loading", name=item.name), [stage(language, item.progress)],
                          html.bar(_share(item.progress), item.name))
    if error is not None:
        from gainz_ui.i18n import explain
        title, what, remedy = explain(language, error)
        return html.notice("bad", tr(language, "gate_failed"), [f"{title}: {what}", remedy])
    if entries:
        return html.empty(tr(language, "gate_none"), [tr(language, "gate_none_help", count=entries)])
    return html.empty(tr(language, "gate_empty"), [tr(language, "gate_empty_help")])


def _first_run(language: str, task: Any) -> str:
    progress = task.progress
    loading = progress.stage not in {"start", "fetch", "download", "unpack", "verify", "wait", "check"}
    lines = [stage(language, progress), tr(language, "gate_first_help")]
    return html.empty(tr(language, "gate_loading" if loading else "gate_first", name=task.subject), lines,
                      html.bar(_share(progress), task.subject))


def _share(progress: Any) -> float | None:
    return progress.done / progress.total if progress.total else None


def stage(language: str, progress: Any) -> str:
    """One line about how far something is; bytes where the total is that large."""
    from gainz_ui.i18n import has
    key = f"stage_{progress.stage}"
    if not progress.total:
        name = tr(language, key, done="", total="") if has(key) else progress.stage
        return " · ".join(part for part in (name.strip(), progress.note) if part)
    as_text = html.size if progress.total > 100_000 else html.number
    done, total = as_text(progress.done), as_text(progress.total)
    name = tr(language, key, done=done, total=total) if has(key) else progress.stage
    figures_in_name = has(key) and "{done}" in tr("en", key)
    return " · ".join(part for part in (name, "" if figures_in_name else f"{done} / {total}", progress.note) if part)
