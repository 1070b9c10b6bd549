"""A report for other programs and for people: our JSON, CSV of the pairs, Markdown, llama-bench's JSON, benchstat's text. Pure.

llama-bench's fields are those of its ``-o json``; what Gainz has no counterpart for is null, never invented. benchstat reads the
format of Go's benchmarks: a line a run, so that ``benchstat -col /side`` compares A and B by itself.
"""

from __future__ import annotations

import csv
import io
import json
from collections.abc import Callable, Mapping, Sequence
from statistics import fmean, pstdev
from typing import Any

from gainz_ui.services.bench.report import coarseness

ARMS = ("a", "b")
Report = Mapping[str, Any]
RUN = ("decode", "prefill", "ttft", "throughput", "prompt_tokens", "tokens", "cached", "passes", "drafted", "accepted", "joules")
WEATHER = ("bandwidth", "foreign", "steal", "swapped", "temperature", "mhz")


def to_json(report: Report) -> str:
    return json.dumps(report, ensure_ascii=False, indent=1, default=str) + "\n"


def to_csv(report: Report) -> str:
    """A line a pair; seconds, tokens a second, bytes a second, °C, MHz, joules."""
    out = io.StringIO()
    writer = csv.writer(out, lineterminator="\n")
    writer.writerow(["pair", "prompt", "first", *(f"{arm}_{name}" for arm in ARMS for name in (*RUN, "client_rate", "total")), *WEATHER,
                     "noise"])
    for number, pair in enumerate(report["pairs"], 1):
        runs = [value for arm in ARMS for value in (*(pair[arm][name] for name in RUN), pair[arm]["seen"]["rate"], pair[arm]["seen"]["total"])]
        weather = pair["weather"] or {}
        writer.writerow([number, pair["prompt"], pair["first"], *map(_cell, runs), *(_cell(weather.get(name)) for name in WEATHER),
                         pair["noise"]])
    return out.getvalue()


def to_markdown(report: Report) -> str:
    """What one would put into an issue: the sentence, the figures, the circumstances."""
    a, b = report["a"], report["b"]
    rows = [(name, a.get(key), b.get(key), (report["measures"].get(key) or {}).get("ratio")) for name, key in (
        ("decode, tok/s", "decode"), ("together, tok/s", "throughput"), ("prefill, tok/s", "prefill"), ("TTFT, s", "ttft"),
        ("end to end, s", "end_to_end"), ("ITL p50, s", "itl_p50"), ("ITL p99, s", "itl_p99"), ("tokens a pass", "tokens_per_pass"),
        ("joules a token", "joules_per_token"))]
    lines = [f"**{report['sentence']}**", "", f"| measure | A: `{_bar(a['asked'])}` | B: `{_bar(b['asked'])}` | B / A |", "|---|---|---|---|"]
    lines += [f"| {name} | {_figure(x)} | {_figure(y)} | {_figure(ratio)} |" for name, x, y, ratio in rows if x is not None or y is not None]
    where, calibration = report["environment"], report["calibration"]
    lines += ["", "Figures of A and B are medians of all answers, B / A is of pairs, so it need not be their quotient. Only "
              f"{'decode' if report['main'] == 'decode' else 'together'} has a verdict; the other ratios are each by itself, uncorrected."]
    lines += ["", f"{len(report['pairs'])} pairs of {report['tokens']} tokens, workload `{report['workload']}`, {report['mode']}, "
              f"{report['streams']} at once; {report['repeated']} measured again because of noise, {report['noisy']} of "
              f"{len(report['pairs'])} pairs in noise all the same. "
              f"A against A: {_calibration(report, calibration)}. {where['processor']}, {where['system']}, "
              f"Gainz {where['gainz']}, {report['made']}."]
    if report["differs"]:
        lines += ["", "Differs: " + ", ".join(f"{key} {_said(old)} → {_said(new)}" for key, (old, new) in report["differs"].items()) + "."]
    return "\n".join(lines) + "\n"


def _said(value: Any) -> str:
    return "none" if value is None else str(value)


# ---------------------------------------------------------------------------------------------- other tools' formats
def to_llama_bench(report: Report) -> str:
    """Two entries a side: prompt processing and generation."""
    return json.dumps([entry for arm in ARMS for entry in _entries(report, arm)], indent=2, ensure_ascii=False) + "\n"


def _entries(report: Report, arm: str) -> list[dict[str, Any]]:
    runs, side = [pair[arm] for pair in report["pairs"]], report[arm]
    prompt = round(fmean(run["prompt_tokens"] for run in runs)) if runs else 0
    reading = [run["prefill"] for run in runs if run["prefill"]]
    writing = [run["decode"] for run in runs if run["decode"]]
    return [_entry(report, side, prompt, 0, 0, reading), _entry(report, side, 0, report["tokens"], prompt, writing)]


def _entry(report: Report, side: Mapping[str, Any], prompt: int, generated: int, depth: int, rates: Sequence[float]) -> dict[str, Any]:
    said, where, count = side["resolved"], report["environment"], prompt or generated
    seconds = [1e9 * count / rate for rate in rates]
    return {
        "build_commit": f"gainz-{where['gainz']}", "build_number": None, "cpu_info": where["processor"], "gpu_info": "",
        "backends": said.get("kernels"), "model_filename": side["model"], "model_type": f"{said.get('architecture')} {said.get('format')}",
        "model_size": side["memory"]["weights"], "model_n_params": said.get("parameters"), "n_batch": None, "n_ubatch": None,
        "n_threads": said.get("threads"), "cpu_mask": None, "cpu_strict": None, "poll": None, "type_k": said.get("kv_type"),
        "type_v": said.get("kv_type"), "n_gpu_layers": None, "split_mode": None, "main_gpu": None, "no_kv_offload": None, "flash_attn": None,
        "tensor_split": None, "use_mmap": None, "embeddings": False, "n_prompt": prompt, "n_gen": generated, "n_depth": depth,
        "test_time": report["made"].replace("+00:00", "Z"), "avg_ns": _whole(fmean, seconds), "stddev_ns": _whole(pstdev, seconds),
        "avg_ts": fmean(rates) if rates else None, "stddev_ts": pstdev(rates) if rates else None,
        "samples_ns": [round(value) for value in seconds], "samples_ts": list(rates)}


def to_benchstat(report: Report) -> str:
    where = report["environment"]
    lines = [f"pkg: gainz/{report['workload']}", f"cpu: {where['processor']}"]
    for pair in report["pairs"]:
        for arm in ARMS:
            run = pair[arm]
            if run["decode"]:
                extra = f" {1e9 * run['ttft']:.0f} ttft-ns" if run["ttft"] is not None else ""
                lines.append(f"BenchmarkDecode/side={arm.upper()} {run['tokens']} {1e9 / run['decode']:.0f} ns/op {run['decode']:.3f} tok/s{extra}")
    return "\n".join(lines) + "\n"


FORMATS: Mapping[str, tuple[str, str, Callable[[Report], str]]] = {         # name → file's ending, kind, how
    "json": (".json", "application/json", to_json), "csv": (".csv", "text/csv", to_csv), "md": (".md", "text/markdown", to_markdown),
    "llama": (".llama-bench.json", "application/json", to_llama_bench), "benchstat": (".benchstat.txt", "text/plain", to_benchstat)}


# ---------------------------------------------------------------------------------------------- small things
def _whole(of: Callable[[Sequence[float]], float], values: Sequence[float]) -> int | None:
    return round(of(values)) if values else None


def _cell(value: Any) -> Any:
    return "" if value is None else value


def _figure(value: float | None) -> str:
    return "–" if value is None else f"{value:.4g}"


def _calibration(report: Report, found: Mapping[str, Any] | None) -> str:
    return "not measured" if found is None else f"{'known to ' if found['passed'] else 'a difference where there is none, '}{coarseness(report)}"


def _bar(text: str) -> str:
    """A name inside a cell of a table."""
    return text.replace("|", "\\|").replace("`", "'")
