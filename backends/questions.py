"""The bundled task: some two hundred short questions with known answers (arithmetic, facts, code, Chinese), and two models
on it.

A model's choice is the answer to which it gives the highest log-likelihood per byte: nothing is generated, so nothing has
to be read out of a text. Knows decoders and token ids; what a difference means is for the services. Light until it scores.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from functools import cache
from pathlib import Path
from typing import Any

from backends.base import BrokenFile, Cancel, Decoder, Progress, ProgressFn, Step, StepFailed

BUNDLED = Path(__file__).parent / "data" / "questions.json"
KINDS = ("arithmetic", "facts", "code", "chinese")
PROMPT = {"chinese": "问题：{question}\n答案："}
PLAIN = "Question: {question}\nAnswer: "
Z = 1.959964                            # of the normal distribution, 95 %
Encode = Callable[[str], Sequence[int]]


@dataclass(frozen=True)
class Question:
    """``answer``: index of the right choice."""

    kind: str
    question: str
    choices: tuple[str, ...]
    answer: int

    @property
    def prompt(self) -> str:
        return PROMPT.get(self.kind, PLAIN).format(question=self.question)


@dataclass(frozen=True)
class Paired:
    """Two models on the same questions; shares with 95 % intervals. ``lost``: right by the reference alone, ``won``: by the
    model alone, ``flips``: both together as a share. ``difference``: of the model's accuracy to the reference's, paired."""

    questions: int
    accuracy: float
    accuracy_low: float
    accuracy_high: float
    reference_accuracy: float
    lost: int
    won: int
    flips: float
    flips_low: float
    flips_high: float
    difference: float
    difference_low: float
    difference_high: float
    kinds: dict[str, dict[str, float]]

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)


@cache
def bundled() -> tuple[Question, ...]:
    return read(BUNDLED)


def read(path: Path) -> tuple[Question, ...]:
    """BrokenFile where it is no such file, or an answer is none of the choices."""
    try:
        items = json.loads(path.read_text(encoding="utf-8"))["questions"]
        found = tuple(Question(item["kind"], item["question"], tuple(item["choices"]), item["answer"]) for item in items)
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise BrokenFile(f"{path.name} holds no questions.", file=path.name, reason=error) from error
    if any(not 0 <= item.answer < len(item.choices) for item in found):
        raise BrokenFile(f"{path.name} has an answer that is none of the choices.", file=path.name)
    return found


# ---------------------------------------------------------------------------------------------- scoring
def choose(decoder: Decoder, encode: Encode, question: Question) -> int:
    """The index of the choice that the model finds most likely, per byte of its text."""
    texts = [tuple(encode(question.prompt + choice)) for choice in question.choices]
    shared = min(_common(texts), min(map(len, texts)) - 1)
    if shared < 1:
        raise StepFailed("A question has no token in common with all its answers.", question=question.question)
    slot = decoder.open(texts[0], reuse=False)
    try:
        if not decoder.reserve(slot, max(map(len, texts))):
            raise StepFailed("There is no room in the cache for one question.", tokens=max(map(len, texts)))
        first = decoder.extend([Step(slot, texts[0][:shared], 1)])[0]
        scores = []
        for text, choice in zip(texts, question.choices):
            scores.append(_likelihood(decoder, slot, first, text[shared:]) / len(choice.encode()))
            decoder.truncate(slot, shared)
    finally:
        decoder.release(slot)
    return max(range(len(scores)), key=scores.__getitem__)


def _common(texts: Sequence[Sequence[int]]) -> int:
    return next((i for i, ids in enumerate(zip(*texts)) if len(set(ids)) > 1), min(map(len, texts)))


def _likelihood(decoder: Decoder, slot: Any, first: Any, ids: Sequence[int]) -> float:
    """ln P(ids | what the slot holds); ``first``: the logits from which their first is drawn."""
    total = float(first.float().log_softmax(-1)[-1, ids[0]])
    if len(ids) > 1:
        if not decoder.reserve(slot, len(ids)):
            raise StepFailed("There is no room in the cache for one answer.", tokens=len(ids))
        rows = decoder.extend([Step(slot, ids[:-1], len(ids) - 1)])[0].float().log_softmax(-1)
        total += sum(float(rows[i, token]) for i, token in enumerate(ids[1:]))
    return total


def compare(reference: Decoder, model: Decoder, encode: Encode, questions: Sequence[Question] | None = None,
            progress: ProgressFn = lambda _: None, cancel: Cancel | None = None) -> Paired:
    """Both models on every question. Their vocabularies must be the same, since ``encode`` serves both."""
    asked, theirs, ours = bundled() if questions is None else questions, [], []
    for number, question in enumerate(asked):
        if cancel is not None:
            cancel.raise_if_set("The comparison")
        progress(Progress("questions", number, len(asked)))
        theirs.append(choose(reference, encode, question) == question.answer)
        ours.append(choose(model, encode, question) == question.answer)
    return paired(asked, theirs, ours)


# ---------------------------------------------------------------------------------------------- counting
def paired(questions: Sequence[Question], reference: Sequence[bool], model: Sequence[bool]) -> Paired:
    """What two rows of right and wrong say, question by question."""
    n = len(questions)
    lost = sum(a and not b for a, b in zip(reference, model))
    won = sum(b and not a for a, b in zip(reference, model))
    flips, gap = (lost + won) / n, (won - lost) / n
    spread = Z * math.sqrt(max(flips - gap * gap, 0.0) / n)
    kinds = {kind: _share(questions, reference, model, kind) for kind in KINDS if any(q.kind == kind for q in questions)}
    return Paired(n, sum(model) / n, *wilson(sum(model), n), sum(reference) / n, lost, won, flips, *wilson(lost + won, n),
                  gap, gap - spread, gap + spread, kinds)


def _share(questions: Sequence[Question], reference: Sequence[bool], model: Sequence[bool], kind: str) -> dict[str, float]:
    rows = [(a, b) for question, a, b in zip(questions, reference, model) if question.kind == kind]
    return {"questions": len(rows), "accuracy": sum(b for _, b in rows) / len(rows),
            "reference_accuracy": sum(a for a, _ in rows) / len(rows), "flips": sum(a != b for a, b in rows) / len(rows)}


def wilson(count: int, n: int) -> tuple[float, float]:
    """95 % interval of a share of n independent cases; unlike the plain one it is honest at 0 and at n."""
    share, z2 = count / n, Z * Z
    middle, half = share + z2 / (2 * n), Z * math.sqrt(share * (1 - share) / n + z2 / (4 * n * n))
    low, high = (middle - half) / (1 + z2 / n), (middle + half) / (1 + z2 / n)
    return (0.0 if count == 0 else low), (1.0 if count == n else high)
