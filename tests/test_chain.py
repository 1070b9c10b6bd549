"""Ids guessed one after another in one native call: the same ids, ends and probabilities as asked for one by one."""

from __future__ import annotations

import math
import os
import random
from array import array

import pytest
import torch

from backends.base import DraftJob, ModelDir, Sampling, Step
from backends.engine import noise, sampler
from backends.engine.drafters import ModelDrafter, Places
from backends.engine.kept import Kept
from backends.engine.state_places import StatePlaces
from backends.engine.sureness import Calibration, Going
from backends.errors import StepFailed
from backends.kernels import Ahead, KVLayer, cpu, native_abi
from backends.kernels.cpu_chain import MOST, Chain
from backends.kernels.cpu_replay import Recording
from backends.registry import load_model
from tests.test_cpu_kernels import BEST, OTHERS, library
from tests.test_state_drafts import PARENT, TEXT, loaded, write_draft

WIDTH, HERE = 32, 40
FILTERS = [{}, {"top_k": 5}, {"top_p": .8}, {"min_p": .2}, {"top_k": 40, "top_p": .5}, {"top_p": .9, "min_p": .05}, {"top_k": 10**6}]


class Still:
    """A replay whose passes compute nothing: the stream stays what it is, and so do the logits."""

    def __init__(self, stream: torch.Tensor) -> None:
        self._known = {rows: Recording(array("q"), (), (), stream[:rows], None) for rows in range(1, len(stream) + 1)}

    def trusted(self, rows: int) -> Recording | None:
        return self._known.get(rows)


@pytest.fixture(scope="module", params=[BEST, *OTHERS])
def ops(request):
    return cpu.CpuOps(torch.float32, native_abi.Context(library(request.param), 1), 1)


@pytest.fixture
def rng():
    seed = int.from_bytes(os.urandom(4), "little")
    print("seed", seed)                                        # shown when a test fails
    return torch.Generator().manual_seed(seed)


def still(ops, rng, columns: int, spread: float, names: torch.Tensor | None = None, rows: int = 1) -> tuple[Chain, torch.Tensor]:
    """A chain that sees the same logits at every place, and those."""
    head, norm, stream = ops.pack(spread * torch.randn(columns, WIDTH, generator=rng) / WIDTH ** .5), torch.ones(WIDTH), torch.randn(
        rows, WIDTH, generator=rng)
    given = lambda row: ops.logits(ops.norm(row, norm, 1e-6), head)  # noqa: E731
    pages = KVLayer(torch.zeros(8, 1, 16, 8), torch.zeros(8, 1, 16, 8))
    turns = lambda places: (torch.zeros(places, 4), torch.zeros(places, 4))  # noqa: E731
    return Chain(ops, Still(stream), [pages], given, WIDTH, turns, names, columns), given(stream[rows - 1:])[0]


def keys(seed: int, count: int) -> array:
    return array("Q", [noise.key(seed, HERE + place) for place in range(count)])


def run(chain: Chain, rows: int, want: Ahead):
    assert chain.can_guess(HERE, rows, want.most)
    return chain.guess(HERE, array("i", range(8)), list(range(rows)), None, want)


@pytest.mark.parametrize("columns", [3, 16, 37, 4099])
@pytest.mark.parametrize("filters", FILTERS)
def test_what_is_drawn_is_what_the_sampler_draws(ops, rng, columns, filters):
    names = torch.arange(columns) * 3 + 7 if columns % 2 else None
    for temperature, spread in ((.3, 1.0), (.7, 4.0), (1.5, 12.0), (1.0, 0.01)):
        chain, logits = still(ops, rng, columns, spread, names)
        sampling = Sampling(temperature=temperature, **filters)
        wanted = [sampler.choose(logits.numpy(), sampling, 5, HERE + place, names=None if names is None else names.numpy())
                  for place in range(MOST)]
        guesses = run(chain, 1, Ahead(MOST, None, keys(5, MOST), temperature, **filters))
        assert guesses.ids == wanted and guesses.read == [0, *wanted[:-1]]
        chances = torch.softmax(logits.double() / temperature, 0)
        place = {int(name): column for column, name in enumerate(range(columns) if names is None else names)}
        assert guesses.sure == pytest.approx([chances[place[token]].item() for token in wanted], rel=1e-3)


def test_the_likeliest_is_the_first_of_equals(ops, rng):
    chain, logits = still(ops, rng, 50, 2.0, rows=3)
    guesses = run(chain, 3, Ahead(2))
    assert guesses.ids[0] == int(logits.argmax()) and len(guesses.ids) == 2
    assert guesses.sure[0] == pytest.approx(torch.softmax(logits.double(), 0).max().item(), rel=1e-3)
    flat, _ = still(ops, rng, 50, 0.0)
    assert run(flat, 1, Ahead(1)).ids == [0]


def test_it_ends_where_a_judge_would_end_it(ops, rng):
    dice = random.Random(int(torch.randint(1 << 30, (1,), generator=rng)))
    for _ in range(40):
        calibration = Calibration()
        for _ in range(60):
            calibration.saw(dice.random(), dice.random() < .6)
        most = dice.randint(1, 8)
        rows = sorted(dice.random() * .5 for _ in range(most))
        going = Going(calibration, rows, dice.random() * .2, [dice.random() for _ in range(most)])
        chain, _ = still(ops, rng, 20, dice.choice([1.0, 6.0]))
        asked = Ahead(most, None, keys(3, most), 1.0)
        whole, ended = run(chain, 1, asked), run(chain, 1, Ahead(most, None, keys(3, most), 1.0, ends=going.ends()))
        length = 1
        while length < most and going.more(whole.sure[:length]):
            length += 1
        assert ended.ids == whole.ids[:length] and ended.read == whole.read[:length]


def test_it_ends_before_an_id_that_is_not_the_callers(ops, rng):
    chain, logits = still(ops, rng, 50, 1.0)
    whole = run(chain, 1, Ahead(MOST, None, keys(9, MOST), 1.0)).ids
    strange = max(whole[1:])
    at = next(place for place, token in enumerate(whole) if token >= strange)
    guesses = run(chain, 1, Ahead(MOST, strange, keys(9, MOST), 1.0))
    assert guesses.ids == whole[:at] and guesses.read == [0, *whole[:at]]


def test_more_ids_than_it_has_room_for_are_not_begun(ops, rng):
    chain, _ = still(ops, rng, 50, 1.0)
    assert not chain.can_guess(HERE, 1, MOST + 1) and not chain.can_guess(HERE, 17, 2) and chain.can_guess(HERE, 1, MOST)


@pytest.mark.parametrize("value", [math.nan, math.inf])
def test_logits_that_are_no_numbers_are_an_error_and_the_next_call_works(ops, rng, value):
    chain, _ = still(ops, rng, 50, 1.0)
    stream = chain._replay.trusted(1).result
    good = stream.clone()
    stream[0, 3] = value
    for want in (Ahead(3), Ahead(3, None, keys(1, 3), .7)):
        with pytest.raises(StepFailed, match="not a number"):
            run(chain, 1, want)
    stream.copy_(good)
    assert len(run(chain, 1, Ahead(3)).ids) == 3


# ---------------------------------------------------------------------------------------------- with a model
@pytest.mark.parametrize("kv", ["float32", "int8"])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_pass_in_one_call_is_the_pass_it_was_bit_for_bit(kv, dtype):
    """Over pages, of one to sixteen rows, taken back in between; and what is kept for a draft."""
    one, other = (load_model(PARENT, kernels="cpu", threads=2, context=256, streams=2, dtype=dtype, kv_type=kv).decoder for _ in range(2))
    other.__dict__["_chain"] = None
    calls, run = [], one._chain.run
    one._chain.run = lambda *given: calls.append(given[0]) or run(*given)
    slots = [decoder.open(TEXT, reuse=False) for decoder in (one, other)]
    for slot in slots:
        slot.kept = Kept(0)
    dice = random.Random(5)
    for turn in range(70):
        ids = [dice.randrange(250) for _ in range(dice.choice((1, 1, 2, 3, 5, 16, 17)))]
        rows = []
        for decoder, slot in zip((one, other), slots):
            assert decoder.reserve(slot, len(ids))
            rows.append(decoder.extend([Step(slot, ids, len(ids))])[0])
        assert torch.equal(*rows) and rows[0].shape == (len(ids), one.vocab.size)
        for decoder, slot in zip((one, other), slots):
            decoder.truncate(slot, 180 if slot.length > 220 else slot.length - turn % min(3, len(ids)))
        first, last = slots[0].kept.first, slots[0].kept.end
        assert torch.equal(*(slot.kept.rows(first, last) for slot in slots))
    assert len(calls) > 40 and one.stats()["rows"] == other.stats()["rows"] and one.stats()["steps"] == other.stats()["steps"]


class Judge:
    """Ends a draft by its probabilities; takes all that was made."""

    def __init__(self) -> None:
        self._going = Going(Calibration(), [.02 * place for place in range(1, 6)], .02, [.5] * 5)
        self.more, self.ends = self._going.more, self._going.ends

    def worth(self, sure) -> int:
        return len(sure)


@pytest.fixture(params=["states", "whole"])
def drafters(request, tmp_path):
    """Two drafters of the same draft: one call for a draft, and one for each id."""
    if request.param == "whole":
        decoder, make = loaded(PARENT, "cpu").decoder, lambda decoder: Places(decoder, narrow=True, growing=True)
    else:
        torch.manual_seed(1)
        width = ModelDir.of(PARENT, "parent").config["hidden_size"]
        decoder = loaded(write_draft(tmp_path, torch.randn(width, width) / width ** .5, 1.0), "cpu").decoder
        make = StatePlaces
    one, other = (ModelDrafter(decoder, None, make(decoder)) for _ in range(2))
    other.places.at_once = False
    return decoder, one, other


@pytest.mark.parametrize("sampling", [Sampling(temperature=0.0), Sampling(temperature=.8, top_p=.9), Sampling(temperature=1.1)])
@pytest.mark.parametrize("judge", [None, Judge()])
def test_a_whole_draft_is_what_is_drafted_id_by_id(drafters, sampling, judge):
    decoder, one, other = drafters
    target = loaded(PARENT, "cpu").decoder
    slot = target.open(TEXT, reuse=False)
    slot.kept = Kept(0)
    target.reserve(slot, 128)
    text, rng, calls = list(TEXT), random.Random(4), []
    chain = decoder._chain
    chain.guess, plain = lambda *given: calls.append(given[0]) or plain(*given), chain.guess
    for turn in range(40):                                     # over several pages
        target.extend([Step(slot, text[slot.length:], 1)])
        text += [rng.randrange(200) for _ in range(1 + turn % 3)]
        target.extend([Step(slot, text[slot.length:-1], 0)]) if turn % 3 else None
        job, again = (DraftJob(text, 5, sampling, 11, number, kept=slot.kept, judge=judge) for number in (1, 2))
        drafts = one.propose([job])[0], other.propose([again])[0]
        assert list(drafts[0]) == list(drafts[1]) and len(drafts[0]) >= 1
        if turn % 5 == 4:
            text += drafts[0][:2]                              # some of it was right
            target.extend([Step(slot, text[slot.length:-1], 0)])
    assert len(calls) > 20, "most drafts were made in one call"
    one.close(), other.close()


def test_states_of_a_verifier_in_bfloat16_are_read_as_numbers(tmp_path):
    """Its kernels are others than the draft's."""
    width = ModelDir.of(PARENT, "parent").config["hidden_size"]
    decoder = loaded(write_draft(tmp_path, torch.eye(width), 1.0), "cpu").decoder
    stream, drafts = torch.randn(64, width, generator=torch.Generator().manual_seed(3)).bfloat16(), []
    for kind in (torch.bfloat16, torch.float32):
        drafter, text = ModelDrafter(decoder, None, StatePlaces(decoder)), list(TEXT)
        kept = Kept(0)
        kept.add(stream.to(kind), 0, len(TEXT) - 1)
        for turn in range(8):
            kept.add(stream.to(kind), len(text) - 1, 1)
            text.append(40 + turn)
            drafts.append(list(drafter.propose([DraftJob(text, 3, Sampling(temperature=0.0), 1, 1, kept=kept)])[0]))
        drafter.close()
    assert decoder.chains and drafts[:8] == drafts[8:]


def test_at_the_end_of_the_context_it_drafts_as_id_by_id():
    decoder = loaded(PARENT, "cpu").decoder
    one, other = ModelDrafter(decoder), ModelDrafter(decoder)
    other.places.at_once = False
    text = [3 + place % 90 for place in range(decoder.context - 9)]
    for _ in range(14):
        text.append(5)
        jobs = [DraftJob(text, 4, Sampling(temperature=0.0), 1, number) for number in (1, 2)]
        assert one.propose(jobs[:1]) == other.propose(jobs[1:])
