"""Gainz beside other engines on the same weights, the same prompts and the same threads, in one session.

    python -m benchmarks.peers [--only decode-starter,load] [--pairs 8] [--json FILE] [--plot FILE.svg]
                               [--envs FOLDER] [--env llama=/path/to/python] [--file starter-g64-h4=FOLDER]

Each engine is a resident process that is stopped by signal while others run; prompts are fixed token ids, decoding is greedy
and ignores end tokens. A round runs every arm once, in random order; ratios are of the same round. Figures may be added to:
with --json FILE of an earlier piece, --merge keeps its other workloads.
"""

from __future__ import annotations

import argparse
import json
import signal
import sys
from pathlib import Path

from benchmarks.peers import envs, plan, plot, report
from benchmarks.peers.session import Bench, Figures
from gainz_ui.services.stats import FEWEST


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.peers", description=__doc__,
                                     formatter_class=argparse.RawDescriptionHelpFormatter)
    known = {workload.name: workload for workload in plan.workloads()}
    parser.add_argument("--only", type=lambda text: text.split(","), default=list(known), metavar="NAME,…",
                        help=f"of {', '.join(known)}")
    parser.add_argument("--pairs", type=int, default=8, help=f"rounds after the warm-up; {FEWEST} at least for an interval")
    parser.add_argument("--threads", type=int, default=2, help="for every engine")
    parser.add_argument("--envs", type=Path, default=envs.DEFAULT, help="where environments and made models lie")
    parser.add_argument("--env", type=pair, action="append", default=[], metavar="PEER=PYTHON")
    parser.add_argument("--file", type=pair, action="append", default=[], metavar="MODEL=PATH")
    parser.add_argument("--without", type=lambda text: text.split(","), default=[], metavar="PEER,…")
    parser.add_argument("--wait", action="store_true", help="load everything, then wait for a line on stdin: quiet now?")
    parser.add_argument("--json", type=Path)
    parser.add_argument("--merge", action="store_true", help="keep the other workloads that --json already holds")
    parser.add_argument("--plot", type=Path)
    given = parser.parse_args()
    if unknown := [name for name in given.only if name not in known]:
        parser.error(f"no workload is called {', '.join(unknown)}; known: {', '.join(known)}")
    bench = Bench(given.envs, dict(given.env), dict(given.file), given.threads)
    for peer in given.without:
        bench.leave_out(peer, "left out with --without")
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))   # so that no stopped worker is left behind
    try:
        figures = measured(bench, [known[name] for name in given.only], given.pairs, given.wait)
    finally:
        bench.close()
    earlier = kept(given.json, given.only, known) if given.merge and given.json else []
    figures = sorted([*figures, *earlier], key=lambda found: list(known).index(found.workload.name))
    rows = report.lines(figures, bench.files)
    print(report.table(rows))
    if given.json:
        given.json.write_text(json.dumps(report.as_json(figures, rows, bench.versions, given.threads), indent=1))
    if given.plot:
        given.plot.write_text(plot.svg(rows))
    return 0


def measured(bench: Bench, works: list[plan.Workload], pairs: int, wait: bool) -> list[Figures]:
    if not wait:
        return [bench.measure(work, pairs) for work in works]
    figures = [bench.prepare(work) for work in works]
    print("Everything is loaded. A line on stdin starts the rounds.", file=sys.stderr, flush=True)
    sys.stdin.readline()
    for found in figures:
        bench.rounds(found, pairs)
    return figures


def pair(text: str) -> tuple[str, Path]:
    key, sign, value = text.partition("=")
    if not sign:
        raise argparse.ArgumentTypeError(f"{text!r} is not NAME=PATH")
    return key, Path(value)


def kept(file: Path, measured: list[str], known: dict[str, plan.Workload]) -> list[Figures]:
    """The workloads of an earlier session that were not measured again."""
    if not file.exists():
        return []
    stored = json.loads(file.read_text())["workloads"]
    return [Figures(known[name], values=one["figures"], disturbed=one["disturbed"], loads=one["loads"], skipped=one["skipped"])
            for name, one in stored.items() if name in known and name not in measured]


if __name__ == "__main__":
    sys.exit(main())
