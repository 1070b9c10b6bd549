"""An engine of a few lines: each step gives each running answer one token, "NAME:I ". Prompts choose what goes wrong."""

from __future__ import annotations

import os
import threading
import time

from backends.base import Event, InvalidRequest, ModelNotLoaded, QueueFull, Timing, Usage


class ToyEngine:
    def __init__(self, pace: float = 0.002, queue: int = 1000) -> None:
        self.pace, self.queue = pace, queue
        self.names: dict[int, str] = {}
        self.running: list = []
        self.lock = threading.Lock()
        self.steps = 0

    def attach(self, model) -> None:
        self.names[id(model)] = model.info.name

    def detach(self, model) -> None:
        del self.names[id(model)]

    def submit(self, model, request, cancel, sink) -> None:
        if id(model) not in self.names:
            raise ModelNotLoaded("not attached")
        if request.prompt == "refuse":
            raise InvalidRequest("This prompt is refused.", field="prompt")
        if request.prompt == "bug":
            raise KeyError("a bug")
        with self.lock:
            if len(self.running) >= self.queue:
                raise QueueFull("Too many.", waiting=len(self.running))
            self.running.append([model.info.name, request, cancel, sink, 0, time.monotonic()])

    def step(self) -> bool:
        with self.lock:
            now = list(self.running)
        if not now:
            return False
        self.steps += 1
        for item in now:
            self.advance(item)
        time.sleep(self.pace)
        return True

    def advance(self, item) -> None:
        name, request, cancel, sink, done, began = item
        if request.prompt == "loop":
            raise RuntimeError("the loop is broken")
        if request.prompt == "hang":
            time.sleep(1.5)
        if request.prompt == "abort":
            os.abort()
        item[4] = done + 1
        finish = "cancelled" if cancel.is_set() else "length" if done + 1 == request.sampling.max_tokens else None
        sink(Event(text=f"{name}:{done} ", ids=(done,), finish=finish))
        if finish:
            with self.lock:
                self.running.remove(item)
            sink(Event(index=-1, usage=Usage(1, done + 1), timing=Timing(total_seconds=time.monotonic() - began)))

    def stats(self) -> dict:
        return {"steps": self.steps, "queue": 0, "active": len(self.running)}
