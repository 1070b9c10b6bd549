"""Any transformers causal LM: tiny random models of many families against transformers' own plain forward."""

from __future__ import annotations

import pytest
import torch

from backends.base import Cancel, ContextTooLong, LoadError, NotSupported, OutOfMemory, Step
from backends.engine import packed
from backends.engine.arch import generic
from backends.engine.kv import PAGE
from backends.engine.sequential import SequentialDecoder
from tests.tiny_models import (
    CONTEXT, PACKED, SEQUENTIAL, VOCAB, apart, decoder_of, greedy, ids, plain, plain_greedy, run, serve, tiny, vocab)


@pytest.fixture(autouse=True, scope="module")
def one_thread():
    """Tensors this small gain nothing from threads and lose much on a busy machine."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def equals_transformers(family: str) -> None:
    reference, decoder = tiny(family), decoder_of(serve(tiny(family)))
    prompts = [ids(3, 1), ids(9, 2), ids(2 * PAGE + 3, 3)]
    expected = [plain(reference, p) for p in prompts]
    for prompt, want in zip(prompts, expected):
        (alone,), _ = run(decoder, [prompt], [CONTEXT])
        assert apart(alone, want) <= 1e-4
    together, _ = run(decoder, prompts, [2, 7, 1, 16])
    for got, want in zip(together, expected):
        assert apart(got, want) <= 1e-4
    assert greedy(decoder, prompts, 5) == [plain_greedy(reference, p, 5) for p in prompts]


@pytest.mark.parametrize("family", PACKED)
def test_packed_family_equals_transformers(family):
    served = serve(tiny(family))
    assert served.path == "generic" and not served.notes
    equals_transformers(family)


@pytest.mark.parametrize("family", SEQUENTIAL)
def test_sequential_family_equals_transformers(family):
    served = serve(tiny(family))
    assert served.path == "generic-sequential"
    assert any(note.startswith("One sequence at a time: ") for note in served.notes)
    equals_transformers(family)


@pytest.mark.parametrize("family", ["gpt2", "cohere2", "gpt_oss", "deepseek_v3"])
def test_cached_prefix_gives_the_same_rows(family):
    reference, decoder = tiny(family), decoder_of(serve(tiny(family)))
    shared = ids(2 * PAGE + 4, 4)
    run(decoder, [shared], [CONTEXT])
    longer = shared[:2 * PAGE] + ids(7, 5)
    (rows,), (reused,) = run(decoder, [longer], [3], reuse=True)
    assert reused == 2 * PAGE
    assert apart(rows, plain(reference, longer)[reused:]) <= 1e-4


@pytest.mark.parametrize("family", ["gpt2", "opt", "llama", "gptj"])
def test_ge14_positions_come_from_the_sequence_not_from_its_place_in_the_batch(family):
    """GE-14: prompts of 3, 9 and 20 tokens batched, absolute-position and rotary models."""
    reference, decoder = tiny(family), decoder_of(serve(tiny(family)))
    prompts = [ids(n, n) for n in (3, 9, 20)]
    for order in (prompts, prompts[::-1]):
        rows, _ = run(decoder, order, [CONTEXT])
        for got, prompt in zip(rows, order):
            assert apart(got[-1], plain(reference, prompt)[-1]) <= 1e-4
        assert greedy(decoder, order, 4) == [plain_greedy(reference, p, 4) for p in order]


def test_what_the_attention_calls_show():
    layers = {family: serve(tiny(family)).layers for family in ("deepseek_v3", "gemma2", "gpt_bigcode", "diffllama")}
    assert [(x.heads, x.key_width, x.value_width) for x in layers["deepseek_v3"]] == [(4, 16, 8)] * 2
    assert [x.window for x in layers["gemma2"]] == [6, None]
    assert layers["gpt_bigcode"][0].heads == 1
    assert len(layers["diffllama"]) == 4                            # two attention calls a layer, each with its own cache


def test_int8_pages_stay_near_the_float_ones():
    served = serve(tiny("gpt_oss"))
    prompts = [ids(20, 6), ids(5, 7)]
    exact, _ = run(decoder_of(served), prompts, [4])
    coarse, _ = run(decoder_of(served, "int8"), prompts, [4])
    assert 0 < max(apart(c, e) for c, e in zip(coarse, exact)) < 0.1


def test_bfloat16_is_packed_too():
    module = tiny("qwen3_moe").to(torch.bfloat16)
    served = generic.serve(module, torch.bfloat16, vocab(), CONTEXT, 4, lambda _: None, Cancel())
    assert served.path == "generic"
    assert served.logits(torch.zeros(3, served.hidden, dtype=torch.bfloat16)).dtype == torch.float32


def test_two_models_do_not_share_a_context():
    one, two = decoder_of(serve(tiny("llama", 1))), decoder_of(serve(tiny("llama", 2)))
    prompt = ids(12, 8)
    rows = [[], []]
    slots = [one.open(prompt), two.open(prompt)]
    for at in range(0, 12, 3):
        for i, (decoder, slot) in enumerate(zip((one, two), slots)):
            assert decoder.reserve(slot, 3)
            rows[i].append(decoder.extend([Step(slot, prompt[at:at + 3], 3)])[0])
    for i, seed in enumerate((1, 2)):
        assert apart(torch.cat(rows[i]), plain(tiny("llama", seed), prompt)) <= 1e-4


def test_hidden_rows_are_what_the_head_reads():
    module, served = tiny("llama"), serve(tiny("llama"))
    prompt = ids(6, 9)
    decoder = decoder_of(served)
    slot = decoder.open(prompt)
    assert decoder.reserve(slot, 6)
    rows = served.forward(decoder._batch([Step(slot, prompt, 6)]), decoder.kv.layers)
    with torch.no_grad():
        expected = module.model(input_ids=torch.tensor([prompt])).last_hidden_state[0]
    assert rows.shape == (6, served.hidden) and apart(rows, expected) <= 1e-4


# ---------------------------------------------------------------------------------------------- the gates
def test_a_model_that_looks_at_the_row_before_is_caught_by_the_check():
    """No flag tells: a layer that also reads the previous row of the pass needs the whole sequence in one pass, alone."""
    module = tiny("llama")
    layer, forward = module.model.layers[0].mlp, module.model.layers[0].mlp.forward
    layer.forward = lambda x: forward(x) + torch.nn.functional.pad(x, (0, 0, 1, 0))[:, :-1]
    served = serve(module)
    assert served.path == "generic-sequential" and served.feed == "whole"
    assert "packed and alone differ" in served.notes[0] and len(served.notes) == 3
    prompts = [ids(9, 2), ids(4, 3)]
    for got, prompt in zip(run(served, prompts, [2])[0], prompts):
        assert apart(got, plain(module, prompt)) <= 1e-4


def test_a_model_that_looks_ahead_is_refused():
    module = tiny("llama")
    layer, forward = module.model.layers[0].mlp, module.model.layers[0].mlp.forward
    layer.forward = lambda x: forward(x) + x.mean(dim=1, keepdim=True)
    with pytest.raises(LoadError, match="however they are fed"):
        serve(module)


def test_the_mask_rule_gives_the_window_or_a_refusal():
    from transformers.masking_utils import (
        causal_mask_function, chunked_causal_mask_function, sliding_window_causal_mask_function)
    assert packed.window_of(causal_mask_function, 4096) is None
    assert packed.window_of(sliding_window_causal_mask_function(512), 4096) == 512
    assert packed.window_of(sliding_window_causal_mask_function(4096), 4096) is None       # nothing is ever hidden
    for chunk in (6, 512, 1000):
        with pytest.raises(NotSupported):
            packed.window_of(chunked_causal_mask_function(chunk, torch.zeros(1, dtype=torch.long)), 4096)


def test_an_argument_that_pages_cannot_honour_is_refused_by_name():
    probe = packed.Probe(64)
    q = torch.zeros(1, 2, 3, 4)
    with pytest.raises(NotSupported, match="position_bias"):
        probe.attend(torch.nn.Identity(), q, q, q, None, {"scaling": 1.0, "position_bias": torch.zeros(1)})


def test_a_rotation_that_moves_with_the_length_is_packed_only_below_its_limit():
    rope = dict(original_max_position_embeddings=32,
                rope_parameters=dict(rope_type="longrope", rope_theta=1e4, short_factor=[1.0] * 4, long_factor=[2.0] * 4,
                                     original_max_position_embeddings=32))
    assert serve(tiny("phi3", **rope), 32).path == "generic"
    beyond = serve(tiny("phi3", **rope), 64)
    assert beyond.path == "generic-sequential" and "32" in beyond.notes[0]


# ---------------------------------------------------------------------------------------------- one at a time
@pytest.mark.parametrize("family", ["falcon", "mamba", "openai-gpt"])
def test_slots_interleave_truncate_and_come_back(family):
    reference, decoder = tiny(family), serve(tiny(family))
    a, b = ids(10, 10), ids(7, 11)
    one, two = decoder.open(a), decoder.open(b)
    assert one.length == 0 and decoder.reserve(one, 6) and decoder.reserve(two, 3)
    first, second = decoder.extend([Step(one, a[:6], 0), Step(two, b[:3], 1)])
    assert first.shape == (0, VOCAB) and second.shape == (1, VOCAB)
    decoder.truncate(one, 4)
    assert one.length == 4
    rows = decoder.extend([Step(two, b[3:], 4), Step(one, a[4:], 6)])
    assert apart(rows[0], plain(reference, b)[3:]) <= 1e-4 and apart(rows[1], plain(reference, a)[4:]) <= 1e-4
    decoder.release(one)
    assert decoder.stats()["pages_used"] == 1
    decoder.release(two)
    assert decoder.stats()["pages_used"] == 0


def test_room_and_context_are_kept():
    decoder = SequentialDecoder(tiny("falcon"), vocab(), context=16, room=20)
    one, two = decoder.open([3]), decoder.open([3])
    assert decoder.reserve(one, 16)
    decoder.extend([Step(one, ids(16, 12), 1)])
    assert not decoder.reserve(two, 5) and two.length == 0
    assert decoder.reserve(two, 4)
    with pytest.raises(ContextTooLong):
        decoder.reserve(one, 1)


def test_a_failed_pass_leaves_nothing_half_written():
    reference, decoder = tiny("falcon"), serve(tiny("falcon"))
    prompt = ids(8, 13)
    slot = decoder.open(prompt)
    decoder.extend([Step(slot, prompt[:4], 0)])
    with pytest.raises(IndexError):
        decoder.extend([Step(slot, [VOCAB + 5], 1)])
    decoder.truncate(slot, 4)
    assert apart(decoder.extend([Step(slot, prompt[4:], 4)])[0], plain(reference, prompt)[4:]) <= 1e-4


def test_memory_bounds_context_and_room(monkeypatch):
    """falcon here: 2 layers of one KV head, 8 + 8 float32 values: 128 bytes a token, 2048 a page of 16."""
    decoder = serve(tiny("falcon"))
    assert [(x.heads, x.key_width, x.value_width) for x in decoder.measure(ids(5, 17))] == [(1, 8, 8)] * 2
    assert (decoder.context, decoder.room) == (CONTEXT, 4 * CONTEXT)
    monkeypatch.setattr(generic, "free_memory", lambda device: 15_000)
    tight = serve(tiny("falcon"))
    assert tight.context == 64 <= tight.room and 128 * tight.room <= 15_000
    assert any("shared by all streams" in note for note in tight.notes)
    with pytest.raises(OutOfMemory):
        serve(tiny("falcon"), 120)
