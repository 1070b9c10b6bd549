"""The protocol on scripted sides with a clock of their own: order, repeats, looks, cold and warm, and what it refuses."""

from __future__ import annotations

import random
from itertools import count

import pytest

from backends.base import Cancel, Event, Message, ModelInfo, Timing, Usage
from backends.errors import NotMeasurable
from gainz_ui.services.bench.asking import AT_MOST, Nonces
from gainz_ui.services.bench.calm import Weather
from gainz_ui.services.bench.configs import Config, differences, digest, resolved
from gainz_ui.services.bench.protocol import AGAIN, WARM_MOST, Design, Measurement, Outcome
from gainz_ui.services.bench.workloads import Workload
from gainz_ui.services.stats import ALIKE, FASTER, SLOWER, UNKNOWN

PROMPTS = tuple((Message("user", f"question {i}"),) for i in range(32))
WORK = Workload("test", PROMPTS, 8)


class Clock:
    """Moves only when a side works."""

    now = 0.0

    def __call__(self) -> float:
        return self.now


class Scripted:
    """Answers of ``tokens`` tokens, each after ``step()`` seconds. ``cached``: of every prompt. ``vocab``: of its tokenizer.
    ``template``: whether it has one for chats."""

    def __init__(self, clock, step, *, cached=0, path="fused", first=0.0, short=0, vocab="v", finish="length",
                 template=False) -> None:
        self.info = ModelInfo("scripted", "test", "test", path=path, vocab_fingerprint=vocab, chat_template=template)
        self.clock, self.step, self.cached, self.first, self.short = clock, step, cached, first, short
        self.asked, self.log, self.finish = [], None, finish

    def tokenize(self, prompt, *, special=True):
        text = prompt if isinstance(prompt, str) else "".join(f"<{turn.role}>{turn.content}" for turn in prompt)
        return tuple(map(ord, text))

    def generate(self, request, cancel):
        self.asked.append(request)
        if self.log is not None:
            self.log.append(self)
        pause, self.first = self.first, 0.0
        self.clock.now += 0.05 + pause
        wanted = request.sampling.max_tokens - self.short
        steps = []
        for index in range(wanted):
            steps.append(self.step())
            self.clock.now += steps[-1]
            if index == wanted - 1:
                spent = sum(steps[1:])
                yield Event(text="x", ids=(1,), finish=self.finish, usage=Usage(len(request.prompt), wanted, self.cached, passes=wanted),
                            timing=Timing(ttft_seconds=0.05, decode_tokens_per_second=(wanted - 1) / spent))
            else:
                yield Event(text="x", ids=(1,))


class Calm:
    def __init__(self, complaints=()) -> None:
        self.complaints, self.reads = iter(complaints), 0

    def read(self):
        self.reads += 1
        return Weather(1e10)

    def complaint(self, weather):
        return next(self.complaints, "")


def measured(a, b, *, gauge=None, **design) -> Outcome:
    clock = a.clock
    return Measurement(Design(WORK, **design), (a, b), gauge or Calm(), clock=clock).run()


def steady(seconds):
    return lambda: seconds


def noisy(mean, spread, seed):
    chance = random.Random(seed)
    return lambda: mean * (1 + spread * (chance.random() - 0.5))


def test_twice_the_speed_is_said_at_the_first_look():
    clock = Clock()
    outcome = measured(Scripted(clock, steady(0.02)), Scripted(clock, steady(0.01)))
    assert len(outcome.pairs) == 8 and outcome.verdict().word == FASTER
    assert outcome.estimate().ratio == pytest.approx(2.0) and outcome.level < 0.05
    assert outcome.estimate(lambda run: run.seen.rate).ratio == pytest.approx(2.0)
    assert measured(Scripted(clock, steady(0.01)), Scripted(clock, steady(0.02))).verdict().word == SLOWER


def test_a_against_itself():
    """BE-11: the same in both orders, and the first calls do not count."""
    clock = Clock()
    for first, second in ((0.5, 0.0), (0.0, 0.5)):
        outcome = measured(Scripted(clock, noisy(0.01, 0.02, 1), first=first), Scripted(clock, noisy(0.01, 0.02, 2), first=second))
        low, high = outcome.estimate().interval
        assert low < 1 < high and outcome.verdict().word == ALIKE
        assert {pair.first for pair in outcome.pairs} == {"a", "b"}


def test_the_warm_up_is_listed_apart():
    """BE-07: the first call takes 500 ms more; it is in no pair."""
    clock = Clock()
    a = Scripted(clock, steady(0.05), first=0.5)
    outcome = measured(a, Scripted(clock, steady(0.05)), pairs=5)
    assert all(run.seen.tpot == pytest.approx(0.05) for pair in outcome.pairs for run in (pair.a, pair.b))
    assert [len(outcome.warmups[arm]) for arm in "ab"] == [3, 3]
    assert len(a.asked) == 3 + 5 and a.asked[0].sampling.max_tokens == WORK.tokens


def test_a_warm_up_that_never_settles_ends():
    clock, grow = Clock(), count(1)
    outcome = measured(Scripted(clock, lambda: 0.01 * next(grow)), Scripted(clock, steady(0.01)), pairs=6)
    assert len(outcome.warmups["a"]) == WARM_MOST


def test_pairs_are_back_to_back_and_in_random_order():
    clock, log = Clock(), []
    a, b = Scripted(clock, steady(0.01)), Scripted(clock, steady(0.011))
    a.log = b.log = log
    outcome = measured(a, b, pairs=32)
    made = [("a" if one is a else "b") for one in log[6:]]
    assert [set(made[i:i + 2]) for i in range(0, 64, 2)] == [{"a", "b"}] * 32
    assert [pair.first for pair in outcome.pairs] == made[::2] and 6 <= made[::2].count("a") <= 26
    assert [pair.prompt for pair in outcome.pairs] == list(range(32))
    again = measured(Scripted(clock, steady(0.01)), Scripted(clock, steady(0.011)), pairs=32)
    assert [pair.first for pair in again.pairs] == [pair.first for pair in outcome.pairs]


def test_every_cold_prompt_begins_anew_and_is_as_long():
    clock = Clock()
    a, b = Scripted(clock, steady(0.01)), Scripted(clock, steady(0.01))
    measured(a, b, pairs=6)
    starts = [request.prompt[:8] for side in (a, b) for request in side.asked]
    assert len(set(starts)) == len(starts) and all(chr(sign).isdigit() for start in starts for sign in start)
    pairs = list(zip(a.asked[3:], b.asked[3:]))
    assert all(one.prompt[8:] == other.prompt[8:] and one.sampling == other.sampling for one, other in pairs)


def test_a_first_number_of_a_rare_length_binds_no_other():
    lengths = iter([7, *[8] * 200])
    side = Scripted(Clock(), steady(0.01))
    side.tokenize = lambda prompt, *, special=True: (1,) * next(lengths)
    nonces = Nonces(random.Random(1))
    assert [len(nonces.ids(side)) for _ in range(20)] == [8] * 20


def test_a_tokenizer_without_a_common_length_is_refused():
    lengths = count(1)
    side = Scripted(Clock(), steady(0.01))
    side.tokenize = lambda prompt, *, special=True: (1,) * next(lengths)
    with pytest.raises(NotMeasurable, match="different lengths"):
        Nonces(random.Random(1)).ids(side)


def test_a_cached_token_ends_a_cold_measurement_and_not_a_warm_one():
    """BE-05."""
    clock = Clock()
    with pytest.raises(NotMeasurable, match="cache"):
        measured(Scripted(clock, steady(0.01)), Scripted(clock, steady(0.01), cached=16))
    warm = measured(Scripted(clock, steady(0.01)), Scripted(clock, steady(0.01), cached=16), mode="warm", pairs=6)
    assert len(warm.pairs) == 6 and warm.pairs[0].b.cached == 16


def test_too_few_tokens_are_no_measurement():
    clock = Clock()
    with pytest.raises(NotMeasurable, match="7 tokens where 8"):
        measured(Scripted(clock, steady(0.01)), Scripted(clock, steady(0.01), short=1))
    with pytest.raises(NotMeasurable, match="broken off"):
        measured(Scripted(clock, steady(0.01)), Scripted(clock, steady(0.01), short=1, finish="cancelled"))


def test_beside_a_remote_side_both_read_the_same_bare_text():
    """Its template would come before the nonce. Warm: the turns, and the local side's own template."""
    clock = Clock()
    remote, local = Scripted(clock, steady(0.01), path="remote"), Scripted(clock, steady(0.01), template=True)
    measured(local, remote, pairs=6)
    words = [request.prompt for request in remote.asked]
    assert len(set(words)) == len(words) and all(word[:8].isdigit() and word[8:].startswith(" question") for word in words)
    assert all("".join(map(chr, request.prompt[8:])).startswith("question") for request in local.asked)
    measured(local, remote, pairs=6, mode="warm")
    assert remote.asked[-1].prompt == PROMPTS[5] and "".join(map(chr, local.asked[-1].prompt)) == "<user>question 5"


@pytest.mark.parametrize(("cached", "ends"), [(AT_MOST, False), (AT_MOST + 1, True)])
def test_a_server_that_remembers_token_by_token_may_find_the_beginning_again(cached, ends):
    clock = Clock()
    sides = Scripted(clock, steady(0.01)), Scripted(clock, steady(0.01), path="remote", cached=cached)
    if ends:
        with pytest.raises(NotMeasurable, match="Side B had 10 tokens"):
            measured(*sides, pairs=6)
    else:
        assert len(measured(*sides, pairs=6).pairs) == 6


def test_noise_is_measured_again_blindly_and_counted():
    clock = Clock()
    gauge = Calm(["busy", "", "", "", "", "swap"])                      # two looks a try: the first pair once more, the third too
    outcome = measured(Scripted(clock, steady(0.01)), Scripted(clock, steady(0.01)), gauge=gauge, pairs=6)
    assert outcome.repeated == 2 and len(outcome.pairs) == 6 and not any(pair.noise for pair in outcome.pairs)


def test_endless_noise_is_kept_and_said():
    clock = Clock()
    outcome = measured(Scripted(clock, steady(0.01)), Scripted(clock, steady(0.01)), gauge=Calm(["busy"] * 999), pairs=6)
    assert outcome.repeated == AGAIN and all(pair.noise == "busy" for pair in outcome.pairs)


def test_after_a_calm_pair_noise_is_worth_repeating_again():
    clock = Clock()
    gauge = Calm(["busy"] * (AGAIN + 1) + ["", ""] + ["busy"])           # pair 1 in all its tries; pair 2 is calm; pair 3 once
    outcome = measured(Scripted(clock, steady(0.01)), Scripted(clock, steady(0.01)), gauge=gauge, pairs=6)
    assert outcome.repeated == AGAIN + 1 and [bool(pair.noise) for pair in outcome.pairs] == [True] + [False] * 5


def test_cancel_keeps_what_is_done():
    clock, cancel = Clock(), Cancel()
    sides = Scripted(clock, steady(0.01)), Scripted(clock, steady(0.02))
    outcome = Measurement(Design(WORK, pairs=32), sides, Calm(), cancel=cancel, clock=clock,
                          changed=lambda so_far: cancel.set() if len(so_far.pairs) == 7 else None).run()
    assert outcome.cancelled and len(outcome.pairs) == 7 and outcome.verdict().word == SLOWER


def test_few_prompts_are_few_units():
    clock = Clock()
    work = Workload("mine", PROMPTS[:4], 8)
    outcome = Measurement(Design(work, pairs=16), (Scripted(clock, steady(0.02)), Scripted(clock, steady(0.01))), Calm(),
                          clock=clock).run()
    found = outcome.estimate()
    assert len(outcome.pairs) == 16 and found.units == 4 and found.interval is None and outcome.verdict().word == UNKNOWN


# ---------------------------------------------------------------------------------------------- configurations
def test_sides_are_read_from_words():
    made = Config.parse("starter,kv_type=int8,threads=2,prefix_cache=false,draft=lookup:4")
    assert (made.model, made.options) == ("starter", {"kv_type": "int8", "threads": 2, "prefix_cache": False})
    assert (made.draft.name, made.draft.length) == ("lookup", 4)
    assert Config.parse("starter,draft=off").draft is None and Config.parse(str(made)) == made
    for wrong in ("", ",a=1", "starter,threads", "starter,a=1,a=2", "starter,draft=x:y"):
        with pytest.raises(Exception, match="key=value|name of a model|LENGTH"):
            Config.parse(wrong)


def test_one_changed_key_is_one_difference():
    info = ModelInfo("m", "gguf", "GGUF", kv_type="float16", options=(("kv_type", "auto"), ("prefix_cache", True)))
    a = resolved(Config("m"), info)
    b = resolved(Config("m"), ModelInfo("m", "gguf", "GGUF", kv_type="int8", options=(("kv_type", "int8"), ("prefix_cache", True))))
    assert differences(a, b) == {"kv_type": ("float16", "int8")} and digest(a) != digest(b) and digest(a) == digest(dict(a))
    other = resolved(Config("n"), ModelInfo("n", "gptq", "GPTQ", bits=4.0, kv_type="float16", options=(("prefix_cache", True),)))
    assert set(differences(a, other)) == {"model"}
    faster = {**other, "kernels": "other", "threads": 4}
    assert set(differences(a, faster)) == {"model"} and set(differences(a, faster, ["threads"])) == {"model", "threads"}
    drafted = resolved(Config("m", {}, Config.parse("m,draft=lookup:4").draft), info)
    assert set(differences(a, drafted)) == {"draft"}
