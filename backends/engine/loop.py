"""The engine: one loop that drives every attached model, and the mailbox through which requests reach it.

Knows threads, queues and models. What a step does to a model's sequences is in `lane.py`; who runs, in `scheduler.py`.
`submit` runs in the caller's thread up to the mailbox; everything after, events included, in the thread that steps.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence as Listed
from typing import TYPE_CHECKING, Any

from backends import speculative
from backends.base import Cancel, DraftSpec, Drafter, Event, ModelNotLoaded, NotSupported, QueueFull, Request
from backends.engine import intake, noise, sampler
from backends.engine.bridge import RetokenizingDrafter
from backends.engine.course import Course
from backends.engine.embed import EmbedJob
from backends.engine.drafters import FirstOf, ModelDrafter
from backends.engine.lane import Lane
from backends.engine.lookup import LookupDrafter
from backends.engine.scheduler import Limits
from backends.engine.sequence import Answer, Sequence
from backends.engine.state_places import StatePlaces
from backends.engine.vocabularies import first_difference
from backends.engine.waiting import full

if TYPE_CHECKING:
    from backends.engine.local import LocalModel

IDLE_SECONDS = 0.5        # how often an idle loop looks whether it should stop
SUMMED = ("queue", "running", "requests", "prompt_tokens", "tokens", "cached_tokens", "drafted", "accepted", "preemptions")


class Engine:
    """``budget``: tokens a step; ``mixed``: of them prompt tokens while others decode; ``queue``: most waiting requests."""

    def __init__(self, *, budget: int = 256, mixed: int = 64, queue: int = 256) -> None:
        self.limits = Limits(budget, mixed, queue)
        self.steps = 0                                      # rounds with work
        self.last_step: float | None = None                 # time.monotonic() of the last one's end
        self._lanes: list[Lane] = []
        self._drafters: dict[tuple[Lane, str], Drafter] = {}
        self._mail: list[tuple[Lane, Answer]] = []
        self._post = threading.Condition()                  # guards the mailbox
        self._turn = threading.Lock()                       # held for a step, and by attach and detach
        self._visitors = 0                                  # who waits for the turn: the loop lets them go first

    # --------------------------------------------------------------------------------------- models
    def attach(self, model: LocalModel) -> None:
        with self._visit():
            if any(lane.model is model for lane in self._lanes):
                raise ValueError("the model is attached already")
            lane = Lane(model, self.limits, lambda: self._shed(model.decoder))
            self._lanes = [*self._lanes, lane]
            model.engine = self

    def detach(self, model: LocalModel) -> None:
        """Let go of the model: its answers end with ModelNotLoaded, and those that drafted with it go on without."""
        with self._visit():
            lane = self._lane(model)
            self._collect()
            for answer in list(lane.answers):
                lane.fail(answer, ModelNotLoaded("The model was unloaded while it answered."))
            with self._post:
                self._lanes = [one for one in self._lanes if one is not lane]
                lane.embeds.close(ModelNotLoaded("The model was unloaded while it embedded."))
                gone = [key for key in self._drafters if key[0] is lane or model.info.name in key[1].split("+")]
                retired = [self._drafters.pop(key) for key in gone]
            for one in (lane, *self._lanes):                # what is measured may be one of these drafters
                one.hurry()
            for drafter in retired:
                self._retire(drafter)
            model.engine = None

    def _retire(self, drafter: Drafter) -> None:
        for lane in self._lanes:
            for answer in lane.answers:
                for sequence in answer.sequences:
                    if sequence.drafter is drafter:
                        sequence.drafter, sequence.draft = None, []     # its course goes on counting
        drafter.close()

    def _lane(self, model: LocalModel) -> Lane:
        for lane in self._lanes:
            if lane.model is model:
                return lane
        raise ModelNotLoaded(f"{model.info.name!r} is not attached to this engine.")

    def _visit(self) -> _Visit:
        return _Visit(self)

    # --------------------------------------------------------------------------------------- requests
    def submit(self, model: LocalModel, request: Request, cancel: Cancel, sink: Callable[[Event], None]) -> None:
        """Check and tokenize here, then queue. ``sink`` gets the events, in the loop's thread.

        Raises InvalidRequest and its like before anything is queued, QueueFull where too many wait.
        """
        lane = self._lane(model)
        answer = self._answer(lane, request, cancel, sink)
        with self._post:
            waiting = len(self._mail) + sum(one.admitted is None for lane in self._lanes for one in list(lane.answers))
            if waiting >= self.limits.queue:
                raise full(waiting, self.limits.queue, lane.queue.seconds(waiting))
            self._mail.append((lane, answer))
            self._post.notify_all()
        cancel.on_set(self.wake)

    def _answer(self, lane: Lane, request: Request, cancel: Cancel, sink: Callable[[Event], None]) -> Answer:
        if not lane.model.info.speaks:
            raise NotSupported("This draft reads the hidden states of the model it was made from, and says nothing by itself.",
                               field="model", remedy="Ask that model, with this draft.")
        vocab, sampling = lane.decoder.vocab, request.sampling
        prompt = intake.prompt_ids(request, lane.text, vocab)
        limit = intake.check(sampling, prompt, vocab, lane.decoder.context)
        drafter = None if request.draft is None else self._drafter(lane, request.draft)
        ends = frozenset(sampling.stop_ids) | (frozenset() if sampling.ignore_eos else vocab.eos_ids)
        seed = noise.fresh_seed() if sampling.seed is None else sampling.seed
        answer = Answer(request, cancel, sink, len(prompt), seed)
        constraint = None if request.schema is None else lane.grammars.constraint(request.schema)
        for index in range(sampling.n):
            answer.sequences.append(Sequence(
                answer, index, list(prompt), limit, noise.choice_seed(seed, index), ends,
                lane.text.stream(intake.continues(request)), drafter,
                self._course(lane, request.draft, len(prompt), limit, sampler.is_greedy(sampling)), answer.sequences[0] if index else None,
                constraint and constraint.twin()))
        return answer

    def embed(self, model: LocalModel, prompts: Listed[str | tuple[int, ...]], cancel: Cancel) -> EmbedJob:
        """Checks and tokenizes here, then queues; the job's `result` waits. Raises NotSupported, InvalidRequest, QueueFull."""
        lane = self._lane(model)
        if "embeddings" not in model.info.capabilities:
            raise NotSupported("This model's hidden states cannot be read, so it cannot embed.", field="model")
        ids = [intake.prompt_ids(Request(prompt), lane.text, lane.decoder.vocab) for prompt in prompts]
        for one in ids:
            intake.check_length(one, lane.decoder.context)
        job = EmbedJob(ids, cancel)
        with self._post:
            if len(lane.embeds.jobs) >= self.limits.queue:
                raise QueueFull(f"{len(lane.embeds.jobs)} texts are waiting already.", limit=self.limits.queue)
            if lane not in self._lanes:
                raise ModelNotLoaded("The model was unloaded before it embedded.")
            lane.embeds.add(job)
            self._post.notify_all()
        cancel.on_set(self.wake)
        return job

    # --------------------------------------------------------------------------------------- drafters
    def _drafter(self, lane: Lane, spec: DraftSpec) -> Drafter:
        """The drafter of that name for this model, made when first asked for. NotSupported, ModelNotLoaded, InvalidRequest."""
        speculative.check(spec, lane.model.info, {one.model.info.name: one.model.info for one in self._lanes})
        with self._post:
            key = (lane, spec.name)
            if key not in self._drafters:
                self._drafters[key] = self._make_drafter(lane, *speculative.parts(spec.name))
            return self._drafters[key]

    def _make_drafter(self, lane: Lane, lookup: bool, name: str | None) -> Drafter:
        if name is None:
            return LookupDrafter()
        draft = self._named(name)
        pairing = speculative.judge(lane.model.info, draft.model.info, lambda: self._differ(lane, draft))
        speculative.refuse(pairing)
        if pairing.how == "text":
            drafter = RetokenizingDrafter(draft.decoder, draft.text, lane.text, lane.decoder.vocab.size)
        else:
            reads = not draft.model.info.speaks
            drafter = ModelDrafter(draft.decoder, pairing.known, StatePlaces(draft.decoder) if reads else None)
        return FirstOf(LookupDrafter(), drafter) if lookup else drafter

    def _drafters_of(self, lane: Lane) -> dict[str, Drafter]:
        with self._post:
            return {name: drafter for (one, name), drafter in self._drafters.items() if one is lane}

    def difference(self, target: LocalModel, draft: LocalModel) -> speculative.Difference | None:
        """The first id that means something else to the two models; from any thread."""
        return self._differ(self._lane(target), self._lane(draft))

    @staticmethod
    def _differ(target: Lane, draft: Lane) -> speculative.Difference | None:
        return first_difference(target.text, draft.text, target.decoder.vocab, draft.decoder.vocab)

    def _named(self, name: str) -> Lane:
        found = next((one for one in self._lanes if one.model.info.name == name), None)
        if found is None:
            raise ModelNotLoaded(f"The draft model {name!r} is not loaded.", field="draft")
        return found

    def _course(self, lane: Lane, spec: DraftSpec | None, prompt: int, limit: int, greedy: bool) -> Course | None:
        if spec is None:
            return None
        _, name = speculative.parts(spec.name)
        sizes = [one.pass_bytes for one in (lane, *([self._named(name)] if name else []))]
        ratio = min(1.0, max(0.02, sizes[-1] / sizes[0])) if all(sizes) else 1.0
        return lane.controller.course(spec, prompt, limit - prompt, ratio, greedy)

    def _shed(self, decoder: Any) -> bool:
        """Give up what drafters hold in a decoder whose own sequences lack room."""
        return any([one.shed(decoder) for one in list(self._drafters.values())])

    # --------------------------------------------------------------------------------------- the loop
    def step(self) -> bool:
        """One forward pass of every model that has work. False: nothing to do."""
        while self._visitors:
            time.sleep(0.0005)
        with self._turn:
            self._collect()
            now = time.monotonic()
            for lane in self._lanes:
                lane.sweep(now)
            busy = [lane.step() for lane in self._lanes]
            if any(busy):
                self.steps += 1
                self.last_step = time.monotonic()
                return True
            return not self._mail and any([lane.idle(self._drafters_of(lane)) for lane in self._lanes])

    def _collect(self) -> None:
        """Hand the mailbox's requests to their models."""
        if not self._mail:
            return
        with self._post:
            mail, self._mail = self._mail, []
            for lane, answer in mail:
                lane.answers.append(answer)                 # counted as waiting without a gap
        for lane, answer in mail:
            lane.take(answer)
            if lane not in self._lanes:
                lane.fail(answer, ModelNotLoaded("The model was unloaded before it answered."))

    def run(self, stop: threading.Event) -> None:
        """Step while there is work, sleep while there is none, until ``stop`` is set (then `wake`)."""
        while not stop.is_set():
            if not self.step():
                with self._post:
                    if not self._mail and not stop.is_set():
                        self._post.wait(IDLE_SECONDS)

    def wake(self) -> None:
        """Make an idle loop look again."""
        with self._post:
            self._post.notify_all()

    def stats(self) -> dict[str, Any]:
        """Counters for monitor and tests; from any thread. Totals over the attached models, and each by name."""
        models = {lane.model.info.name: lane.stats() for lane in self._lanes}
        total = {name: sum(one[name] for one in models.values()) for name in SUMMED}
        errors: dict[str, int] = {}
        for one in models.values():
            for code, count in one["errors"].items():
                errors[code] = errors.get(code, 0) + count
        total["queue"] += len(self._mail)
        return {"steps": self.steps, "last_step": self.last_step, **total, "errors": errors, "models": models}


class _Visit:
    """The turn, for somebody who is not the loop: the loop waits for visitors, since an unfair lock would starve them."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine

    def __enter__(self) -> None:
        with self._engine._post:
            self._engine._visitors += 1
        self._engine._turn.acquire()

    def __exit__(self, *_: object) -> None:
        self._engine._turn.release()
        with self._engine._post:
            self._engine._visitors -= 1
