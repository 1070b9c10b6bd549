"""A worker's side of the pipe: one JSON line asks, one answers. Standard library only, any Python from 3.9 on.

Whatever a library prints goes to stderr: file descriptor 1 is taken away from it before it is imported.
"""

import json
import os
import sys
import time
import traceback


class Wire:
    def __init__(self):
        self.out = os.fdopen(os.dup(1), "w")
        os.dup2(2, 1)

    def send(self, answer):
        self.out.write(json.dumps(answer) + "\n")
        self.out.flush()

    def serve(self, engine):
        """``engine`` has a method for each question; its answer is a dict. The end of stdin ends the worker."""
        self.send({"versions": engine.versions()})
        for line in sys.stdin:
            ask = json.loads(line)
            try:
                self.send(getattr(engine, ask.pop("do"))(**ask))
            except Exception as error:  # noqa: BLE001, a library's failure is an answer: the harness prints it and goes on
                traceback.print_exc()
                self.send({"error": f"{type(error).__name__}: {error}"[:500]})


def spans(start, times, ids):
    """What a stream of tokens comes to: ``times`` are when each of ``ids`` arrived, in seconds of one clock."""
    return {"first": times[0] - start, "decode": times[-1] - times[0], "tokens": len(ids), "ids": list(map(int, ids))}


def first_token(engine, prompt, *model, **options):
    """Load, one token, unload: what somebody waits for in a process that is warm. Timed alike for every engine."""
    start = now()
    engine.load("first", *model, **options)
    loaded = now()
    found = engine.run("first", prompt, 1)
    took = now() - start
    engine.unload("first")
    return {"seconds": took, "load": loaded - start, "ids": found["ids"]}


now = time.perf_counter
