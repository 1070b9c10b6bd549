"""A long run of the whole program, as people use it: several streams at once, some that leave, some requests that are wrong, a second
model that comes and goes. What is asked: every answer equals what the same request gives alone, no good request fails, memory
stays level, and in the end no page of the cache is held.

    python -m benchmarks.soak --models models --main starter --other starter-gptq --minutes 30 --json outputs/soak.json

Exit code 0: all of that held. The server is a process of its own on a free port; nothing here knows its insides.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import re
import signal
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import httpx

ROOT = Path(__file__).parents[1]
ABORTED, WRONG = 0.10, 0.05             # of all requests
LEVEL = 0.03                            # by how much memory may grow after the warm-up
WARM = 0.25                             # share of the time that warms up
TEXTS = ("The quick brown fox", "Once upon a time there was", "1, 2, 3, 4,", "def add(a, b):", "The capital of France is", "Water boils at")
BAD = [     # path, body, status
    ("/v1/completions", {"prompt": "a", "temperature": -1}, 400), ("/v1/completions", {"prompt": "a", "n": 10**6}, 400),
    ("/v1/completions", {"prompt": "a", "nonsense": 1}, 400), ("/v1/completions", {"model": "no-such", "prompt": "a"}, 404),
    ("/v1/completions", {"prompt": [10**9], "max_tokens": 1}, 400), ("/generate", {"prompt": "a", "logit_bias": {"999999999": 1}}, 400),
    ("/generate", {"prompt": "a " * 60_000}, 400), ("/v1/complete", {}, 404), ("/generate", b"{", 400)]


@dataclass(frozen=True)
class Plan:
    """``seconds`` of load; ``other``: the model that comes and goes every ``churn`` seconds, "" = none."""

    models: Path
    main: str
    other: str = ""
    seconds: float = 1800.0
    streams: int = 4
    churn: float = 8.0
    tokens: int = 48
    seed: int = 1


@dataclass
class Outcome:
    """What was seen. ``wrong``, ``failed``: in words, at most the first few."""

    requests: int = 0
    aborted: int = 0
    refused: int = 0
    loads: int = 0
    tokens: int = 0
    seconds: float = 0.0
    wrong: list[str] = field(default_factory=list)
    failed: list[str] = field(default_factory=list)
    memory: list[tuple[float, float, float]] = field(default_factory=list)      # seconds, bytes of the engine, of the front
    growth: dict[str, float] = field(default_factory=dict)      # of the engine and the front after the warm-up, as a share
    pages_used: float = -1.0
    running: float = -1.0
    stop_seconds: float = -1.0

    def faults(self, memory: bool = True) -> list[str]:
        """Everything that should not be."""
        out = [*self.wrong, *self.failed]
        if memory:
            out += [f"the {name}'s memory grew by {100 * share:.1f} %" for name, share in self.growth.items() if share > LEVEL]
        if self.pages_used != 0 or self.running != 0:
            out.append(f"{self.pages_used:.0f} pages are held by {self.running:.0f} requests in the end")
        if self.stop_seconds > 5:
            out.append(f"it took {self.stop_seconds:.1f} s to end")
        return out


class Server:
    """``python app.py serve`` over the plan's models, with a home of its own."""

    def __init__(self, plan: Plan, home: Path) -> None:
        command = [sys.executable, "app.py", "serve", "--port", "0", "--models", str(plan.models), "--outputs", str(home / "outputs"),
                   "--logs", str(home / "logs"), "--keys", str(home / "keys.json"), "--load", plan.main]
        self.process = subprocess.Popen(command, cwd=ROOT, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True, env=dict(os.environ))
        self.url, self.said = "", []
        threading.Thread(target=self._listen, daemon=True).start()
        self._wait(lambda: self.url and self.ready())

    def _listen(self) -> None:
        for line in self.process.stderr:
            self.said.append(line.rstrip())
            if found := re.search(r"Gainz is at (http://\S+)", line):
                self.url = found[1]

    def ready(self) -> bool:
        try:
            return httpx.get(self.url + "/health", timeout=5).status_code == 200
        except httpx.TransportError:
            return False

    def _wait(self, truth, seconds: float = 180) -> None:
        end = time.monotonic() + seconds
        while not truth():
            if self.process.poll() is not None or time.monotonic() > end:
                raise RuntimeError("the server does not come up: " + " | ".join(self.said[-5:]))
            time.sleep(0.05)

    def metric(self, name: str, **labels: str) -> float:
        """Summed over its series with these labels."""
        total = 0.0
        for line in httpx.get(self.url + "/metrics", timeout=30).text.splitlines():
            series, _, value = line.rpartition(" ")
            if re.fullmatch(name + r"(\{.*\})?", series) and all(f'{key}="{one}"' in series for key, one in labels.items()):
                total += float(value)
        return total

    def call(self, name: str, *values: Any) -> None:
        """One of Gradio's names; raises where it answers with an error. Always the same session: Gradio keeps a state for each, until there
        are as many as the shell allows."""
        event = httpx.post(f"{self.url}/gradio_api/call/{name}", json={"data": list(values), "session_hash": "soak"}, timeout=60).json()["event_id"]
        said = httpx.get(f"{self.url}/gradio_api/call/{name}/{event}", timeout=180).text
        if "event: complete" not in said:
            raise RuntimeError(f"{name}: {said[:200]}")

    def stop(self) -> float:
        """Seconds from SIGTERM to the end."""
        try:
            return ended(self.process)
        finally:
            self.process.stderr.close()


def ended(process: subprocess.Popen, patience: float = 30) -> float:
    """Seconds from SIGTERM to the end of a server; one that outlasts ``patience`` is killed, and raises."""
    began = time.monotonic()
    if process.poll() is None:
        process.send_signal(signal.SIGTERM)
    try:
        process.wait(patience)
    finally:
        if process.poll() is None:
            process.kill()
    return time.monotonic() - began


class Soak:
    def __init__(self, plan: Plan, server: Server, say=print) -> None:
        self.plan, self.server, self.say = plan, server, say
        self.outcome, self._lock, self._over = Outcome(), threading.Lock(), threading.Event()
        self._alone: dict[str, dict[str, tuple[str, str]]] = {}     # by model and request: text and why it ended

    # ------------------------------------------------------------------------------------------ requests
    def requests(self) -> list[dict[str, Any]]:
        """Greedy and sampled, short and long, drafted or not, one that is stopped by a text."""
        rng, out = random.Random(self.plan.seed), []
        for n, text in enumerate(TEXTS * 2):
            body: dict[str, Any] = {"prompt": text, "max_tokens": rng.randint(1, self.plan.tokens), "ignore_eos": n % 3 == 0}
            if n >= len(TEXTS):
                body |= {"temperature": 0.9, "top_p": 0.95, "seed": n}
            if n % 4 == 1:
                body["draft"] = "lookup"
            if n % 5 == 2:
                body["stop"] = ["e"]
            out.append(body)
        return out

    def ask(self, client: httpx.Client, model: str, body: dict, stream: bool, leave_after: int | None = None) -> tuple[str, str] | None:
        """Text and why it ended; None: left after so many pieces. RuntimeError for anything else."""
        body = {**body, "model": model, "stream": stream}
        if not stream:
            answer = client.post("/generate", json=body)
            if answer.status_code != 200:
                raise RuntimeError(f"{answer.status_code}: {answer.text[:200]}")
            return answer.json()["text"], answer.json()["finish_reason"]
        pieces, last = [], {}
        with client.stream("POST", "/generate", json=body) as answer:
            if answer.status_code != 200:
                raise RuntimeError(f"{answer.status_code}: {answer.read()[:200]!r}")
            for line in answer.iter_lines():
                if line.startswith("data: "):
                    last = json.loads(line[6:])
                    pieces.append(last["text"])
                    if leave_after is not None and len(pieces) > leave_after:
                        return None
        if last.get("error") or not last.get("done"):
            raise RuntimeError(f"a stream broke: {last}")
        return "".join(pieces), last["finish_reason"]

    def learn(self, model: str) -> None:
        """Every request by itself, on a server that does nothing else."""
        with self._client() as client:
            self._alone[model] = {json.dumps(body): self.ask(client, model, body, False) for body in self.requests()}

    def check(self, client: httpx.Client, rng: random.Random, model: str) -> None:
        body = rng.choice(self.requests())
        found = self.ask(client, model, body, rng.random() < 0.5)
        with self._lock:
            self.outcome.requests += 1
            if found != self._alone[model][json.dumps(body)]:
                self._note(self.outcome.wrong, f"{model} {body}: {found} is not {self._alone[model][json.dumps(body)]}")

    def leave(self, client: httpx.Client, rng: random.Random) -> None:
        body = {**rng.choice(self.requests()), "max_tokens": 4 * self.plan.tokens, "ignore_eos": True}
        body.pop("stop", None)
        self.ask(client, self.plan.main, body, True, rng.randint(0, 6))
        with self._lock:
            self.outcome.aborted += 1

    def bad(self, client: httpx.Client, rng: random.Random) -> None:
        path, body, status = rng.choice(BAD)
        content = body if isinstance(body, bytes) else json.dumps(body).encode()
        answer = client.post(path, content=content, headers={"content-type": "application/json"})
        with self._lock:
            self.outcome.refused += 1
            if answer.status_code != status or not answer.json()["error"]["remedy"]:
                self._note(self.outcome.failed, f"{path} {str(body)[:80]} gave {answer.status_code} in place of {status}: {answer.text[:200]}")

    def _note(self, where: list[str], text: str) -> None:
        if len(where) < 20:
            where.append(text)
            self.say(text)

    def _client(self) -> httpx.Client:
        return httpx.Client(base_url=self.server.url, timeout=120)

    # ------------------------------------------------------------------------------------------ threads
    def stream(self, number: int) -> None:
        rng = random.Random(1000 * self.plan.seed + number)
        while not self._over.is_set():
            with self._client() as client:
                for _ in range(rng.randint(1, 20)):             # then another connection
                    if self._over.is_set():
                        return
                    self._guarded(lambda client=client: self._one(client, rng))

    def _one(self, client: httpx.Client, rng: random.Random) -> None:
        luck = rng.random()
        if luck < WRONG:
            self.bad(client, rng)
        elif luck < WRONG + ABORTED:
            self.leave(client, rng)
        else:
            self.check(client, rng, self.plan.main)

    def churn(self) -> None:
        """The other model comes, answers as it does alone, and goes."""
        rng = random.Random(self.plan.seed)
        with self._client() as client:
            while not self._over.is_set():
                self._guarded(lambda: self._come_and_go(client, rng))
                self._over.wait(self.plan.churn / 2)

    def _come_and_go(self, client: httpx.Client, rng: random.Random) -> None:
        self.server.call("load", self.plan.other, {"context": 512, "streams": 2})
        end = time.monotonic() + self.plan.churn / 2
        while time.monotonic() < end and not self._over.is_set():
            self.check(client, rng, self.plan.other)
        self.server.call("unload", self.plan.other)
        with self._lock:
            self.outcome.loads += 1
        self._over.wait(1.0)
        self.measure()

    def measure(self) -> None:
        """Memory, always with the one model in memory."""
        engine, front = (self.server.metric("gainz_memory_bytes", of=name) for name in ("engine", "front"))
        self.outcome.memory.append((time.monotonic() - self._began, engine, front))

    def _guarded(self, work) -> None:
        """Whatever goes wrong is an outcome, not the end of a thread."""
        try:
            work()
        except (httpx.HTTPError, RuntimeError, ValueError, KeyError) as error:
            with self._lock:
                self._note(self.outcome.failed, f"{type(error).__name__}: {error}"[:300])
            time.sleep(0.2)

    # ------------------------------------------------------------------------------------------ all of it
    def run(self) -> Outcome:
        if self.plan.other:
            self.server.call("load", self.plan.other, {"context": 512, "streams": 2})
            self.learn(self.plan.other)
            self.server.call("unload", self.plan.other)
        self.learn(self.plan.main)
        self._began = time.monotonic()
        threads = [threading.Thread(target=self.stream, args=(number,)) for number in range(self.plan.streams)]
        if self.plan.other:
            threads.append(threading.Thread(target=self.churn))
        for thread in threads:
            thread.start()
        try:
            self._watch()
        finally:                            # stopped, too: no thread goes on, and the server is ended
            self._over.set()
        for thread in threads:
            thread.join(180)
        self._settle()
        return self.outcome

    def _watch(self) -> None:
        end, told = self._began + self.plan.seconds, self._began
        while (now := time.monotonic()) < end and len(self.outcome.wrong) + len(self.outcome.failed) < 20:
            self._over.wait(min(2.0, end - now))
            if not self.plan.other:
                self.measure()
            if now - told > 60:
                told, seen = now, self.outcome
                self.say(f"{now - self._began:.0f} s: {seen.requests} answers, {seen.aborted} left, {seen.refused} refused, {seen.loads} loads, "
                         f"{len(seen.wrong)} wrong, {len(seen.failed)} failed")
        self.outcome.seconds = time.monotonic() - self._began

    def _settle(self) -> None:
        """Nothing is asked any more: the engine's counts as they come to rest."""
        seen, end = self.outcome, time.monotonic() + 10
        while time.monotonic() < end:
            time.sleep(0.6)                 # a heartbeat
            seen.pages_used = self.server.metric("gainz_pages", state="used")
            seen.running = self.server.metric("gainz_requests_running") + self.server.metric("gainz_requests_waiting")
            if not seen.pages_used and not seen.running:
                break
        seen.tokens = int(self.server.metric("gainz_tokens_total"))
        seen.growth = growth(seen.memory, seen.seconds)


def growth(memory: list[tuple[float, float, float]], seconds: float) -> dict[str, float]:
    """Of the median of the last quarter over that of the quarter after the warm-up; {} of too few samples."""
    early = [one for one in memory if WARM * seconds <= one[0] < 2 * WARM * seconds]
    late = [one for one in memory if one[0] >= (1 - WARM) * seconds]
    if not early or not late:
        return {}
    return {name: statistics.median(one[place] for one in late) / statistics.median(one[place] for one in early) - 1
            for place, name in ((1, "engine"), (2, "front"))}


def soak(plan: Plan, say=print) -> Outcome:
    """Start a server, load it, end it."""
    with tempfile.TemporaryDirectory() as home:
        server = Server(plan, Path(home))
        try:
            outcome = Soak(plan, server, say).run()
        finally:
            seconds = server.stop()
        outcome.stop_seconds = seconds
        return outcome


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("--models", type=Path, default=ROOT / "models")
    parser.add_argument("--main", default="starter")
    parser.add_argument("--other", default="")
    parser.add_argument("--minutes", type=float, default=30.0)
    parser.add_argument("--streams", type=int, default=4)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--json", type=Path)
    given = parser.parse_args()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    outcome = soak(Plan(given.models, given.main, given.other, 60 * given.minutes, given.streams, seed=given.seed))
    if given.json:
        given.json.write_text(json.dumps(asdict(outcome), indent=1), encoding="utf-8")
    print(json.dumps({key: value for key, value in asdict(outcome).items() if key != "memory"}, indent=1))
    faults = outcome.faults()
    print("\n".join(faults) or "Nothing was wrong.")
    return 1 if faults else 0


if __name__ == "__main__":
    sys.exit(main())
