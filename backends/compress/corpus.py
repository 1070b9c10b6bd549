"""What a draft learns from: its teacher's own answers and continuations, and windows of text.

A chat model makes up the questions as well: it is given the template up to where a user's words would stand, and writes them
(Xu et al. 2024, "Magpie"). What it would ask by itself is long and half of the answer; people ask short questions. So most
begin with a few words as people's do, and end with their sentence. Every conversation has a number, which decides its seed and temperature, so that the same numbers
give the same texts however many run at once. Knows tokens and one decoder; nothing of training.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import chain, islice

from backends.base import Cancel, Decoder, Message, Sampling, Slot, Step
from backends.engine import sampler
from backends.engine.noise import choice_seed
from backends.engine.text import TextCodec

MARK = "words-of-the-user-7f3a"         # stands for the user's words while the template is taken apart
TEMPERATURES = (0.0, 0.7)               # of answers, in turn: greedy, as people measure and many serve, and what a chat uses
ASK = Sampling(temperature=0.8)         # hotter, and a small model asks what nobody would
QUESTION, ANSWER, OPENING = 64, 256, 24  # most tokens of a question, of an answer; tokens of text that a continuation starts from
OPENERS = tuple(line.strip() for line in """What is; What are; What does; What can I do; What makes; What happens when; Why is; Why do; Why does; How do I;
    How can I; How does; How do; How many; How long does; Explain; Explain how; Explain why; Explain the; Describe; Describe a; Describe the;
    Write a story about; Write a poem about; Write a letter; Write an email; Write a paragraph about; Write a function; Write a Python;
    Write a speech; Write a dialogue; Write about; Give me; Give me some; Give an example of; Give advice on; List; List some; Name; Name three;
    Tell me; Tell me about; Tell me a; Summarize; Compare; Who was; Who is; When did; Where is; Where can I; Can you explain; Can you help me;
    Can I; Could you; Help me; I want to; I need; I have; Plan a; Suggest; Make a; Create a; Rewrite; Correct; Define; Is it; Should I; Which;
    Is there; Do; Does; Imagine; Please""".split(";"))
SENTENCE = re.compile(r"[?.!](?=\s|$)|\n")          # ends a question that was begun so
BY_ITSELF = (0, 3)                      # numbers of eight conversations whose question the model begins itself
LONGEST_LOOP = 32                        # tokens of a phrase that, said three times in a row, ends an answer


@dataclass(frozen=True)
class Prompt:
    """One text to be continued. ``number`` decides the noise; ``end(ids)``: is the continuation over?"""

    number: int
    tokens: tuple[int, ...]
    most: int
    sampling: Sampling
    end: Callable[[list[int]], bool]


@dataclass(frozen=True)
class Passage:
    """``tokens``; those from ``begin`` on are the teacher's own (0: all are to be learned from)."""

    tokens: tuple[int, ...]
    begin: int


@dataclass(eq=False)
class _Running:
    prompt: Prompt
    slot: Slot
    tokens: list[int] = field(default_factory=list)


def continued(decoder: Decoder, prompts: Iterable[Prompt], streams: int, seed: int, cancel: Cancel) -> Iterator[tuple[Prompt, list[int]]]:
    """(prompt, new tokens) of each, in the order in which they end; what fills the context ends there. ``streams`` run at
    once; prompts are shorter than the context."""
    waiting, running = iter(prompts), []
    try:
        while True:
            running += [_Running(prompt, decoder.open(prompt.tokens), list(prompt.tokens))
                        for prompt in islice(waiting, streams - len(running))]
            if not running:
                return
            cancel.raise_if_set("The job")
            _step(decoder, running, seed)
            for one in [one for one in running if _over(one, decoder.context)]:
                running.remove(one)
                decoder.release(one.slot)
                yield one.prompt, one.tokens[len(one.prompt.tokens):]
    finally:
        for one in running:
            decoder.release(one.slot)


def _step(decoder: Decoder, running: Sequence[_Running], seed: int) -> None:
    steps = [Step(one.slot, one.tokens[one.slot.length:], 1) for one in running]
    for step in steps:
        if not decoder.reserve(step.slot, len(step.tokens)):
            raise RuntimeError("the decoder was made with too little room for its streams")
    for one, row in zip(running, decoder.extend(steps)):
        token = sampler.choose(sampler.rows(row)[0], one.prompt.sampling, choice_seed(seed, one.prompt.number + 1), len(one.tokens))
        one.tokens.append(token)


def _over(one: _Running, context: int) -> bool:
    said = one.tokens[len(one.prompt.tokens):]
    return len(said) >= one.prompt.most or len(one.tokens) >= context or one.prompt.end(said) or looping(said)


def looping(said: Sequence[int]) -> bool:
    """Does it end with the same phrase three times? Looked at every few tokens, since it costs more than it tells."""
    if len(said) % 8:
        return False
    return any(said[-span:] == said[-2 * span:-span] == said[-3 * span:-2 * span] for span in range(4, LONGEST_LOOP + 1))


# ---------------------------------------------------------------------------------------------- conversations
class Conversations:
    """Questions and answers of a chat model, all its own. ``between``: what the template writes after the user's words."""

    def __init__(self, text: TextCodec) -> None:
        self.text = text
        before, _, self.between = text.chat_text([Message("user", MARK)]).partition(MARK)
        self.opening = tuple(text.encode(before, special=False))
        lines = self.between.split("\n")
        self.closing = next((line.strip() for line in lines if line.strip()), "")

    def passages(self, decoder: Decoder, numbers: Iterable[int], streams: int, seed: int, cancel: Cancel) -> Iterator[Passage]:
        """One passage for every number whose question came out as one."""
        openings = (self._question(number) for number in numbers)
        questions = dict(_numbered(continued(decoder, openings, streams, seed, cancel)))
        prompts = []
        for number, said in sorted(questions.items()):
            words = self._words(number // 2, said)
            asked = tuple(self.text.chat([Message("user", words)])) if words else ()
            if 0 < len(asked) < decoder.context:
                sampling = Sampling(temperature=TEMPERATURES[number // 2 % len(TEMPERATURES)])
                prompts.append(Prompt(number + 1, asked, ANSWER, sampling, self._ended))
        for prompt, said in sorted(continued(decoder, prompts, streams, seed, cancel), key=lambda item: item[0].number):
            yield Passage((*prompt.tokens, *said), len(prompt.tokens))

    @staticmethod
    def _opener(number: int) -> str:
        return "" if number % 8 in BY_ITSELF else OPENERS[number * 7919 % len(OPENERS)]

    def _question(self, number: int) -> Prompt:
        opener = self._opener(number)
        begun = tuple(self.text.encode(opener, special=False)) if opener else ()
        return Prompt(2 * number, self.opening + begun, QUESTION, ASK, self._sentence if opener else self._asked)

    def _sentence(self, said: list[int]) -> bool:
        return self._asked(said) or len(said) % 4 == 0 and SENTENCE.search(self.text.decode(said)) is not None

    def _asked(self, said: list[int]) -> bool:
        """At the end of the turn, as the model or as the template marks it."""
        return self._ended(said) or bool(self.closing) and len(said) % 4 == 0 and self.closing in self.text.decode(said)

    def _words(self, number: int, said: list[int]) -> str:
        opener = self._opener(number)
        words = self._continuing(said) if opener else self.text.decode(said)
        words = words.partition(self.closing)[0] if self.closing else words
        end = SENTENCE.search(words) if opener else None
        words = words if end is None else words[:end.end()]
        return (opener + words).strip() if words.strip() else ""

    def _continuing(self, said: list[int]) -> str:
        """As it stands behind other words: a text of its own might begin without its space."""
        stream = self.text.stream(True)
        return "".join([*map(stream.push, said), stream.flush()])

    def _ended(self, said: list[int]) -> bool:
        return said[-1] in self.text.eos_ids


class Continuations:
    """Beginnings of the text, gone on with: for models without a chat template."""

    def __init__(self, text: TextCodec, ids: Sequence[int]) -> None:
        self.text, self.ids = text, ids

    def passages(self, decoder: Decoder, numbers: Iterable[int], streams: int, seed: int, cancel: Cancel) -> Iterator[Passage]:
        places = {number: number * 7919 % max(1, len(self.ids) - OPENING) for number in numbers}
        prompts = [Prompt(number, tuple(self.ids[at:at + OPENING]), ANSWER,
                          Sampling(temperature=TEMPERATURES[number % len(TEMPERATURES)]),
                          lambda said: said[-1] in self.text.eos_ids) for number, at in places.items()]
        for prompt, said in sorted(continued(decoder, prompts, streams, seed, cancel), key=lambda item: item[0].number):
            yield Passage((*prompt.tokens, *said), len(prompt.tokens))


def _numbered(found: Iterable[tuple[Prompt, list[int]]]) -> Iterator[tuple[int, list[int]]]:
    return ((prompt.number, said) for prompt, said in found)


# ---------------------------------------------------------------------------------------------- windows
@dataclass(frozen=True)
class Window:
    """``tokens`` [T]; ``own`` [T]: is it the teacher's own word, to be learned?"""

    tokens: tuple[int, ...]
    own: tuple[bool, ...]

    @property
    def places(self) -> list[int]:
        """Rows whose next token is to be learned."""
        return [place for place in range(len(self.tokens) - 1) if self.own[place + 1]]


def windows(passages: Iterable[Passage], length: int) -> list[Window]:
    """The passages one after another, cut into windows of ``length``; what is left over at the end is dropped."""
    tokens = list(chain.from_iterable(passage.tokens for passage in passages))
    own = list(chain.from_iterable([place >= passage.begin for place in range(len(passage.tokens))] for passage in passages))
    return [Window(tuple(tokens[at:at + length]), tuple(own[at:at + length]))
            for at in range(0, len(tokens) - length + 1, length)]
