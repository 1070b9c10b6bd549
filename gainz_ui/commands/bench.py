"""One configuration against another, with an interval and a verdict: the Benchmark tab without a browser."""

from __future__ import annotations

import argparse
import json
import os
from pathlib import Path
from typing import Any

from backends.base import GainzError, InvalidRequest
from gainz_ui import __version__
from gainz_ui.longwork import failed, watched
from gainz_ui.services.bench.configs import Config
from gainz_ui.services.bench.protocol import Design
from gainz_ui.services.bench.run import Ask, bench
from gainz_ui.services.bench.workloads import Workload, from_file, from_name
from gainz_ui.services.studio import Studio
from gainz_ui.settings import Settings
from gainz_ui.terminal import show_table

NAME, HELP, ORDER = "bench", "measure one configuration against another: ratio, interval, verdict", 48
SETTINGS = ("models", "outputs", "logs")
ROWS = (("decode, tok/s", "decode"), ("together, tok/s", "throughput"), ("prefill, tok/s", "prefill"), ("TTFT, s", "ttft"), ("end to end, s", "end_to_end"),
        ("acceptance rate", "acceptance"), ("tokens a pass", "tokens_per_pass"), ("joules a token", "joules_per_token"))


def arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--a", required=True, metavar="SIDE", help="NAME[,key=value…]: a model and what its load differs in from the "
                        "usual, e.g. starter,kv_type=int8,threads=2,draft=lookup")
    parser.add_argument("--b", required=True, metavar="SIDE", help="the other side; ratios are B to A")
    parser.add_argument("--workload", default="prose", metavar="NAME",
                        help="prose, code, edit, summary, second or depth, with -zh, -long and a number of tokens after it where "
                        "wanted (code-zh-long-512), or a file of prompts, one a line (default: prose)")
    parser.add_argument("--tokens", type=int, metavar="INT", help="tokens of every answer (default: the workload's, 64)")
    parser.add_argument("--pairs", type=int, metavar="N", help="a fixed number of pairs (default: looks after 8, 16 and 32)")
    parser.add_argument("--mode", choices=("cold", "warm"), default="cold",
                        help="cold: no prompt was ever seen before; warm: prompts may be in the cache (default: cold)")
    parser.add_argument("--seed", type=int, default=0, metavar="INT", help="of the order of the sides (default: 0)")
    parser.add_argument("--streams", default="1", metavar="N[,N…]", help="answers at once, 1 to 16, or several numbers to go through: "
                        "throughput, goodput and queueing (default: 1)")
    parser.add_argument("--limits", default="1,0.1", metavar="TTFT,TPOT", help="seconds to the first token, and a token, that count as "
                        "good (default: 1,0.1)")
    parser.add_argument("--plant", type=float, default=0.0, metavar="PERCENT",
                        help="test the benchmark itself: tokens of B are held back by so many percent of their time")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the whole report there, every pair included")


def run(settings: Settings, given: argparse.Namespace) -> int:
    with watched(False) as (progress, cancel):
        try:
            ask = _ask(given)
            if given.json is not None:
                writable(given.json)
            studio = Studio(settings)
            try:
                found = bench(studio, ask, __version__, progress, cancel)
            finally:
                studio.close()
            if given.json is not None:
                given.json.write_text(json.dumps(found, ensure_ascii=False, indent=1, default=str) + "\n", encoding="utf-8")
        except GainzError as error:
            return failed(error, False)
    _show(found)
    return 1 if found["cancelled"] else 0


def workload(name: str, tokens: int | None) -> Workload:
    """A bundled one by its name, else a file of prompts."""
    path = Path(name)
    if path.suffix or os.sep in name:
        return from_file(path, 64 if tokens is None else tokens)
    return from_name(name if tokens is None else f"{name}-{tokens}")


def _ask(given: argparse.Namespace) -> Ask:
    design = Design(workload(given.workload, given.tokens), pairs=given.pairs, mode=given.mode, seed=given.seed)
    ttft, tpot = numbers("limits", given.limits, float, 2)
    return Ask((Config.parse(given.a), Config.parse(given.b)), design, tuple(numbers("streams", given.streams, int)), ttft, tpot,
               given.plant / 100)


def numbers(field: str, text: str, kind: type, count: int | None = None) -> list[Any]:
    """"1,2,4"; ``count``: how many there must be. InvalidRequest."""
    try:
        found = [kind(part) for part in text.split(",")]
    except ValueError:
        found = []
    if not found or count not in (None, len(found)):
        raise InvalidRequest(f"--{field} takes numbers with commas between them, not {text!r}.", field=field)
    return found


def writable(path: Path) -> None:
    """Before minutes are spent on what is to stand there. InvalidRequest."""
    there = path if path.exists() else path.absolute().parent
    if path.is_dir() or not os.access(there, os.W_OK):
        raise InvalidRequest(f"{path} cannot be written.", field="json", remedy="Name a file in a folder that is there and that you may write to.")


def _show(found: dict[str, Any]) -> None:
    a, b = found["a"], found["b"]
    rows = [(label, _figure(a[key]), _figure(b[key]), _figure(found["measures"].get(key, {}).get("ratio"))) for label, key in ROWS
            if a[key] is not None or b[key] is not None]
    roofs = [side["roofline"]["share"] if side["roofline"] else None for side in (a, b)]
    rows.append(("share of the bandwidth's ceiling", *(f"{100 * share:.0f} %" if share else "-" for share in roofs), ""))
    show_table(("MEASURE", f"A: {a['asked']}", f"B: {b['asked']}", "B / A"), rows)
    for level in found["levels"]:
        print(f"{level['streams']:>2} at once: A {_figure(level['a']['tokens_per_second'])}, B {_figure(level['b']['tokens_per_second'])} tok/s, "
              f"ratio {_figure(level['ratio'])}; within the limits A {_figure(level['a']['goodput'])}, B {_figure(level['b']['goodput'])} "
              "answers a second")
    if not found["energy"]["source"]:
        print(f"Energy is not measurable: {found['energy']['reason']}.")
    print(found["sentence"])
    if found["cancelled"]:
        print("Stopped early: this is what was measured until then.")


def _figure(value: float | None) -> str:
    return "-" if value is None else f"{value:.4g}"
