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
from collections.abc import Iterator
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
    figures: list[Figures] = []
    try:
        for found in measured(bench, [known[name] for name in given.only], given.pairs, given.wait):
            figures.append(found)
    finally:                                                  # cut short, too: whole workloads are kept
        bench.close()
        publish(figures, known, bench, given)
    return 0


def measured(bench: Bench, works: list[plan.Workload], pairs: int, wait: bool) -> Iterator[Figures]:
    """Each workload when it is done; with ``wait`` all of them are loaded before the first begins."""
    if not wait:
        for work in works:
            yield bench.measure(work, pairs)
        return
    figures = [bench.prepare(work) for work in works]
    print("Everything is loaded. A line on stdin starts the rounds.", file=sys.stderr, flush=True)
    sys.stdin.readline()
    for found in figures:
        bench.rounds(found, pairs)
        yield found


def publish(figures: list[Figures], known: dict[str, plan.Workload], bench: Bench, given: argparse.Namespace) -> None:
    """The table, and the files that were asked for."""
    there = given.merge and given.json and given.json.exists()
    stored = json.loads(given.json.read_text()) if there else {"workloads": {}, "versions": {}}
    figures = sorted([*figures, *kept(stored, figures, known)], key=lambda found: list(known).index(found.workload.name))
    rows = report.lines(figures, bench.files)
    print(report.table(rows))
    if given.json:
        given.json.write_text(json.dumps(report.as_json(figures, rows, stored["versions"] | bench.versions, given.threads), indent=1))
    if given.plot:
        given.plot.write_text(plot.svg(rows))


def pair(text: str) -> tuple[str, Path]:
    key, sign, value = text.partition("=")
    if not sign:
        raise argparse.ArgumentTypeError(f"{text!r} is not NAME=PATH")
    return key, Path(value)


def kept(stored: dict, figures: list[Figures], known: dict[str, plan.Workload]) -> list[Figures]:
    """The workloads of an earlier session that were not measured again."""
    measured = {found.workload.name for found in figures}
    return [Figures(known[name], values=one["figures"], disturbed=one["disturbed"], loads=one["loads"], skipped=one["skipped"])
            for name, one in stored["workloads"].items() if name in known and name not in measured]


if __name__ == "__main__":
    sys.exit(main())
