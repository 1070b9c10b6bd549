"""What a benchmark is asked, as widgets and back: two sides, a workload, how it is measured. Knows the service's values, no layout
around them."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import Field, fields
from pathlib import Path
from typing import Any

import gradio as gr

from backends.base import DraftSpec, InvalidRequest, LocalOptions
from gainz_ui.i18n import T, option_label
from gainz_ui.services.bench.configs import DRAFT, Config
from gainz_ui.services.bench.protocol import Design
from gainz_ui.services.bench.run import Ask
from gainz_ui.services.bench.workloads import KINDS, LANGUAGES, LENGTHS, SIZES, Workload, bundled, from_file

USUAL = ("–", "")                       # a setting that stays as that model is loaded
STREAMS = (1, 2, 4, 8, 16)
LOOKS = "looks"


class SideForm:
    """One configuration. Fields that are left at `USUAL` are not asked for."""

    def __init__(self, letter: str) -> None:
        self.letter, prefix = letter, f"gz-bench-{letter}"
        self.model = gr.Dropdown([], label=T(f"bench_{letter}"), elem_id=f"{prefix}-model")
        with gr.Row():
            self.draft = gr.Dropdown([USUAL], value="", label=T("bench_draft"), allow_custom_value=True, elem_id=f"{prefix}-draft")
            self.length = gr.Textbox("", label=T("bench_draft_length"), placeholder="auto", max_lines=1, elem_id=f"{prefix}-length")
        with gr.Accordion(T("bench_side_settings"), open=False, elem_classes="gz-fold", elem_id=f"{prefix}-fold"):
            gr.Markdown(T("bench_side_help"), elem_classes="gz-soft")
            self.knobs = {item.name: _knob(item, f"{prefix}-{item.name}") for item in fields(LocalOptions)}
            self.more = gr.Textbox("", label=T("bench_more_settings"), placeholder="key=value, key=value", max_lines=1, elem_id=f"{prefix}-more")

    @property
    def widgets(self) -> list[Any]:
        return [self.model, self.draft, self.length, *self.knobs.values(), self.more]

    def read(self, values: Sequence[Any]) -> Config:
        """InvalidRequest names the field."""
        model, draft, length, *rest = values
        *given, more = rest
        if not model:
            raise InvalidRequest(f"No model is chosen for side {self.letter.upper()}.", field=self.letter, remedy="Choose one.")
        options = {item.name: _value(item, value) for item, value in zip(fields(LocalOptions), given) if str(value or "").strip()}
        if (more or "").strip():
            added = Config.parse(f"{model},{more}")
            options |= added.options
            if added.draft is not None:
                raise InvalidRequest("A draft is chosen in its own field.", field=DRAFT)
        written = (length or "").strip()
        return Config(model, options, DraftSpec.asked(
            (draft or "").strip(), None if written in ("", "auto") else _whole("draft_length", written)))

    def write(self, config: Config) -> list[Any]:
        known = {item.name: item for item in fields(LocalOptions)}
        more = ", ".join(f"{key}={json.dumps(value)}" for key, value in config.options.items() if key not in known)
        draft = config.draft
        return [config.model, draft.name if draft else "", str(draft.length or "") if draft else "",
                *(_shown(config.options.get(name, "")) for name in known), more]


class ProtocolForm:
    """Workload and protocol."""

    def __init__(self) -> None:
        with gr.Row():
            self.kind = gr.Dropdown([(T(f"workload_{kind}"), kind) for kind in KINDS], value="prose", label=T("bench_workload"),
                                    elem_id="gz-bench-kind")
            self.language = gr.Dropdown([("English", LANGUAGES[0]), ("中文", LANGUAGES[1])], value=LANGUAGES[0], label=T("bench_language"),
                                        elem_id="gz-bench-language")
            self.size = gr.Dropdown([(T(f"prompt_{size}"), size) for size in SIZES], value=SIZES[0], label=T("bench_size"),
                                    elem_id="gz-bench-size")
            self.tokens = gr.Number(LENGTHS[0], label=T("bench_tokens"), precision=0, elem_id="gz-bench-tokens")
        with gr.Row():
            self.pairs = gr.Dropdown([*((str(n), str(n)) for n in (8, 16, 32, 64)), (T("bench_looks"), LOOKS)], value=LOOKS,
                                     label=T("bench_pairs"), info=T("bench_pairs_help"), allow_custom_value=True, elem_id="gz-bench-pairs")
            self.mode = gr.Dropdown([(T("bench_cold"), "cold"), (T("bench_warm"), "warm")], value="cold", label=T("bench_mode"),
                                    info=T("bench_mode_help"), elem_id="gz-bench-mode")
            self.streams = gr.Dropdown([str(n) for n in STREAMS], value=["1"], multiselect=True, label=T("bench_streams"),
                                       info=T("bench_streams_help"), elem_id="gz-bench-streams")
        with gr.Accordion(T("more_options"), open=False, elem_classes="gz-fold", elem_id="gz-bench-more"):
            self.file = gr.File(label=T("bench_file"), file_types=[".txt", ".jsonl", ".json"], type="filepath", height=150,
                                elem_id="gz-bench-file")
            self.others = gr.Textbox("", label=T("bench_others"), info=T("bench_others_help"), lines=2, max_lines=8,
                                     placeholder="NAME,kv_type=int8\nNAME,draft=lookup", elem_id="gz-bench-others")
            with gr.Row():
                self.ttft = gr.Number(1.0, label=T("bench_ttft_limit"), elem_id="gz-bench-ttft")
                self.tpot = gr.Number(0.1, label=T("bench_tpot_limit"), elem_id="gz-bench-tpot")
                self.seed = gr.Number(0, label=T("bench_seed"), precision=0, elem_id="gz-bench-seed")

    @property
    def widgets(self) -> list[Any]:
        return [self.kind, self.language, self.size, self.tokens, self.pairs, self.mode, self.streams, self.file, self.others, self.ttft,
                self.tpot, self.seed]

    def read(self, a: Config, b: Config, values: Sequence[Any]) -> list[Ask]:
        """One benchmark for B and for each further candidate, all against ``a``."""
        kind, language, size, tokens, pairs, mode, streams, file, others, ttft, tpot, seed = values
        work = workload(kind, language, size, tokens, file)
        design = Design(work, pairs=None if pairs in (LOOKS, None) else _whole("pairs", pairs), mode=mode, seed=int(seed or 0))
        numbers = tuple(_whole("streams", number) for number in streams or ["1"])
        rest = [Config.parse(line) for line in (others or "").splitlines() if line.strip()]
        return [Ask((a, other), design, numbers, _usual(ttft, Ask.ttft_limit), _usual(tpot, Ask.tpot_limit)) for other in (b, *rest)]

    def write(self, report: Mapping[str, Any]) -> list[Any]:
        """As a report was asked. A file of own prompts is not kept: it has to be chosen again."""
        parts = report["workload"].split("-")
        kept = len(parts) == 4 and parts[0] in KINDS
        pairs = LOOKS if report["asked_pairs"] is None else str(report["asked_pairs"])
        streams = [str(level["streams"]) for level in report["levels"]] or [str(report["streams"])]
        named = parts[:3] if kept else [gr.skip()] * 3
        return [*named, report["tokens"], pairs, report["mode"], streams, None, "", report["limits"]["ttft"], report["limits"]["tpot"],
                report["seed"]]


def workload(kind: str, language: str, size: str, tokens: Any, file: str | None) -> Workload:
    count = _whole("tokens", tokens)
    return from_file(Path(file), count) if file else bundled(kind, language, size, count)


# ---------------------------------------------------------------------------------------------- one value
def _knob(item: Field, elem_id: str) -> Any:
    label, meta = option_label(None, item.name, item.metadata.get("label", item.name)), item.metadata
    if "choices" in meta:
        return gr.Dropdown([USUAL, *((choice, choice) for choice in meta["choices"])], value="", label=label, elem_id=elem_id)
    if isinstance(item.default, bool):
        return gr.Dropdown([USUAL, ("true", "true"), ("false", "false")], value="", label=label, elem_id=elem_id)
    return gr.Textbox("", label=label, placeholder=USUAL[0], max_lines=1, elem_id=elem_id)


def _value(item: Field, value: Any) -> Any:
    if "choices" in item.metadata:
        return value
    return value == "true" if isinstance(item.default, bool) else _whole(item.name, value)


def _shown(value: Any) -> str:
    return str(value).lower() if isinstance(value, bool) else str(value)


def _usual(value: float | None, usual: float) -> float:
    """A field that is empty stands for what is usual."""
    return usual if value is None else float(value)


def _whole(field: str, value: Any) -> int:
    try:
        number = float(value)
        if number == int(number):
            return int(number)
    except (TypeError, ValueError, OverflowError):
        pass
    raise InvalidRequest(f"{field} is a whole number, not {value!r}.", field=field)
