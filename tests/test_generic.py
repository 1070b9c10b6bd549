"""Any transformers causal LM: tiny random models of many families against transformers' own plain forward."""

from __future__ import annotations

import json

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM

from backends.base import BrokenFile, Cancel, ConfigConflict, ContextTooLong, LoadError, LocalOptions, ModelDir, NotSupported, OutOfMemory, Step, Vocab
from backends.engine import packed
from backends.engine.arch import generic
from backends.engine.kv import PAGE, PagedKV
from backends.engine.runner import PagedDecoder
from backends.engine.sequential import SequentialDecoder
from backends.kernels import QWeight
from backends.kernels.ref import RefOps

VOCAB = 96
SHAPE = dict(vocab_size=VOCAB, hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2,
             max_position_embeddings=128, pad_token_id=0, bos_token_id=1, eos_token_id=2,
             initializer_range=0.3)       # wide enough that attention matters: at the usual 0.02 a mixed-up cache hardly shows
GPT = dict(n_embd=32, n_layer=2, n_head=4, n_positions=128)
MOE = dict(num_experts=4, num_experts_per_tok=2, moe_intermediate_size=16)

PACKED = {
    "gpt2": GPT, "gpt_neox": {}, "opt": dict(ffn_dim=48, word_embed_proj_dim=32), "gptj": dict(GPT, rotary_dim=4),
    "codegen": dict(GPT, rotary_dim=4, n_ctx=128), "gpt_bigcode": GPT, "ctrl": dict(GPT, dff=48), "llama": {}, "phi": {}, "phi3": {},
    "olmo": {}, "olmo2": {}, "olmo3": dict(sliding_window=6), "cohere": {}, "cohere2": dict(sliding_window=6),
    "granite": dict(attention_multiplier=.2, logits_scaling=2.0, residual_multiplier=.5, embedding_multiplier=3.0),
    "starcoder2": dict(sliding_window=6), "smollm3": {}, "nemotron": {}, "persimmon": {}, "diffllama": {}, "bitnet": {},
    "mixtral": dict(num_local_experts=4), "qwen2_moe": dict(MOE, shared_expert_intermediate_size=16, decoder_sparse_step=1),
    "qwen3_moe": dict(MOE, head_dim=8),
    "deepseek_v3": dict(n_routed_experts=4, num_experts_per_tok=2, n_group=1, topk_group=1, moe_intermediate_size=16,
                        first_k_dense_replace=1, q_lora_rank=16, kv_lora_rank=16, qk_rope_head_dim=8, qk_nope_head_dim=8, v_head_dim=8,
                        num_key_value_heads=4),
    "gemma2": dict(head_dim=8, sliding_window=6, query_pre_attn_scalar=8, attn_logit_softcapping=2.0),
    "gemma3_text": dict(head_dim=8, sliding_window=6, query_pre_attn_scalar=8),
    "gpt_oss": dict(head_dim=8, num_local_experts=4, sliding_window=6),
    "gemma3n_text": dict(head_dim=8, sliding_window=6, num_hidden_layers=5, num_kv_shared_layers=2, hidden_size_per_layer_input=8,
                         vocab_size_per_layer_input=VOCAB, laurel_rank=4, activation_sparsity_pattern=[0.0] * 5,
                         layer_types=["sliding_attention", "sliding_attention", "full_attention", "sliding_attention", "full_attention"]),
}
SEQUENTIAL = {
    "bloom": dict(n_layer=2, n_head=4), "mpt": dict(d_model=32, n_heads=4, n_layers=2, max_seq_len=128), "falcon": {}, "stablelm": {},
    "xglm": dict(d_model=32, ffn_dim=48, num_layers=2, attention_heads=4),
    "gpt_neo": dict(num_layers=2, num_heads=4, attention_types=[[["global", "local"], 1]], window_size=6),
    "openai-gpt": GPT, "rwkv": dict(attention_hidden_size=32, context_length=128), "mamba": dict(state_size=4),
    "mamba2": dict(num_heads=4, head_dim=16, state_size=8, n_groups=2, chunk_size=4), "lfm2": dict(layer_types=["conv", "full_attention"]),
    "recurrent_gemma": dict(lru_width=32, attention_window_size=6, num_hidden_layers=3, head_dim=8),
    "jamba": dict(mamba_d_state=4, mamba_dt_rank=4, num_experts=2, attn_layer_period=2, attn_layer_offset=1),
    "llama4_text": dict(head_dim=8, num_local_experts=2, intermediate_size_mlp=32, attention_chunk_size=6),
}
CONTEXT = 64


@pytest.fixture(autouse=True, scope="module")
def one_thread():
    """Tensors this small gain nothing from threads and lose much on a busy machine."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def vocab() -> Vocab:
    return Vocab(VOCAB, frozenset({2}), "test")


def tiny(family: str, seed: int = 0, **more):
    """A random model of the family; the same seed gives the same weights."""
    known = {**PACKED, **SEQUENTIAL}
    torch.manual_seed(seed)
    return AutoModelForCausalLM.from_config(AutoConfig.for_model(family, **{**SHAPE, **known[family], **more})).eval()


def serve(module, context: int = CONTEXT):
    return generic.serve(module, torch.float32, vocab(), context, 4, lambda _: None, Cancel())


def decoder_of(served, kv_type: str = "float32"):
    if isinstance(served, SequentialDecoder):
        return served
    return PagedDecoder(served, PagedKV(served.layers, 40, kv_type), vocab(), CONTEXT)


def ids(n: int, seed: int) -> list[int]:
    return torch.randint(3, VOCAB, (n,), generator=torch.Generator().manual_seed(seed)).tolist()


@torch.no_grad()
def plain(module, tokens: list[int]) -> torch.Tensor:
    """transformers, one sequence, no cache: [n, V]."""
    return module(input_ids=torch.tensor([tokens]), use_cache=False).logits[0, :, :VOCAB].float()


def apart(a: torch.Tensor, b: torch.Tensor) -> float:
    return float((a - b).abs().max() / b.abs().max())


def run(decoder, prompts: list[list[int]], chunks: list[int], reuse: bool = False) -> tuple[list[torch.Tensor], list[int]]:
    """Every row of each prompt from steps that carry all prompts at once; also how many tokens came from the prefix index."""
    slots = [decoder.open(p, reuse=reuse) for p in prompts]
    reused, rows = [s.length for s in slots], [[] for _ in prompts]
    for turn in range(CONTEXT):
        steps, owners = [], []
        for i, (slot, prompt) in enumerate(zip(slots, prompts)):
            span = prompt[slot.length:slot.length + chunks[(turn + i) % len(chunks)]]
            if span:
                assert decoder.reserve(slot, len(span))
                steps.append(Step(slot, span, len(span)))
                owners.append(i)
        if not steps:
            break
        for i, part in zip(owners, decoder.extend(steps)):
            rows[i].append(part)
    for slot in slots:
        decoder.release(slot)
    return [torch.cat(r) for r in rows], reused


def greedy(decoder, prompts: list[list[int]], n: int) -> list[list[int]]:
    slots, out = [decoder.open(p) for p in prompts], [list(p) for p in prompts]
    for _ in range(n):
        steps = [Step(s, t[s.length:], 1) for s, t in zip(slots, out)]
        for step in steps:
            assert decoder.reserve(step.slot, len(step.tokens))
        for tokens, row in zip(out, decoder.extend(steps)):
            tokens.append(int(row[-1].argmax()))
    for slot in slots:
        decoder.release(slot)
    return [tokens[len(p):] for tokens, p in zip(out, prompts)]


def plain_greedy(module, prompt: list[int], n: int) -> list[int]:
    tokens = list(prompt)
    for _ in range(n):
        tokens.append(int(plain(module, tokens)[-1].argmax()))
    return tokens[len(prompt):]


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
    from transformers.masking_utils import causal_mask_function, chunked_causal_mask_function, sliding_window_causal_mask_function
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
    monkeypatch.setattr(generic, "free_bytes", lambda: 15_000)                 # 0.7 of it: 5 pages
    tight = serve(tiny("falcon"))
    assert (tight.context, tight.room) == (64, 80) and any("shared by all streams" in note for note in tight.notes)
    with pytest.raises(OutOfMemory):
        serve(tiny("falcon"), 96)


# ---------------------------------------------------------------------------------------------- loading
def build(model, source=None, **options):
    return generic.build_generic(model, source, RefOps(), LocalOptions(context=CONTEXT, **options), vocab(), lambda _: None, Cancel())


@pytest.fixture
def folder(tmp_path):
    tiny("gpt_neox").save_pretrained(tmp_path)
    return tmp_path


def test_a_float_folder(folder):
    served = build(ModelDir.of(folder))
    prompt = ids(9, 14)
    assert apart(run(decoder_of(served), [prompt], [4])[0][0], plain(tiny("gpt_neox"), prompt)) <= 1e-4
    assert served.parameters == sum(p.numel() for p in tiny("gpt_neox").parameters())
    assert served.weights_bytes() == sum(p.numel() * 4 for p in tiny("gpt_neox").parameters())


def test_a_missing_tensor_is_named(folder):
    from safetensors.torch import load_file, save_file
    tensors = load_file(folder / "model.safetensors")
    gone = next(name for name in tensors if name.endswith("dense_h_to_4h.weight"))
    del tensors[gone]
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(BrokenFile) as caught:
        build(ModelDir.of(folder))
    assert gone in str(caught.value)


def test_left_over_tensors_are_told(folder):
    from safetensors.torch import load_file, save_file
    tensors = {**load_file(folder / "model.safetensors"), "extra.weight": torch.zeros(2)}
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    assert any("extra.weight" in note for note in build(ModelDir.of(folder)).notes)


@pytest.mark.parametrize("config, word", [
    ({"model_type": "brand_new", "auto_map": {"AutoModelForCausalLM": "modeling.New"}}, "own code"),
    ({"model_type": "brand_new"}, "brand_new"), ({"model_type": "clip"}, "causal")])
def test_what_transformers_has_no_class_for_is_refused(folder, config, word):
    (folder / "config.json").write_text(json.dumps(config))
    (folder / "modeling.py").write_text("raise SystemExit('code of a checkpoint was run')")
    with pytest.raises(NotSupported, match=word):
        build(ModelDir.of(folder))


class Quantized:
    """A `WeightSource` over a module's tensors: every 2-D matrix of a linear layer in 4 bits, asymmetric, groups of 16."""

    def __init__(self, module, names: tuple[str, ...], file_names=lambda tensors: tensors) -> None:
        self.config = module.config.to_dict()
        self.config["quantization_config"] = {"bits": 4}
        self.tensors = file_names({k: v for k, v in module.state_dict().items()})
        self.packed = names

    def names(self):
        return self.tensors.keys()

    def tensor(self, name):
        return self.tensors[name]

    def linear(self, module):
        weight, bias = self.tensors[module + ".weight"], self.tensors.get(module + ".bias")
        return (self.quantize(weight) if module.endswith(self.packed) else weight), bias

    @staticmethod
    def quantize(weight) -> QWeight:
        grouped = weight.reshape(weight.shape[0], -1, 16)
        low, high = grouped.amin(-1), grouped.amax(-1)
        scale = (high - low) / 15
        codes = ((grouped - low[..., None]) / scale[..., None]).round().clamp(0, 15).to(torch.uint8)
        return QWeight(codes.reshape(weight.shape), scale, None, low, 4, 16)

    def close(self):
        pass


LINEAR = ("query_key_value", "dense", "dense_h_to_4h", "dense_4h_to_h", "q_proj", "k_proj", "v_proj", "o_proj", "embed_out", "embed_in",
          "embed_tokens", "gate_proj", "up_proj", "down_proj")


@torch.no_grad()
def rounded(module, source):
    """The same module with its quantized matrices dequantized in place: what packed weights must equal."""
    for name, part in module.named_modules():
        if name.endswith(source.packed) and getattr(part, "weight", None) is not None:
            part.weight.copy_(Quantized.quantize(part.weight).dequantize())
    return module


@pytest.mark.parametrize("family, more", [("gpt_neox", {}), ("granite", {"tie_word_embeddings": True}), ("falcon", {}), ("gpt2", {})])
def test_quantized_source_stays_packed(tmp_path, family, more):
    module = tiny(family, **more)
    source = Quantized(module, LINEAR)
    served = build(ModelDir(family, tmp_path / "file.gguf", ()), source)
    expected = plain(rounded(module, source), ids(9, 15))
    assert apart(run(decoder_of(served), [ids(9, 15)], [4])[0][0], expected) <= 1e-4
    if family != "gpt2":                                            # its matrices are named otherwise and stay float here
        assert served.weights_bytes() < 0.6 * sum(p.numel() * 4 for p in module.parameters())


def per_expert(tensors: dict) -> dict:
    """As checkpoints keep them: one matrix an expert."""
    out = {}
    for name, value in tensors.items():
        base, _, last = name.rpartition(".")
        if last == "gate_up_proj" and value.dim() == 3:
            for e, both in enumerate(value):
                gate, up = both.chunk(2)
                out[f"{base}.{e}.gate_proj.weight"], out[f"{base}.{e}.up_proj.weight"] = gate.contiguous(), up.contiguous()
        elif last == "down_proj" and value.dim() == 3:
            out |= {f"{base}.{e}.down_proj.weight": down for e, down in enumerate(value)}
        else:
            out[name] = value
    return out


def test_experts_of_a_source_are_gathered(tmp_path):
    module = tiny("qwen3_moe")
    source = Quantized(module, ("q_proj",), per_expert)
    served = build(ModelDir("moe", tmp_path / "file", ()), source)
    prompt = ids(9, 16)
    assert apart(run(decoder_of(served), [prompt], [4])[0][0], plain(rounded(module, source), prompt)) <= 1e-4
    assert any("experts of 2 layers" in note for note in served.notes)


def test_a_source_that_lacks_or_misshapes_a_tensor_is_refused(tmp_path):
    source = Quantized(tiny("gpt_neox"), ())
    whole = dict(source.tensors)
    del source.tensors["gpt_neox.final_layer_norm.weight"]
    with pytest.raises(BrokenFile, match="final_layer_norm"):
        build(ModelDir("x", tmp_path / "file", ()), source)
    source.tensors = {**whole, "gpt_neox.final_layer_norm.weight": torch.ones(7)}
    with pytest.raises(ConfigConflict, match="final_layer_norm"):
        build(ModelDir("x", tmp_path / "file", ()), source)
