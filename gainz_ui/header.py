"""The header: what is loaded, what is going on, how the engine is. Pure: snapshot and tasks in, HTML out."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from gainz_ui import html
from gainz_ui.i18n import said, tr

SHOWN = 2                               # models with a chip of their own
LOGO = (
    (Path(__file__).parent / "favicon.svg")
    .read_text(encoding="utf-8")
    .strip()
    .replace("<svg ", '<svg aria-hidden="true" ', 1)
)


def header(language: str, snapshot: Any, tasks: Sequence[Any]) -> str:
    chips = [*_model_chips(language, snapshot), *_work_chips(language, snapshot, tasks), _engine_chip(language, snapshot),
             _memory_chip(language, snapshot)]
    return (f'<div class="gz-head"><h1 class="gz-brand">{LOGO}Gainz</h1><div class="gz-chips" role="status" '
            f'aria-label="{html.escape(tr(language, "status"))}">{"".join(chip for chip in chips if chip)}</div></div>')


def banner(language: str, snapshot: Any) -> str:
    """What has to be said in full: the engine died or is stuck. "" = all is well."""
    if snapshot.status not in {"dead", "stuck", "stopping"}:
        return ""
    return html.notice("bad" if snapshot.status != "stopping" else "warn", tr(language, f"banner_{snapshot.status}"),
                       [snapshot.reason, tr(language, f"banner_{snapshot.status}_help")])


def _model_chips(language: str, snapshot: Any) -> list[str]:
    models = snapshot.models
    if not models:
        return [] if snapshot.loading else [html.chip(tr(language, "chip_no_model"))]
    chips = [_model_chip(language, info, len(models) == 1, snapshot) for info in models[:SHOWN]]
    rest = models[SHOWN:]
    return chips + ([html.chip(f"+{len(rest)}", "good", ", ".join(info.name for info in rest))] if rest else [])


def _model_chip(language: str, info: Any, alone: bool, snapshot: Any) -> str:
    """A resting model is there all the same: it comes back when it is asked for, unless its files are gone."""
    if info.name in snapshot.missing:
        return html.chip(tr(language, "chip_missing", name=info.name), "warn", tr(language, "chip_missing_tip"))
    if info.name in snapshot.resting:
        return html.chip(tr(language, "chip_resting", name=info.name), "plain", tr(language, "chip_resting_tip"))
    return html.chip(f"{info.name} · {said(language, info.format)}" if alone else info.name, "good", _model_tip(language, info))


def _model_tip(language: str, info: Any) -> str:
    parts = [said(language, info.format), info.backend, said(language, info.kernels), html.size(info.weights_bytes) if info.weights_bytes else ""]
    return " · ".join(part for part in parts if part)


def _work_chips(language: str, snapshot: Any, tasks: Sequence[Any]) -> list[str]:
    chips = [
        html.chip(_percent(tr(language, "chip_loading", name=item.name), item.progress), "busy") for item in snapshot.loading
    ]
    chips += [html.chip(_percent(tr(language, f"chip_{task.kind}", name=task.subject), task.progress),
                        "busy gz-still" if task.kind == "bench" else "busy")
              for task in tasks if task.kind != "load"]
    if snapshot.running or snapshot.waiting:
        # without the pulse: a browser on the same machine would paint it with time that the answers need
        chips.append(html.chip(tr(language, "chip_requests", running=snapshot.running, waiting=snapshot.waiting), "busy gz-still"))
    return chips


def _percent(text: str, progress: Any) -> str:
    return f"{text} {100 * progress.done / progress.total:.0f} %" if progress.total else f"{text} …"


def _engine_chip(language: str, snapshot: Any) -> str:
    kinds = {
        "ready": "good",
        "dead": "bad",
        "stuck": "bad",
        "starting": "busy",
        "loading": "busy",
        "stopping": "warn",
        "idle": "plain",
    }
    return html.chip(tr(language, f"engine_{snapshot.status}"), kinds[snapshot.status], snapshot.reason)


def _memory_chip(language: str, snapshot: Any) -> str:
    memory = snapshot.memory
    used = memory.total - memory.available
    kind = "warn" if memory.available < 0.1 * memory.total else "plain"
    text = tr(language, "chip_memory", engine=html.size(memory.engine + memory.front), free=html.size(memory.available))
    return html.chip(text, kind, tr(language, "chip_memory_tip", used=html.size(used), total=html.size(memory.total),
                                    engine=html.size(memory.engine), front=html.size(memory.front)))
