"""What page and API cost: decode tokens a second through /generate (streamed) and through Gradio's client, beside the bare engine.

    python benchmarks/http_cost.py [--model models/NAME] [--tokens 256] [--rounds 7] [--json FILE]

One engine process, three ways to it, in turn within each round and in a shuffled order, so that the machine's moods hit all
alike: "engine" draws the events in this process straight from the engine's host; "http" and "gradio" are clients in processes
of their own that go through a real server (uvicorn, guard, page) in this one. Each way's time is wall-clock from first piece of
text to last, over the tokens in between, as the client sees it. The ratio is that of the medians; its interval is a bootstrap
over rounds. Exit code 1 where either ratio is below the target.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import random
import statistics
import sys
import tempfile
import threading
import time
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1]))

PROMPT = "Once upon a time, in a small town by the sea, there lived"
TARGET = 0.9


# ---------------------------------------------------------------------------------------------- the three ways
def engine_way(studio: Any, tokens: int) -> float:
    """Tokens a second, drawn from the host's iterator."""
    from backends.base import Cancel, Request, Sampling
    model = studio.model()
    first, count, last = None, 0, 0.0
    for event in model.generate(Request(PROMPT, Sampling(max_tokens=tokens, ignore_eos=True)), Cancel()):
        if event.ids:
            last = time.perf_counter()
            first, count = (last, 0) if first is None else (first, count + len(event.ids))
    return count / (last - first)


def http_way(url: str, tokens: int) -> float:
    import httpx
    first, count, last = None, 0, 0.0
    body = {"prompt": PROMPT, "max_tokens": tokens, "ignore_eos": True, "stream": True}
    with httpx.stream("POST", url + "/generate", json=body, timeout=300) as answer:
        for line in answer.iter_lines():
            if line.startswith("data: ") and (ids := json.loads(line[6:]).get("ids")):
                last = time.perf_counter()
                first, count = (last, 0) if first is None else (first, count + len(ids))
    return count / (last - first)


def gradio_way(client: Any, tokens: int) -> float:
    """Pieces come every 80 ms: the tokens in the first are no part of the span."""
    first, count, last, begun = None, 0, 0.0, 0
    for piece in client.submit(PROMPT, tokens, ignore_eos=True, api_name="/generate"):
        done = piece["completion_tokens"]
        if done and first is None:
            first, begun = time.perf_counter(), done
        if done and done != count:
            last, count = time.perf_counter(), done
    return (count - begun) / (last - first)


def client_main(way: str, url: str, orders: Any, results: Any) -> None:
    """A client's process: a number of tokens comes in, tokens a second go out; None ends it."""
    if way == "gradio":
        from gradio_client import Client
        client = Client(url, verbose=False)
    results.put("up")
    while (tokens := orders.get()) is not None:
        results.put(http_way(url, tokens) if way == "http" else gradio_way(client, tokens))


# ---------------------------------------------------------------------------------------------- server and rounds
def start_server(model: Path, folder: Path) -> tuple[Any, Any, str]:
    from gainz_ui import server
    from gainz_ui.settings import Settings
    house = server.furnish(Settings(models=model.parent.resolve(), outputs=folder, logs=folder, starter=False))
    house.studio.load(model.name)
    bound = server.bind("127.0.0.1", 0)
    made = server.make_server(server.build_app(house), house)
    threading.Thread(target=made.run, kwargs={"sockets": [bound]}, daemon=True).start()
    while not made.started:
        time.sleep(0.02)
    return house, made, f"http://127.0.0.1:{bound.getsockname()[1]}"


def measure(model: Path, tokens: int, rounds: int) -> tuple[dict[str, list[float]], dict[str, list[float]]]:
    """Tokens a second of each way and round, and microseconds of this process's CPU a token: what the front itself costs."""
    context = multiprocessing.get_context("spawn")
    with tempfile.TemporaryDirectory() as folder:
        house, made, url = start_server(model, Path(folder))
        clients = {}
        for way in ("http", "gradio"):
            orders, results = context.Queue(), context.Queue()
            process = context.Process(target=client_main, args=(way, url, orders, results), daemon=True)
            process.start()
            assert results.get(timeout=60) == "up"
            clients[way] = (process, orders, results)

        def once(way: str) -> float:
            if way == "engine":
                return engine_way(house.studio, tokens)
            clients[way][1].put(tokens)
            return clients[way][2].get(timeout=600)

        found: dict[str, list[float]] = {"engine": [], "http": [], "gradio": []}
        spent: dict[str, list[float]] = {way: [] for way in found}
        for number in range(rounds + 1):                    # the first round warms up and is dropped
            order = list(found)
            random.Random(number).shuffle(order)
            for way in order:
                before = time.process_time()
                speed = once(way)
                if number:
                    found[way].append(speed)
                    spent[way].append(1e6 * (time.process_time() - before) / tokens)
                print(f"round {number}: {way:7s} {speed:7.1f} tok/s{'' if number else '  (warm-up)'}", file=sys.stderr)
        for process, orders, _ in clients.values():
            orders.put(None)
            process.join(10)
        made.handle_exit(15, None)
        house.studio.close()
    return found, spent


def ratio(way: list[float], bare: list[float]) -> dict[str, float]:
    """Ratio of medians and its 95 % bootstrap interval over rounds."""
    draw, picks = random.Random(0), range(len(bare))
    many = sorted(statistics.median(way[i] for i in pick) / statistics.median(bare[i] for i in pick)
                  for pick in (draw.choices(picks, k=len(bare)) for _ in range(2000)))
    return {"ratio": statistics.median(way) / statistics.median(bare), "low": many[50], "high": many[-51]}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--model", type=Path, default=Path("models") / "SmolLM2-135M-Instruct.Q4_1")
    parser.add_argument("--tokens", type=int, default=256)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--json", type=Path, help="write the figures here")
    given = parser.parse_args()
    found, spent = measure(given.model, given.tokens, given.rounds)
    out: dict[str, Any] = {"model": given.model.name, "tokens": given.tokens, "rounds": given.rounds, "tokens_per_second": found,
                           "front_cpu_us_per_token": {way: statistics.median(values) for way, values in spent.items()},
                           "median": {way: statistics.median(speeds) for way, speeds in found.items()},
                           **{way: ratio(found[way], found["engine"]) for way in ("http", "gradio")}}
    if given.json:
        given.json.write_text(json.dumps(out, indent=1))
    for way, median in out["median"].items():
        share = f"{100 * out[way]['ratio']:5.1f} % of the engine ({100 * out[way]['low']:.1f} to {100 * out[way]['high']:.1f})" \
            if way != "engine" else ""
        print(f"{way:7s} {median:7.1f} tok/s  {out['front_cpu_us_per_token'][way]:5.0f} µs of the front's CPU a token  {share}")
    return 0 if all(out[way]["ratio"] >= TARGET for way in ("http", "gradio")) else 1


if __name__ == "__main__":
    sys.exit(main())
