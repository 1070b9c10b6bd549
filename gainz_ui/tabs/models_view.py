"""What the models tab shows, pure: entries, facts, estimates and loaded models in; labels and HTML out."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from backends.base import MemoryEstimate, ModelInfo
from gainz_ui import html
from gainz_ui.i18n import said, tr
from gainz_ui.tabs.chat_view import stage


def label(language: str, entry: Any) -> str:
    """Two lines: the name; format, size and state."""
    state = tr(language, "state_loaded") if entry.loaded else tr(language, "state_broken") if not entry.ready else ""
    parts = [said(language, entry.format or entry.title), html.size(entry.size) if entry.local else tr(language, "state_remote"), state]
    return entry.name + "\n" + " · ".join(part for part in parts if part)


def details(language: str, entry: Any, about: Any) -> str:
    """One model: what its files say."""
    say = lambda key: tr(language, key)  # noqa: E731
    rows = [(say("fact_format"), said(language, entry.format)), (say("fact_size"), html.size(entry.size) if entry.local else ""),
            (say("fact_backend"), said(language, entry.title or entry.backend)), *_file_facts(language, about),
            (say("fact_source"), entry.source), (say("fact_revision"), (entry.revision or "")[:12])]
    parts = [f'<h3 class="gz-h">{html.escape(entry.name)}</h3>', html.facts(rows)]
    if entry.reason:
        parts.append(html.notice("bad", say("cannot_load"), [entry.reason], live=False))
    parts += [html.notice("plain", said(language, note), live=False) for note in entry.notes]
    return '<div class="gz-stacked">' + "".join(parts) + "</div>"


def _file_facts(language: str, about: Any) -> list[tuple[str, str]]:
    if about is None:
        return []
    return [(tr(language, "fact_architecture"), about.architecture),
            (tr(language, "fact_parameters"), html.short_count(about.parameters) if about.parameters else ""),
            (tr(language, "fact_layers"), str(len(about.layers)) if about.layers else ""),
            (tr(language, "fact_bits"), f"{about.bits:.2f}" if about.bits else ""),
            (tr(language, "fact_quantization"), about.quantization),
            (tr(language, "fact_trained"), html.number(about.trained_context) if about.trained_context else "")]


def loaded(language: str, info: ModelInfo) -> str:
    """What runs: path, kernels, memory expected and observed, and what was not as asked."""
    say = lambda key: tr(language, key)  # noqa: E731
    expected = info.estimate.total if info.estimate else None
    rows = [
        (say("fact_path"), tr(language, "path_" + info.path.replace("-", "_"))),
        (say("fact_kernels"), said(language, info.kernels)),
        (say("fact_device"), info.device),
        (say("fact_dtype"), info.dtype),
        (say("fact_context"), html.number(info.context) if info.context else ""),
        (
            say("fact_kv"),
            f"{info.kv_type} · {html.size(info.kv_bytes_per_token)}/token" if info.kv_bytes_per_token else info.kv_type,
        ),
        (say("fact_streams"), str(info.streams)),
        (say("fact_threads"), str(info.threads or "")),
        (say("fact_weights"), html.size(info.weights_bytes) if info.weights_bytes else ""),
        (say("fact_expected"), html.size(expected) if expected else ""),
        (say("fact_peak"), html.size(info.peak_bytes) if info.peak_bytes else ""),
        (say("fact_load_time"), html.duration(info.load_seconds) if info.load_seconds else ""),
        (say("fact_template"), say("yes") if info.chat_template else say("no")),
        (say("fact_lossless"), say("yes") if info.lossless else say("no")),
    ] if info.path != "remote" else _elsewhere(language, info)
    notes = html.notice("warn", say("load_notes"), [said(language, note) for note in info.notes], live=False) if info.notes else ""
    if expected and info.peak_bytes and info.device == "cpu":
        notes = f'<p class="gz-soft">{html.escape(say("fact_peak_why"))}</p>' + notes
    return (
        f'<h3 class="gz-h gz-below">{html.escape(say("at_the_server" if info.path == "remote" else "in_memory"))}</h3>{html.facts(rows)}<div class="gz-gap">{notes}</div>'
    )


def _elsewhere(language: str, info: ModelInfo) -> list[tuple[str, str]]:
    """What is known of a model that another server answers."""
    say = lambda key: tr(language, key)  # noqa: E731
    return [(say("fact_path"), say("path_remote")), (say("fact_server_kind"), said(language, info.format)), (say("fact_server_model"), info.architecture),
            (say("fact_streams"), str(info.streams)),
            (say("fact_context"), html.number(info.trained_context) if info.trained_context else "")]


def memory(language: str, estimate: MemoryEstimate) -> str:
    """Needed against free, before a load."""
    parts = [(tr(language, "fact_weights"), estimate.weights, "weights"), (tr(language, "part_kv"), estimate.kv, "kv"),
             (tr(language, "part_work"), estimate.workspace, "work")]
    values = {"need": html.size(estimate.total), "free": html.size(estimate.free), "context": html.number(estimate.context),
              "largest": html.number(estimate.largest_context)}
    head = tr(language, "memory_fits" if estimate.fits else "memory_not", **values)
    lines = [tr(language, "memory_largest", **values)] if estimate.largest_context else [tr(language, "memory_no_context")]
    notice = html.notice("good" if estimate.fits else "bad", head, [*lines, *estimate.notes])
    return html.stacked(parts, estimate.free, head) + f'<div class="gz-gap">{notice}</div>'


def work(language: str, tasks: Sequence[Any]) -> str:
    """What is under way, with bars; "" = nothing."""
    out = []
    for task in tasks:
        progress = task.progress
        name = tr(language, f"chip_{task.kind}", name=task.subject)
        share = progress.done / progress.total if progress.total else None
        out.append(f'<div class="gz-work"><b>{html.escape(name)}</b><span>{html.escape(stage(language, progress))}</span>'
                   f"{html.bar(share, name)}</div>")
    return "".join(out)
