"""The controller on a simulated clock: it finds the best length, and no text and no draft makes an answer 3 % slower."""

from __future__ import annotations

import random
from collections.abc import Callable

import pytest

from backends.base import Draft, DraftJob, DraftSpec, Sampling
from backends.engine.controller import Controller
from backends.engine.costs import Acceptance, DraftCosts, PassCosts
from backends.engine.course import HORIZON, LENGTHS

FLAT, REAL, STEEP, LINEAR = (lambda r: 1 + .02 * (r - 1)), (lambda r: 1 + .16 * (r - 1)), (lambda r: 1 + .5 * (r - 1)), float
PLAIN = 0.01                # seconds of a plain pass


class World:
    """A verifier whose pass of r rows takes cost(r) plain passes, and a drafter whose ids take ``each`` of one."""

    def __init__(self, cost: Callable[[int], float], each: float, noise: float = 0.0, seed: int = 0, spikes: float = .01) -> None:
        self.cost, self.each, self.noise, self.spikes, self.now = cost, each, noise, spikes, 0.0
        self.rng = random.Random(seed)
        self.controller = Controller(lambda: self.now)

    def spend(self, plain: float) -> float:
        seconds = PLAIN * plain * (1 + self.noise * self.rng.random())
        if self.noise and self.rng.random() < self.spikes:
            seconds *= 5                                    # somebody else had the processor
        self.now += seconds
        return seconds

    def answer(self, accepts: Callable[[int], float], tokens: int = HORIZON, source: str = "model", prompt: int = 50,
               found: float = 1.0, length: int | None = None, says: Callable[[int], float] | None = None):
        """Seconds that one answer took; ``accepts``: probability that the id at a place of the answer is right; ``says``: what the
        draft believes it is (None: the same)."""
        self.controller.prompted(prompt, self.spend(prompt / 8))
        began, text, end = self.now, prompt, prompt + tokens
        course = self.controller.course(DraftSpec("d", length), prompt, tokens, self.each)
        while text < end:
            drafted, order = 0, course.order(text, end - text - 1, 1)
            if order and order["k"] > 0 and self.rng.random() < found:
                job = DraftJob((), sampling=Sampling(), seed=0, **order)
                made, drafted = self.draft(job, source, lambda ahead, at=text - prompt: (says or accepts)(at + ahead))
                draft = Draft([0] * drafted, source)
                draft.dropped = made - drafted
                seconds = self.spend(made * self.each + course.read * self.each / 8) if made else 0.0
                self.controller.drafted([course], [draft], seconds)
            right = 0
            while right < drafted and self.rng.random() < accepts(text - prompt):
                right += 1
            course.verified(source, drafted, right, right + 1)
            self.controller.passed([course], 1, 1 + drafted, 1 + right, self.spend(self.cost(1 + drafted)))
            text += 1 + right
        return self.now - began, course

    @staticmethod
    def draft(job: DraftJob, source: str, says: Callable[[int], float]) -> tuple[int, int]:
        """Ids made, and of them those to be verified."""
        most, sure = job.most(source), []
        if source != "model" or job.judge is None:
            return most, most
        while len(sure) < most and (not sure or job.judge.more(sure)):
            sure.append(says(len(sure)))
        return len(sure), job.judge.worth(sure) if sure else 0


def ideal(cost, each: float, accept: float) -> float:
    """Seconds of a token at the best constant length, on average."""
    return min(PLAIN * (cost(1 + k) + k * each) / sum(accept ** i for i in range(k + 1)) for k in (0, *LENGTHS))


@pytest.mark.parametrize("cost", [FLAT, REAL, STEEP, LINEAR])
@pytest.mark.parametrize("each", [0.0, .1, .5, 1.0])
@pytest.mark.parametrize("accept", [0.0, .3, .7, 1.0])
def test_never_three_percent_slower_and_near_the_best_where_it_pays(cost, each, accept):
    source = "model" if each else "lookup 2"
    world = World(cost, each)
    for turn in range(6):
        took, _ = world.answer(lambda place: accept, source=source)
        assert took <= 1.03 * HORIZON * PLAIN, turn
    best = ideal(cost, each, accept)
    took = sum(world.answer(lambda place: accept, source=source)[0] for _ in range(6)) / 6
    assert took <= max(1.12 * best, PLAIN) * HORIZON * 1.03


@pytest.mark.parametrize("each", [0.0, .1, .5])
def test_a_text_that_turns_against_the_draft_is_found_out(each):
    """Good for as long as it takes to be trusted, then always wrong; and the other way round; and in turn."""
    for seed in range(4):
        for accepts in (lambda place: float(place < 60), lambda place: float(place % 32 < 16), lambda place: float(place % 9 < 4)):
            world = World(REAL, each, seed=seed)
            for _ in range(4):
                assert world.answer(accepts, source="model" if each else "lookup 9+")[0] <= 1.03 * HORIZON * PLAIN
    late = World(FLAT, .05)
    took, course = late.answer(lambda place: float(place > 500), tokens=1500)
    assert took < .6 * 1500 * PLAIN, "it was tried again, and found to pay by then"


def test_noise_of_the_clock_does_not_lead_it_astray():
    for seed in range(4):
        bad, good = World(REAL, .1, noise=.1, seed=seed), World(REAL, .05, noise=.1, seed=seed)
        plain = World(REAL, .1, noise=.1, seed=seed + 100)
        budget = sum(plain.spend(1) for _ in range(4 * HORIZON))
        assert sum(bad.answer(lambda place: .2)[0] for _ in range(4)) <= 1.05 * budget
        assert sum(good.answer(lambda place: .85)[0] for _ in range(4)) <= .75 * budget


@pytest.mark.parametrize("accept", [0.0, .15, .3, .45])
def test_a_machine_on_which_rows_get_dear_and_cheap_again_costs_hardly_more(accept):
    """What a row more costs changes from answer to answer, as beside other programs: by the old cost a draft would pay that does not."""
    ratios = []
    for seed in range(6):
        moods, world = random.Random(seed + 999), World(FLAT, .1, noise=.1, seed=seed, spikes=0)
        for _ in range(20):
            world.cost = lambda rows, slope=moods.choice((.05, .05, .25, .4)): 1 + slope * (rows - 1)
            ratios.append(HORIZON * PLAIN * 1.05 / world.answer(lambda place: accept)[0])
    assert min(ratios) > .95 and sum(ratio < .97 for ratio in ratios) <= 5
    assert sum(ratios) / len(ratios) > (1.03 if accept > .4 else .985)


@pytest.mark.parametrize("prompt", [10, 400, 8000])
def test_reading_a_long_prompt_is_within_the_budget(prompt):
    """A draft that is always wrong, and that would have to read thousands of tokens first."""
    world = World(REAL, .1)
    for _ in range(3):
        took, course = world.answer(lambda place: 0.0, prompt=prompt)
        assert took <= 1.03 * HORIZON * PLAIN + .03 * prompt / 8 * PLAIN


def test_what_was_left_out_of_a_prompt_is_read_when_the_gains_allow_it():
    """A draft that is right, and a prompt that the first budget does not let it read: once, as a whole, later."""
    world = World(REAL, .1)
    world.answer(lambda place: 1.0)
    course, read = world.controller.course(DraftSpec("d"), 300, HORIZON, .1), []
    for text in range(300, 300 + 3 * 40, 3):
        order = course.order(text, 50, 1)
        drafted = world.draft(DraftJob((), sampling=Sampling(), seed=0, **order), "model", lambda ahead: 1.0)[0] if order else 0
        read.append(course.read)
        world.controller.drafted([course], [Draft([0] * drafted, "model")], world.spend(.1 * drafted + course.read * .1 / 8))
        course.verified("model", drafted, drafted, drafted + 1)
        world.controller.passed([course], 1, 1 + drafted, 1 + drafted, world.spend(REAL(1 + drafted)))
    whole = [tokens for tokens in read if tokens >= 300]
    assert 0 < max(read[:read.index(whole[0])]) < 300 and len(whole) == 1


def test_a_fixed_length_is_kept_whatever_it_costs():
    """SP-11: acceptance .3, a draft of half the target's cost, four ids: 0.48 times the speed, and said so."""
    world = World(lambda r: 1.0, .5)
    world.answer(lambda place: 0.0, tokens=8)               # what a plain pass costs is known
    took, course = world.answer(lambda place: .3, tokens=20_000, length=4)
    expected = sum(.3 ** i for i in range(5)) / (1 + 4 * .5)
    assert expected == pytest.approx(.475, abs=.001)
    report = course.report([])
    assert set(dict(report.lengths)) <= {4, 3, 2, 1, 0} and dict(report.lengths)[4] > .99 * sum(dict(report.lengths).values())
    assert report.speedup == pytest.approx(expected, rel=.03) and not report.resting
    world = World(lambda r: 1.0, .5)
    took, course = world.answer(lambda place: .3, tokens=2000)
    assert took <= 1.02 * 2000 * PLAIN and course.report([]).resting


def test_the_report_counts_each_place():
    """SP-10: rounds of 4, 4, 0, 4 with 4, 1, 0, 0 right."""
    controller = Controller(lambda: 0.0)
    course = controller.course(DraftSpec("d", 4), 5, 100)
    for length, right in ((4, 4), (4, 1), (0, 0), (4, 0)):
        course.verified("model", length, right, right + 1)
    report = course.report([])
    assert report.acceptance == pytest.approx(5 / 12) and report.tokens_per_pass == 2.25
    assert report.positions == ((3, 2), (2, 1), (1, 1), (1, 1))
    assert report.lengths == ((0, 1), (4, 3)) and report.sources == (("model", 12, 5),)


# ------------------------------------------------------------------------------------------- costs
def test_costs_between_and_beyond_the_measured_ones():
    costs = PassCosts()
    assert costs.expected(1) is None
    costs.saw(1, 10.0)
    assert costs.most(4) == 40 and 10 < costs.expected(4) < 20
    costs.saw(5, 18.0)
    assert costs.expected(3) == 14 and costs.most(3) == 14 and costs.most(7) == 38 and costs.expected(7) == 22


def test_one_disturbed_measurement_moves_a_cost_by_little():
    costs = PassCosts()
    for seconds in (30.0, 11.0, 10.0, 10.0):
        costs.saw(1, seconds)
    assert costs.expected(1) == pytest.approx(10)
    costs.saw(1, 500.0)
    assert costs.expected(1) < 10.4
    for _ in range(60):
        costs.saw(1, 20.0)
    assert costs.expected(1) == pytest.approx(20, rel=.02)


def test_what_is_not_measured_for_long_stays_so_many_times_as_dear_as_one_row():
    """While one and two rows take turns on a machine that is slower at times, and on which a plain pass behind others is."""
    costs, rng = PassCosts(), random.Random(1)
    for rows, seconds in ((1, 1.0), (2, 1.1), (8, 2.0)):
        costs.learn(rows, seconds)
    costs.outdated()
    for _ in range(200):
        pace = rng.choice((1.0, 1.4))
        for rows in (2,) * 24 + (1, 1):
            costs.saw(rows, pace * (1.1 if rows == 2 else 1.0) * (1 + .15 * rng.random() + .1 * (rows == 1)), rows == 1)
    assert costs.expected(8) / costs.expected(1) == pytest.approx(2.0, rel=.1)
    assert costs.expected(2) / costs.expected(1) == pytest.approx(1.05, rel=.1)


def test_fewer_rows_are_never_believed_dearer_than_more():
    """What was measured last is believed of the two, and two rows are found cheap by three."""
    costs = PassCosts()
    for rows, seconds in ((1, 1.0), (2, 1.5), (3, 1.1), (4, 2.0)):
        costs.learn(rows, seconds)
    assert [costs.expected(rows) for rows in (1, 2, 3, 4)] == pytest.approx([1.0, 1.1, 1.1, 2.0])
    for _ in range(60):
        costs.saw(2, 1.4)
    assert costs.expected(2) == pytest.approx(1.4, rel=.02) and costs.expected(3) >= costs.expected(2) >= costs.expected(1)


def test_what_few_rows_cost_is_measured_again_unless_it_was_used():
    costs = PassCosts()
    for rows in (1, 2, 3, 8):
        costs.learn(rows, 1.0 + rows / 10)
    assert not any(map(costs.vague, (1, 2, 3, 8))) and costs.vague(4)
    costs.outdated()
    for _ in range(9):
        costs.saw(1, 1.0, True), costs.saw(3, 1.3)
    assert costs.vague(2) and not costs.vague(3) and not costs.vague(8)
    for _ in range(2000):
        costs.saw(1, 1.0, True)
    assert costs.vague(8)


def test_what_is_read_first_is_no_part_of_what_an_id_costs():
    """The first draft of an answer reads some of its prompt, and the first of all sets kernels up as well."""
    costs = DraftCosts(.1)
    costs.saw(8.0, 1, 8)
    assert costs.id(10.0) == 1.0 and costs.read(10.0, None) == 1.0
    for seconds in (5.0, 2.0, 2.1):
        costs.saw(seconds, 1, 0)
    assert costs.id(10.0) == 2.0
    costs.saw(10.0, 2, 8)
    assert costs.id(10.0) == 2.0 and .9 < costs.read(10.0, None) < 1.0


def test_a_weak_draft_that_pays_is_not_given_up():
    """Guesses of which 0.41 are right, in passes that cost what they did on the fast kernels: 1.155 at best."""
    costs = {1: 1, 2: 1.1, 3: 1.21, 4: 1.26, 5: 1.38, 6: 1.5, 7: 1.7, 8: 1.9, 12: 2.8, 16: 3.7}
    world = World(lambda r: costs[r], .12)
    for rows, value in costs.items():
        world.controller.costs.learn(rows, PLAIN * value)
    took = [world.answer(lambda place: .41, prompt=40)[0] for _ in range(40)]
    assert sum(took) / 40 < HORIZON * PLAIN / 1.08 and max(took) < 1.03 * HORIZON * PLAIN
    assert max(world.answer(lambda place: 0.0, prompt=40)[0] for _ in range(6)) < 1.03 * HORIZON * PLAIN, "then it is always wrong"


def test_acceptance_is_by_place_given_those_before():
    luck = Acceptance(.5, 0.001, .999999)
    for length, right in ((3, 3), (3, 1), (3, 0), (1, 1)):
        luck.saw(length, right)
    assert [round(rate, 2) for rate in luck.rates(3)] == [.75, .5, 1.0]
    assert luck.gain(2) == pytest.approx([0, .75, .75 + .375], abs=.01)


def looks(world: World, passes: int, right: int = 0) -> int:
    """Of so many passes, those before which something is looked up; what is found has ``right`` right ids, 0: nothing is found."""
    course, count = world.controller.course(DraftSpec("lookup"), 50, HORIZON), 0
    for number in range(passes):
        order = course.order(50 + number, 9, 1)
        if order is not None:
            count += 1
            world.controller.drafted([course], [type("D", (list,), {"source": "lookup 9+"})([0] * right)], world.spend(.005))
        drafted = right if order is not None else 0
        course.verified("lookup 9+", drafted, drafted, drafted + 1)
        world.controller.passed([course], 1, 1 + drafted, 1 + drafted, world.spend(FLAT(1 + drafted)))
    return count


def test_what_is_never_found_is_looked_for_more_seldom_and_what_is_found_at_every_pass():
    world = World(FLAT, 0.0)
    looks(world, 4)                                         # what a plain pass costs is known
    assert 64 <= looks(world, 256) <= 100
    assert looks(World(FLAT, 0.0), 30, right=3) >= 24


def test_a_draft_goes_on_where_it_is_sure_and_ends_where_it_is_not():
    """Runs of places at which it is right at .95, and runs at .1: better than any constant length, on a dear verifier too."""
    accepts = lambda place: .95 if (place // 8 + place // 13) % 2 else .1  # noqa: E731
    for cost, share in ((FLAT, 1.0), (REAL, .9)):           # where rows cost next to nothing, a length too long costs little
        world = World(cost, .1)
        for _ in range(6):
            world.answer(accepts)
        took = sum(world.answer(accepts)[0] for _ in range(12)) / 12
        best = min(sum(World(cost, .1, seed=seed).answer(accepts, length=k)[0] for seed in range(12)) / 12 for k in LENGTHS)
        assert took < share * best, cost(2)


def test_a_draft_that_boasts_is_found_out():
    """Sure of everything, and right in one of five: the controller goes by what was counted, not by what the draft says."""
    world = World(REAL, .1)
    for _ in range(8):
        assert world.answer(lambda place: .2, says=lambda place: .99)[0] <= 1.03 * HORIZON * PLAIN


def test_ids_that_are_made_and_not_verified_cost_the_answer_too():
    """A draft that is never sure is asked ever more seldom."""
    world = World(REAL, .2)
    for _ in range(4):
        took, course = world.answer(lambda place: .02)
        assert took <= 1.03 * HORIZON * PLAIN and course.resting
