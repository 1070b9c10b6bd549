"""Plain against drafted decoding of the same model, in turns: what drafting brings where it can, and what it costs where it cannot.

    python -m benchmarks.speculation MODEL [--draft PATH] [--only edit,random] [--dtype bfloat16] [--pairs 8] [--tokens 256]

Each pair is one plain and one drafted answer to the same question, each in an engine of its own over the same model, and the two
engines take turns pass by pass: so both see the same machine, and what else it does meets both alike. The ratio is that of the
seconds after the first token, token for token the same text, or the benchmark ends. One pair warms up and does not count. Ratio
and interval are those of `gainz_ui/services/stats.py`. Workloads:

edit       a function copied with changes: lookup
random     temperature 3, nothing repeats: lookup, the model itself as its draft (none can cost more), both, and ``--draft``
story      temperature 0.7: lookup
short      answers of 32 tokens: lookup, and ``--draft``
chat       six questions, at temperature 0 and 0.7: ``--draft``, alone and after lookup
scripted   a draft that is right with probability 0.7 and takes a tenth of a plain pass for each id
rows       no answers: passes of 1 to 16 rows against one row
"""

from __future__ import annotations

import argparse
import json
import math
import random
import statistics
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from backends.base import Cancel, Draft, DraftJob, DraftSpec, Event, Message, Request, Sampling, Step
from backends.engine.drafters import MODEL
from backends.engine.loop import Engine
from backends.registry import load_model
from gainz_ui.services.stats import estimate

LINES = [f"    {name}_{verb} = {verb}({name}, limit={limit})  # keep {name} below {limit}" for name, verb, limit in (
    ("river", "measure", 40), ("harbour", "count", 12), ("meadow", "weigh", 7), ("engine", "sample", 300), ("ledger", "read", 16),
    ("window", "open", 2), ("bridge", "cross", 81), ("garden", "water", 5), ("letter", "send", 60), ("signal", "trace", 9))]
COPIED = "def collect(limit):\n" + "\n".join(LINES) + "\n    return river_measure\n"
EDIT = f"Here is a Python function.\n\n{COPIED}\nHere is the same function, renamed to gather:\n\ndef gather(limit):\n{LINES[0]}\n"
QUESTIONS = ("Explain how rainbows form, in simple words.", "Write a short story about a fox who learns to swim.",
             "What are three tips for sleeping better?", "Write a polite email asking for a day off.",
             "Describe the city of Paris to someone who has never been there.", "How can I learn to play the guitar?")
SCRIPTED, RIGHT, SHARE = "scripted", 0.7, 0.1
ROWS = (1, 2, 3, 4, 5, 6, 8, 12, 16)


@dataclass(frozen=True)
class Workload:
    name: str
    prompts: tuple[str | tuple[Message, ...], ...]      # one a pair, in turn
    sampling: Sampling
    drafts: tuple[str, ...]
    expected: str


def workloads(tokens: int, own: str, draft: str | None) -> Iterator[Workload]:
    one, chat = (draft,) if draft else (), tuple((Message("user", text),) for text in QUESTIONS)
    full = Sampling(max_tokens=tokens, ignore_eos=True)
    story = ((Message("user", "Tell a story about a lighthouse keeper."),),)
    yield Workload("edit", (EDIT,), full, ("lookup",), "at least 1.7 in bfloat16, 1.5 in 4 bits")
    yield Workload("random", ("Random words:",), replace(full, temperature=3.0, seed=7), ("lookup", own, f"lookup+{own}", *one),
                   "at least 0.97")
    yield Workload("story", story, replace(full, temperature=0.7, seed=3), ("lookup",), "at least 0.97")
    yield Workload("short", chat, replace(full, temperature=0.7, seed=3, max_tokens=32), ("lookup", *one), "no promise below 256 tokens")
    for temperature in (0.0, 0.7):
        yield Workload(f"chat at {temperature:g}", chat, replace(full, temperature=temperature, seed=5),
                       (*one, *(f"lookup+{name}" for name in one)),
                       "at least 1.3 in bfloat16, 1.1 in 4 bits")
    yield Workload(SCRIPTED, chat[:2], full, (SCRIPTED,), "at least 1.45 at 1.2 B in 4 bits")


# ---------------------------------------------------------------------------------------------- a draft by a script
class Scripted:
    """Knows the plain answers; each id of a draft is right with probability `RIGHT`, and it says so; each takes `SHARE` of a plain
    pass."""

    def __init__(self) -> None:
        self.truth: list[int] = []
        self.plain = 0.0
        self._random = random.Random(1)

    def propose(self, batch: list[DraftJob]) -> list[Draft]:
        return [self._one(job) for job in batch]

    def _one(self, job: DraftJob) -> Draft:
        ahead = self.truth[len(job.tokens):][:job.most(MODEL)]
        sure: list[float] = []                              # it says of each id what is true of all
        while len(sure) < len(ahead) and (not sure or job.judge is None or job.judge.more(sure)):
            sure.append(RIGHT)
            until = time.perf_counter() + SHARE * self.plain
            while time.perf_counter() < until:
                pass
        worth = job.judge.worth(sure) if sure and job.judge is not None else len(sure)
        draft = Draft([token if self._random.random() < RIGHT else token ^ 1 for token in ahead[:worth]], MODEL)
        draft.dropped = len(sure) - worth
        return draft

    reads_states = False

    def forget(self, sequence: int) -> None: ...

    shed = close = lambda self, *_: False


# ---------------------------------------------------------------------------------------------- two engines
class Half:
    """One answer in its engine, step by step. ``seconds``: after the first token."""

    def __init__(self, engine: Engine, model: Any, request: Request) -> None:
        self.engine, self.events, self.seconds = engine, [], 0.0
        engine.submit(model, request, Cancel(), self.events.append)

    @property
    def done(self) -> bool:
        return bool(self.events) and self.events[-1].last

    def step(self) -> None:
        began, decoding = time.perf_counter(), any(event.ids for event in self.events[-1:])
        self.engine.step()
        self.seconds += (time.perf_counter() - began) * decoding

    def finish(self) -> tuple[Event, list[int]]:
        while not self.done:
            self.step()
        while self.engine.step():               # what is measured while nobody waits
            pass
        if self.last.error is not None:
            raise self.last.error
        return self.last, [token for event in self.events for token in event.ids]

    @property
    def last(self) -> Event:
        return self.events[-1]


class Bench:
    def __init__(self, model: Any, draft: Any | None) -> None:
        self.model, self.script, self.engines = model, Scripted(), {kind: Engine() for kind in ("plain", "drafted")}
        for engine in self.engines.values():
            engine.attach(model)
        self.engine = self.engines["drafted"]
        if draft is not None:
            self.engine.attach(draft)
        for engine in self.engines.values():
            while engine.step():                # what a program that has just loaded them does
                pass

    def together(self, prompt: Any, sampling: Sampling, spec: DraftSpec) -> dict[str, Half]:
        halves = {kind: Half(engine, self.model, Request(prompt, sampling, spec if kind == "drafted" else None))
                  for kind, engine in self.engines.items()}
        one, two = halves.values()
        while not (one.done or two.done):
            for half in (one, two):
                half.step()
            one, two = two, one                 # who goes first changes with every pass
        return halves

    def answer(self, prompt: Any, sampling: Sampling) -> tuple[Event, list[int]]:
        return Half(self.engines["plain"], self.model, Request(prompt, sampling)).finish()

    def ready_script(self, prompt: Any, sampling: Sampling) -> None:
        """Its truth, its cost, and a place among the drafters."""
        last, ids = self.answer(prompt, sampling)
        self.script.truth = [*self.model.tokenize(prompt), *ids]
        self.script.plain = last.timing.decode_seconds / (len(ids) - 1)
        lane = self.engine._lanes[0]
        self.engine._drafters[lane, "lookup"] = self.script
        lane.controller.draft_costs("lookup", MODEL, SHARE)         # what a draft of that size is believed to cost at first

    def costs(self) -> dict[int, float]:
        return {rows: round(1000 * seconds, 2) for rows, seconds in self.engine._lanes[0].controller.costs.table().items()}


def pairs(bench: Bench, work: Workload, draft: str, count: int) -> dict[str, Any]:
    logs, speeds, told, first = [], {"plain": [], "drafted": []}, [], None
    for turn in range(count + 1):
        prompt = work.prompts[turn % len(work.prompts)]
        if draft == SCRIPTED:
            bench.ready_script(prompt, work.sampling)
        halves = bench.together(prompt, work.sampling, DraftSpec("lookup" if draft == SCRIPTED else draft))
        ids = {kind: half.finish()[1] for kind, half in halves.items()}
        took = {kind: half.seconds for kind, half in halves.items()}
        told.append(halves["drafted"].last.usage.speculation)
        if ids["plain"] != ids["drafted"]:
            raise SystemExit("The drafted answer is another one than the plain answer.")
        if turn == 0:
            first, told = took["plain"] / took["drafted"], []
            continue
        logs.append(math.log(took["plain"] / took["drafted"]))
        for kind in took:
            speeds[kind].append((len(ids[kind]) - 1) / took[kind])
    return {**figures(logs), "first": round(first, 3), **{kind: round(statistics.median(each), 1) for kind, each in speeds.items()},
            **summary(told)}


def figures(logs: list[float]) -> dict[str, Any]:
    found = estimate(logs)
    interval = [round(end, 3) for end in found.interval] if found.interval else None
    return {"ratio": round(found.ratio, 3), "interval": interval, "ratios": [round(math.exp(one), 3) for one in logs]}


def summary(told: list[Any]) -> dict[str, Any]:
    """Over all drafted answers."""
    lengths: dict[int, int] = {}
    tried, right = [0] * 64, [0] * 64
    for one in told:
        for length, passes in one.lengths:
            lengths[length] = lengths.get(length, 0) + passes
        for place, (there, good) in enumerate(one.positions):
            tried[place], right[place] = tried[place] + there, right[place] + good
    mean = lambda values: round(statistics.mean(values), 3) if values else None  # noqa: E731
    return {"acceptance": mean([one.acceptance for one in told if one.acceptance is not None]),
            "tokens_per_pass": mean([one.tokens_per_pass for one in told if one.tokens_per_pass]),
            "told": mean([one.speedup for one in told if one.speedup]), "draft_seconds": mean([one.draft_seconds for one in told]),
            "by_place": [round(good / there, 2) for there, good in zip(tried, right) if there >= 20],
            "lengths": dict(sorted(lengths.items())), "last": asdict(told[-1])["sources"] if told else None}


def rows(model: Any, turns: int = 24) -> dict[str, Any]:
    """Milliseconds of a pass by rows after 100 tokens: fastest, median; each in turn, so that all see the same machine."""
    decoder, text = model.decoder, [(7919 * place + 11) % model.decoder.vocab.size for place in range(120)]
    slot, took = decoder.open(text, reuse=False), {count: [] for count in ROWS}
    decoder.reserve(slot, 120)
    decoder.extend([Step(slot, text[:100], 0)])
    for turn in range(turns + 4):
        for count in ROWS:
            decoder.reserve(slot, count)
            began = time.perf_counter()
            decoder.extend([Step(slot, text[turn:turn + count], count)])
            took[count] += [time.perf_counter() - began] * (turn >= 4)          # the first are set up
            decoder.truncate(slot, 100)
    decoder.release(slot)
    fast = {count: min(each) for count, each in took.items()}
    return {"fastest_ms": {count: round(1000 * value, 2) for count, value in fast.items()},
            "median_ms": {count: round(1000 * statistics.median(each), 2) for count, each in took.items()},
            "against_one": {count: round(statistics.median(each) / statistics.median(took[1]), 3) for count, each in took.items()}}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("model", type=Path)
    parser.add_argument("--draft", type=Path, help="a draft model, beside its parent")
    parser.add_argument("--only", default="", help="workloads, by commas (default: all)")
    parser.add_argument("--drafts", default="", help="of a workload's drafts only these, by commas")
    parser.add_argument("--dtype", default="auto")
    parser.add_argument("--kernels", default="auto")
    parser.add_argument("--threads", type=int, default=0)
    parser.add_argument("--pairs", type=int, default=8)
    parser.add_argument("--tokens", type=int, default=256)
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    options = {"threads": args.threads, "context": 2048, "streams": 2, "prefix_cache": False}
    model = load_model(args.model, dtype=args.dtype, kernels=args.kernels, **options)
    draft = load_model(args.draft, **options) if args.draft else None
    bench, only = Bench(model, draft), set(filter(None, args.only.split(",")))
    report: dict[str, Any] = {"model": str(args.model), "kernels": model.info.kernels, "rows": []}
    if not only or "rows" in only:
        report["passes"] = rows(model)
        print(json.dumps(report["passes"]), flush=True)
    for work in workloads(args.tokens, model.info.name, draft and draft.info.name):
        for name in work.drafts if not only or work.name.split()[0] in only else ():
            if args.drafts and name not in args.drafts.split(","):
                continue
            row = {"workload": work.name, "draft": name, "expected": work.expected, **pairs(bench, work, name, args.pairs)}
            report["rows"].append(row)
            print(json.dumps(row), flush=True)
    report["costs_ms"] = bench.costs()
    print(json.dumps(report["costs_ms"]))
    if args.json:
        args.json.write_text(json.dumps(report, indent=1))
    model.close()


if __name__ == "__main__":
    main()
