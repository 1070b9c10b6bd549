"""A draft from beginning to end: leave layers out, let the model speak, read what it said, train, round, measure, write.

Knows the order of things and how the minutes are shared out. Every finished piece is a part on disk, so that a stopped job goes
on there. Whoever calls it gives a folder that nobody sees yet, and moves it into place when this returns.
"""

from __future__ import annotations

import hashlib
import json
import math
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch

from backends.base import Cancel, InvalidRequest, LocalOptions, ModelDir, NotSupported, Progress, ProgressFn
from backends.compress import calibrate, draft_files, prune
from backends.compress.corpus import ANSWER, QUESTION, Continuations, Conversations, Passage, windows
from backends.compress.distill import Judge, Point, Schedule, Training
from backends.compress.job import clear, device_of, precision_of
from backends.compress.lessons import BATCH, Lessons, load_passages, save_passages
from backends.compress.origin import Origin, open_origin
from backends.compress.prune import Choice, Pruned
from backends.compress.skeleton import Skeleton
from backends.compress.stream import Stream
from backends.compress.student import Borrowed, Student
from backends.compress.writer import Parts
from backends.draft_recipe import DraftOptions
from backends.engine.assemble import assemble, trained_context
from backends.engine.room import UNKNOWN_CONTEXT

FORMAT = 5                              # of the parts: another number, and old parts are not gone on with
SAY, LISTEN, TRAIN = 0.26, 0.16, 0.53   # shares of the minutes; the rest: choosing, rounding, measuring
JUDGED = (4, 128)                       # windows and their tokens by which layers are chosen
TEXT_SHARE = {True: 0.1, False: 0.3}    # of what a draft learns from: plain text, for models with and without a chat template
LENGTH = ("minutes", "steps")           # options that decide only where it ends
ROUNDED_BY = 32                         # windows that calibrate the rounding, at most
HELD = (2, 16)                          # windows held out: at least, at most


def run(model: ModelDir, options: DraftOptions, folder: Path, progress: ProgressFn, cancel: Cancel, *,
        text: Path | None = None, versions: Mapping[str, str] = {}, plan_only: bool = False) -> dict[str, Any]:
    """Write the draft of ``model`` into ``folder`` and return its manifest; ``plan_only``: what leaving the layers out costs.

    Raises InvalidRequest, NotSupported, OutOfMemory, Cancelled, and what reading the model raises."""
    if options.threads:
        torch.set_num_threads(options.threads)
    progress(Progress("read", note=model.name))
    origin = open_origin(model)
    try:
        job = _Job(origin, options, folder, progress, cancel, text)
        choice = job.choose()
        if plan_only:
            return draft_files.words_of(choice)
        return job.write_pruned(choice, versions) if not options.trained else job.write_trained(choice, versions)
    finally:
        origin.source.close()


class _Job:
    def __init__(self, origin: Origin, options: DraftOptions, folder: Path, progress: ProgressFn, cancel: Cancel,
                 text: Path | None) -> None:
        self.origin, self.options, self.folder, self.progress, self.cancel = origin, options, folder, progress, cancel
        self.device = torch.device(device_of(options.device))
        self.precision = precision_of(options.precision, self.device)
        words, self.text_name = calibrate.read_text(text)
        self.text_digest = hashlib.sha256(words.encode()).hexdigest()
        self.ids = origin.text.encode(words)
        self.trained = trained_context(origin.source.config) or UNKNOWN_CONTEXT
        if options.trained and options.window > self.trained:
            raise InvalidRequest(f"This model was trained for {self.trained} tokens: a window cannot be longer.", field="window",
                                 window=options.window)
        if options.reads_states and (reason := draft_files.must_be_whole(origin.source.config)):
            raise InvalidRequest(f"A draft of this model can read tokens only: {reason}.", field="reads", reads=options.reads)
        began = time.monotonic()
        clear(folder)
        self.parts = Parts(folder, self._key(), began)

    # ---- which layers
    def choose(self) -> Choice:
        if self.parts.has("chosen"):
            facts = self.parts.facts("chosen")
            return Choice(tuple(facts["kept"]), facts["method"], facts["whole_loss"], facts["loss"],
                          tuple(tuple(item) for item in facts["order"]))
        skeleton = Skeleton(self.origin.source, self.device)
        skeleton.fill()
        self.prefix = skeleton.prefix
        chosen = calibrate.calibration(self.origin.text.decode(self.ids), self.text_name, lambda _: self.ids, JUDGED[0],
                                       min(JUDGED[1], self.trained))
        stream = Stream(skeleton, chosen.windows, self.precision, self.cancel)
        stream.begin()
        choice = prune.choose(stream, self.options.layers, self.options.chooses, self.progress)
        self.parts.save("chosen", {"kept": torch.tensor(choice.kept)}, asdict(choice))
        return choice

    def pruned(self, choice: Choice) -> Pruned:
        return Pruned(self.origin.source, choice.kept, Skeleton(self.origin.source, torch.device("meta")).prefix)

    def write_pruned(self, choice: Choice, versions: Mapping[str, str]) -> dict[str, Any]:
        self.progress(Progress("write", note=draft_files.sentence(choice)))
        draft_files.write_whole(self.folder, self.parts, self.origin, self.pruned(choice), {})
        return self._finish(choice, versions, {"format": "safetensors float16, layers left out", "bits": 16.0})

    # ---- a trained one
    def write_trained(self, choice: Choice, versions: Mapping[str, str]) -> dict[str, Any]:
        self.progress(Progress("prune", 1, 1, draft_files.sentence(choice)))
        passages = self._passages()
        lessons, held, head_ids = self._lessons(passages)
        options = self.options
        student = Student(self.pruned(choice), self.device, self.precision, options.reads_states)
        if options.reads_states:
            student.level(lessons.rows(0))
        schedule = Schedule(options.steps, 60 * TRAIN * options.minutes, options.batch, options.rate, options.seed)
        training = Training(student, lessons, held, head_ids, schedule, self.parts, self.progress, self.cancel)
        curve = training.run()
        whole = draft_files.must_be_whole(student.skeleton.source.config)
        facts = self._round(student, lessons, held, head_ids, whole)
        return self._finish(choice, versions, {
            **facts, "taught": self._taught(passages, lessons, held, training, curve, head_ids)})

    def _round(self, student: Student, lessons: Lessons, held: Lessons, head_ids: Sequence[int] | None, whole: str) -> dict[str, Any]:
        """Files of the draft, and what its guesses are worth as it is written."""
        before = Judge(student, held, head_ids).acceptance()
        trained = Borrowed(student.skeleton.source, student.values())
        if whole:
            draft_files.write_whole(self.folder, self.parts, self.origin, trained, {})
            return {"format": "safetensors float16", "bits": 16.0, "agreement": before[0], "overlap": before[1],
                    "notes": [f"Written as a whole model: {whole}."]}
        self.progress(Progress("round", note=f"{self.options.bits} bits"))
        sample, states = range(min(ROUNDED_BY, len(lessons.windows))), self.options.reads_states
        dense = draft_files.write_layers(self.folder, self.parts, self.origin, trained, head_ids, self.options,
                                         [lessons.windows[number].tokens for number in sample],
                                         [lessons.rows(number) for number in sample] if states else [],
                                         self.device, self.precision, self.cancel)
        student.set({**student.values(), **dense})
        judge = Judge(student, held, head_ids)
        after = judge.acceptance()
        return {"format": f"draft, {self.options.bits} bits", "bits": float(self.options.bits), "agreement": after[0],
                "overlap": after[1], "before_rounding": {"agreement": before[0], "overlap": before[1]},
                **({"second": judge.acceptance(chained=True)[0]} if states else {})}

    # ---- what the model says
    def _passages(self) -> list[Passage]:
        """Everything there is to learn from, in the order of its numbers."""
        found: list[list[Passage]] = []
        if not self.parts.has("said"):
            self._say()
        for number in range(self.parts.facts("said")["parts"]):
            found.append(load_passages(self.parts, f"said-{number:05d}"))
        said = [passage for part in found for passage in part]
        share = TEXT_SHARE[self.origin.text.template is not None]
        room = int(share / (1 - share) * sum(len(passage.tokens) for passage in said))
        return [Passage(tuple(self.ids[:room]), 0), *said]

    def _say(self) -> None:
        options, number, own, spent = self.options, 0, 0, 0.0
        teacher = self._teacher()
        try:
            speech = Conversations(self.origin.text) if self.origin.text.template is not None else \
                Continuations(self.origin.text, self.ids)
            while number == 0 or not self._said_enough(own, spent):
                name = f"said-{number:05d}"
                if not self.parts.has(name):
                    began = time.monotonic()
                    passages = list(speech.passages(teacher.decoder, range(number * BATCH, (number + 1) * BATCH), options.streams,
                                                    options.seed, self.cancel))
                    save_passages(self.parts, name, passages, time.monotonic() - began)
                spent += self.parts.facts(name)["seconds"]
                own += sum(len(passage.tokens) - passage.begin for passage in load_passages(self.parts, name))
                number += 1
                self.progress(Progress("say", own, options.tokens, f"{own:,} tokens"))
        finally:
            teacher.close()
        self.parts.save("said", {"own": torch.tensor(own)}, {"parts": number, "own": own, "seconds": spent})

    def _said_enough(self, own: int, spent: float) -> bool:
        if self.options.tokens:
            return own >= self.options.tokens
        return spent > 60 * SAY * self.options.minutes

    def _teacher(self) -> Any:
        """The model itself on the fast engine, from a source of its own: loading ends with closing it."""
        origin = open_origin(self.origin.model)
        context = min(max(self.options.window, 64 + 2 * QUESTION + ANSWER), self.trained)
        options = LocalOptions(context=context, streams=self.options.streams, threads=self.options.threads,
                               device=self.options.device)
        found = assemble(origin.model, "teacher", origin.label, origin.source, lambda: origin.text, options, lambda _: None, self.cancel)
        if not hasattr(found.decoder, "states"):
            found.close()
            raise NotSupported("This model runs one sequence at a time and gives no hidden states: no draft can be trained.",
                               path=found.info.path, remedy="Leave layers out without training (minutes 0).")
        return found

    # ---- lessons
    def _lessons(self, passages: Sequence[Passage]) -> tuple[Lessons, Lessons, list[int] | None]:
        cut = windows(passages, self.options.window)
        held = min(HELD[1], max(HELD[0], len(cut) // 20))
        lessons, judged = (Lessons(self.parts, part, some, self.options.reads_states)
                           for part, some in (("states", cut[:-held]), ("held", cut[-held:])))
        if not lessons.windows or not judged.windows:
            raise NotSupported("The model said too little to learn from.", windows=len(cut), remedy="Allow more minutes or tokens.")
        if not self.parts.has("listened"):
            self._listen(lessons, judged)
        lessons.windows = lessons.windows[:self.parts.facts("listened")["windows"]]
        return lessons, judged, self._head_ids(passages)

    def _listen(self, lessons: Lessons, judged: Lessons) -> None:
        """The teacher reads. Where the minutes decide, what it does not get through is no lesson; what is held out always is."""
        limit = 60 * LISTEN * self.options.minutes if not (self.options.tokens and self.options.steps) else math.inf
        teacher = self._teacher()
        try:
            for part, seconds in ((judged, math.inf), (lessons, limit)):
                part.read(teacher.decoder, lambda done, total: self.progress(Progress("listen", done, total)), self.cancel, seconds)
        finally:
            teacher.close()
        count = torch.tensor(len(lessons.windows))
        self.parts.save("listened", {"windows": count}, {"windows": int(count)})

    def _head_ids(self, passages: Sequence[Passage]) -> list[int] | None:
        """The most frequent ids, rising, among them every end and special token. None: all."""
        vocab, most = self.origin.text.vocab, self.options.head_ids
        if not most or most >= vocab.size:
            return None
        counts = Counter(self.ids)
        for passage in passages:
            counts.update(passage.tokens)
        first = sorted({id for id in (*vocab.eos_ids, *self.origin.text.special_ids) if 0 <= id < vocab.size})
        ranked = [id for id, _ in sorted(counts.items(), key=lambda item: (-item[1], item[0]))]
        filler = range(vocab.size)
        return sorted(list(dict.fromkeys([*first, *ranked, *filler]))[:max(most, len(first))])

    # ---- the manifest
    def _taught(self, passages: Sequence[Passage], lessons: Lessons, held: Lessons, training: Training, curve: Sequence[Point],
                head_ids: Sequence[int] | None) -> dict[str, Any]:
        said = self.parts.facts("said")
        return {"passages": len(passages) - 1, "own_tokens": said["own"], "windows": len(lessons.windows),
                "held_out_windows": len(held.windows), "steps": training.step, "tokens_trained": training.tokens,
                "seconds_speaking": round(said["seconds"], 1), "seconds_training": round(training.seconds, 1),
                "head_ids": None if head_ids is None else len(head_ids),
                "curve": [{key: None if value != value else round(value, 5) for key, value in asdict(point).items()}
                          for point in curve]}

    def _finish(self, choice: Choice, versions: Mapping[str, str], facts: Mapping[str, Any]) -> dict[str, Any]:
        self.cancel.raise_if_set("The job")
        manifest = draft_files.manifest(self.folder, self.origin, self.options, choice, versions, facts)
        manifest["calibration"] = {"source": self.text_name, "sha256": self.text_digest}
        manifest["seconds"], manifest["cpu_seconds"] = (round(seconds, 1) for seconds in self.parts.worked())
        self.parts.remove()
        return manifest

    def _key(self) -> str:
        """What the parts depend on. How long to train is not among it: a stopped job may go on with more minutes."""
        chosen = {key: value for key, value in self.options.public().items() if key not in LENGTH}
        facts = {"format": FORMAT, "weights": self.origin.digest(), "options": chosen, "text": self.text_digest,
                 "precision": self.precision, "torch": torch.__version__}
        return hashlib.sha256(json.dumps(facts, sort_keys=True).encode()).hexdigest()
