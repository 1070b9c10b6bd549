"""Tiny random models of many transformers families, and the ways in which their rows are asked for."""

from __future__ import annotations

import torch
from transformers import AutoConfig, AutoModelForCausalLM

from backends.base import Cancel, Step, Vocab
from backends.engine.arch import generic
from backends.engine.kv import PagedKV
from backends.engine.runner import PagedDecoder
from backends.engine.sequential import SequentialDecoder

VOCAB = 96
SHAPE = dict(vocab_size=VOCAB, hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4,
             num_key_value_heads=2, max_position_embeddings=128, pad_token_id=0, bos_token_id=1, eos_token_id=2,
             initializer_range=0.3)       # wide enough that attention matters: at 0.02 a mixed-up cache hardly shows
GPT = dict(n_embd=32, n_layer=2, n_head=4, n_positions=128)
MOE = dict(num_experts=4, num_experts_per_tok=2, moe_intermediate_size=16)

PACKED = {
    "gpt2": GPT, "gpt_neox": {}, "opt": dict(ffn_dim=48, word_embed_proj_dim=32), "gptj": dict(GPT, rotary_dim=4),
    "codegen": dict(GPT, rotary_dim=4, n_ctx=128), "gpt_bigcode": GPT, "ctrl": dict(GPT, dff=48), "llama": {}, "phi": {},
    "phi3": {}, "olmo": {}, "olmo2": {}, "olmo3": dict(sliding_window=6), "cohere": {}, "cohere2": dict(sliding_window=6),
    "granite": dict(attention_multiplier=.2, logits_scaling=2.0, residual_multiplier=.5, embedding_multiplier=3.0),
    "starcoder2": dict(sliding_window=6), "smollm3": {}, "nemotron": {}, "persimmon": {}, "diffllama": {}, "bitnet": {},
    "mixtral": dict(num_local_experts=4), "qwen2_moe": dict(MOE, shared_expert_intermediate_size=16, decoder_sparse_step=1),
    "qwen3_moe": dict(MOE, head_dim=8),
    "deepseek_v3": dict(n_routed_experts=4, num_experts_per_tok=2, n_group=1, topk_group=1, moe_intermediate_size=16,
                        first_k_dense_replace=1, q_lora_rank=16, kv_lora_rank=16, qk_rope_head_dim=8, qk_nope_head_dim=8,
                        v_head_dim=8, num_key_value_heads=4),
    "gemma2": dict(head_dim=8, sliding_window=6, query_pre_attn_scalar=8, attn_logit_softcapping=2.0),
    "gemma3_text": dict(head_dim=8, sliding_window=6, query_pre_attn_scalar=8),
    "gpt_oss": dict(head_dim=8, num_local_experts=4, sliding_window=6),
    "gemma3n_text": dict(head_dim=8, sliding_window=6, num_hidden_layers=5, num_kv_shared_layers=2,
                         hidden_size_per_layer_input=8, vocab_size_per_layer_input=VOCAB, laurel_rank=4,
                         activation_sparsity_pattern=[0.0] * 5,
                         layer_types=["sliding_attention"] * 2 + ["full_attention", "sliding_attention", "full_attention"]),
}
SEQUENTIAL = {
    "bloom": dict(n_layer=2, n_head=4), "mpt": dict(d_model=32, n_heads=4, n_layers=2, max_seq_len=128), "falcon": {},
    "stablelm": {},
    "xglm": dict(d_model=32, ffn_dim=48, num_layers=2, attention_heads=4),
    "gpt_neo": dict(num_layers=2, num_heads=4, attention_types=[[["global", "local"], 1]], window_size=6),
    "openai-gpt": GPT, "rwkv": dict(attention_hidden_size=32, context_length=128), "mamba": dict(state_size=4),
    "mamba2": dict(num_heads=4, head_dim=16, state_size=8, n_groups=2, chunk_size=4),
    "lfm2": dict(layer_types=["conv", "full_attention"]),
    "recurrent_gemma": dict(lru_width=32, attention_window_size=6, num_hidden_layers=3, head_dim=8),
    "jamba": dict(mamba_d_state=4, mamba_dt_rank=4, num_experts=2, attn_layer_period=2, attn_layer_offset=1),
    "llama4_text": dict(head_dim=8, num_local_experts=2, intermediate_size_mlp=32, attention_chunk_size=6),
}
CONTEXT = 64


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
    """Every row of each prompt from steps that carry all prompts at once, and how many tokens were found as a prefix."""
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
