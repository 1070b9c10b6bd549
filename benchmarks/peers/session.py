"""One workload: its workers, its rounds, its figures. Every arm runs once a round, in an order drawn anew for each.

The first round warms up and is dropped. An arm whose peer is missing or fails is left out with the reason; the rest goes on.
"""

from __future__ import annotations

import random
import sys
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from benchmarks.peers.envs import NotThere, python_of
from benchmarks.peers.files import Files
from benchmarks.peers.link import Worker, WorkerFailed
from benchmarks.peers.plan import Arm, Workload

MOST_IDS = 30_000                     # prompts are of ids that every vocabulary here has


@dataclass
class Figures:
    """Of one workload: for each arm its figure in every round; what was left out and why; what the loads said."""

    workload: Workload
    values: dict[str, list[float]] = field(default_factory=dict)
    disturbed: dict[str, list[float]] = field(default_factory=dict)
    ids: dict[str, list[int]] = field(default_factory=dict)         # greedy ids of the last round
    loads: dict[str, dict] = field(default_factory=dict)
    skipped: dict[str, str] = field(default_factory=dict)
    live: list[Arm] = field(default_factory=list)                   # arms that can run


class Bench:
    """Workers by peer, started when first needed and kept for the whole session."""

    def __init__(self, envs: Path, pythons: Mapping[str, Path], files: Mapping[str, Path], threads: int) -> None:
        self.envs, self.pythons, self.threads = envs, pythons, threads
        self.files = Files(envs / "models", files, lambda: self.worker("llama"))
        self._workers: dict[str, Worker] = {}
        self._missing: dict[str, str] = {}
        self.versions: dict[str, dict] = {}

    def worker(self, peer: str) -> Worker:
        """Raises NotThere, remembered, where it cannot be had."""
        if peer in self._missing:
            raise NotThere(self._missing[peer])
        if peer not in self._workers:
            try:
                python = python_of(peer, self.envs, self.pythons)
                self.envs.mkdir(parents=True, exist_ok=True)
                self._workers[peer] = Worker(peer, python, self.envs / f"{peer}.log", self.threads)
            except (NotThere, WorkerFailed) as error:
                self._missing[peer] = str(error)
                raise NotThere(str(error)) from error
            self.versions[peer] = self._workers[peer].versions
        return self._workers[peer]

    def leave_out(self, peer: str, reason: str) -> None:
        self._missing[peer] = reason

    def close(self) -> None:
        for worker in self._workers.values():
            worker.close()

    # ------------------------------------------------------------------------------------------ one workload
    def measure(self, workload: Workload, pairs: int) -> Figures:
        found = self.prepare(workload)
        self.rounds(found, pairs)
        return found

    def prepare(self, workload: Workload) -> Figures:
        """Start and load what it needs."""
        found = Figures(workload)
        found.live = [arm for arm in workload.arms if self._ready(arm, found)]
        return found

    def rounds(self, found: Figures, pairs: int) -> None:
        """Measure what was prepared, then unload it."""
        live = found.live
        for number in range(pairs + 1):
            order = list(live)
            random.Random(number).shuffle(order)
            for arm in order:
                try:
                    answer = self._once(found, arm, number)
                except WorkerFailed as error:
                    found.skipped[arm.key] = str(error)
                    live.remove(arm)
                    found.values.pop(arm.key, None)
                    continue
                self._note(found, arm, answer, number)
        self._unload(found)

    def _ready(self, arm: Arm, found: Figures) -> bool:
        """Load what the arm needs, once for all arms of the same peer and model."""
        name = f"{arm.peer} {arm.model}"
        try:
            worker = self.worker(arm.peer)
            model = "" if arm.figure == "probe" else str(self.files.path(arm.model))
            if arm.figure == "first" or name in found.loads:
                return True
            same = [one for one in found.workload.arms if (one.peer, one.model) == (arm.peer, arm.model)]
            found.loads[name] = worker.ask("load", name=called(found, name), model=model, threads=self.threads,
                                           streams=max(one.streams for one in same),
                                           **{"context": max(one.context for one in same), **arm.options})
            return True
        except (NotThere, WorkerFailed) as error:
            found.skipped[arm.key] = str(error)
            return False

    def _once(self, found: Figures, arm: Arm, number: int) -> dict:
        worker, name = self.worker(arm.peer), called(found, f"{arm.peer} {arm.model}")
        if arm.figure == "probe":
            return worker.ask("probe", passes=arm.tokens)
        prompts = [prompt(arm, number, stream) for stream in range(arm.streams)]
        if arm.figure == "first":
            return worker.ask("first", model=str(self.files.path(arm.model)), threads=self.threads, prompt=prompts[0])
        if arm.streams > 1:
            return worker.ask("streams", name=name, prompts=prompts, tokens=arm.tokens)
        return worker.ask("run", name=name, prompt=prompts[0], tokens=arm.tokens)

    @staticmethod
    def _note(found: Figures, arm: Arm, answer: dict, number: int) -> None:
        value = figure(arm, answer)
        warm = "" if number else "  (warm-up)"
        print(f"{found.workload.name} {number}: {arm.key:34} {shown(arm, value):>16}{warm}", file=sys.stderr)
        if number:
            found.values.setdefault(arm.key, []).append(value)
            found.disturbed.setdefault(arm.key, []).append(answer["disturbed"])
            found.ids[arm.key] = answer.get("ids", [])

    def _unload(self, found: Figures) -> None:
        for name in found.loads:
            peer = name.split()[0]
            try:
                self._workers[peer].ask("unload", name=called(found, name))
            except WorkerFailed as error:
                self._missing[peer] = str(error)


def called(found: Figures, name: str) -> str:
    """What a worker knows a model by: two workloads may have the same one loaded, each in its own way."""
    return f"{found.workload.name}: {name}"


def prompt(arm: Arm, number: int, stream: int) -> list[int]:
    """The same for every arm of a round with the same length; another in each round unless the arm wants one for all."""
    draw = random.Random(f"{number if arm.fresh else 'fixed'} {stream} {arm.prompt}")
    return [draw.randrange(1000, MOST_IDS) for _ in range(arm.prompt)]


def figure(arm: Arm, answer: dict) -> float:
    if arm.figure == "probe":
        return max(answer["rates"])
    if arm.figure == "first":
        return answer["seconds"]
    if arm.figure == "prefill":
        return arm.prompt / answer["first"]
    tokens = answer["tokens"] if arm.streams > 1 else answer["tokens"] - 1
    speed = tokens / answer["decode"]
    return speed if arm.figure == "decode" else arm.streams / speed


def shown(arm: Arm, value: float) -> str:
    if arm.figure == "probe":
        return f"{value / 1e9:.2f} GB/s"
    return f"{value * 1e3:.2f} ms" if arm.figure in ("first", "step") else f"{value:,.1f} tok/s"
