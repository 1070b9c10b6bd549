"""What a GGUF file says about its model, in the words of transformers: config.json keys and tensor names.

Knows the metadata keys of llama.cpp and how its converter renames tensors, for the families listed in `FAMILIES`. Refuses
to know tensor data. A key that would change the arithmetic and is not translated is an error, any other is reported.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from backends.errors import BrokenFile, NotSupported, UnsupportedTensor
from backends.gguf_file import GgufFile

BLOCK = {
    "attn_norm": "input_layernorm", "attn_q": "self_attn.q_proj", "attn_k": "self_attn.k_proj", "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj", "attn_q_norm": "self_attn.q_norm", "attn_k_norm": "self_attn.k_norm",
    "ffn_norm": "post_attention_layernorm", "ffn_gate": "mlp.gate_proj", "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj"}
BLOCK_GEMMA = BLOCK | {"post_attention_norm": "post_attention_layernorm", "ffn_norm": "pre_feedforward_layernorm",
                       "post_ffw_norm": "post_feedforward_layernorm"}
TOP = {"token_embd": "model.embed_tokens", "output_norm": "model.norm", "output": "lm_head"}
ROPE_TENSORS = ("rope_freqs.weight", "rope_factors_long.weight", "rope_factors_short.weight")

# Keys under "{architecture}." that are translated, or that say nothing about the arithmetic.
READ = {"block_count", "context_length", "embedding_length", "feed_forward_length", "attention.head_count", "vocab_size",
        "attention.head_count_kv", "attention.layer_norm_rms_epsilon", "attention.key_length", "attention.value_length",
        "attention.sliding_window", "attention.sliding_window_pattern", "rope.freq_base", "rope.freq_base_swa",
        "rope.dimension_count", "rope.scaling.type", "rope.scaling.factor", "rope.scaling.attn_factor",
        "rope.scaling.original_context_length", "rope.scaling.finetuned", "rope.scale_linear", "attn_logit_softcapping",
        "final_logit_softcapping", "rope.scaling.yarn_beta_fast", "rope.scaling.yarn_beta_slow", "expert_count",
        "expert_used_count", "attention.key_length_swa", "attention.value_length_swa", "rope.dimension_count_swa"}
# Keys that change the arithmetic of a family that has no place for them: only these values are harmless.
NEUTRAL = {"attention.scale": 0.0, "logit_scale": 1.0, "residual_scale": 1.0, "embedding_scale": 1.0,
           "attention.causal": True,
           "attention.clamp_kqv": 0.0, "attention.max_alibi_bias": 0.0, "use_parallel_residual": False, "pooling_type": 0,
           "attention.temperature_scale": 0.0, "rope.scaling.yarn_log_multiplier": 0.0, "expert_count": 0}


@dataclass(frozen=True)
class Family:
    """How llama.cpp's converter treats one architecture. ``paired``: it interleaves the two halves of each q and k head;
    ``offset``: it adds this to the RMS weights; ``fields``: config keys beyond the common ones."""

    model_type: str
    title: str
    block: Mapping[str, str]
    paired: bool = False
    offset: float = 0.0
    fields: Callable[[GgufFile, dict], dict] = lambda file, config: {}


def number(file: GgufFile, key: str, default: Any = None) -> Any:
    """A positive number under "{architecture}."; BrokenFile where it is missing, no number or not positive."""
    value = file.get(key, default)
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not 0 < value < 2**40:
        fault = "missing" if value is None else "no positive number"
        raise BrokenFile(f"{file.path.name}: {file.architecture}.{key} is {fault}.",
                         file=file.path.name, key=f"{file.architecture}.{key}", value=str(value)[:80])
    return value


# ---------------------------------------------------------------------------------------------- families
def _llama(file: GgufFile, config: dict) -> dict:
    biased = "blk.0.attn_q.bias" in file.tensors
    fields = {"hidden_act": "silu", "attention_bias": biased, "mlp_bias": "blk.0.ffn_down.bias" in file.tensors}
    if file.get("attention.sliding_window"):
        return fields | {"model_type": "mistral", "architectures": ["MistralForCausalLM"],
                         "sliding_window": int(number(file, "attention.sliding_window"))}
    return fields


def _qwen(file: GgufFile, config: dict) -> dict:
    return {"hidden_act": "silu", "attention_bias": "blk.0.attn_q.bias" in file.tensors, "use_sliding_window": False,
            "sliding_window": None}


def _smollm3(file: GgufFile, config: dict) -> dict:
    layers = config["num_hidden_layers"]
    return {"hidden_act": "silu", "attention_bias": False, "mlp_bias": False, "no_rope_layer_interval": 4,
            "use_sliding_window": False,
            "sliding_window": None, "no_rope_layers": [int((i + 1) % 4 != 0) for i in range(layers)],
            "layer_types": ["full_attention"] * layers}


def _gemma(file: GgufFile, config: dict) -> dict:
    return {"hidden_act": "gelu_pytorch_tanh", "hidden_activation": "gelu_pytorch_tanh", "attention_bias": False}


def _windows(file: GgufFile, config: dict, pattern: int) -> dict:
    """Every ``pattern``-th layer looks back over everything, the others over a window."""
    stored = file.get("attention.sliding_window_pattern", pattern)
    count = config["num_hidden_layers"]
    flags = [bool((i + 1) % stored) for i in range(count)] if isinstance(stored, int) else [bool(x) for x in stored]
    if len(flags) != count:
        raise BrokenFile(f"{file.path.name}: the window pattern is not one flag a layer.",
                         key="attention.sliding_window_pattern")
    return {"sliding_window": int(number(file, "attention.sliding_window", 4096)),
            "layer_types": ["sliding_attention" if flag else "full_attention" for flag in flags]}


def _query_scalar(config: dict, odd_layers: int) -> int:
    odd = config["num_hidden_layers"] == odd_layers
    return config["hidden_size"] // config["num_attention_heads"] if odd else config["head_dim"]


def _gemma2(file: GgufFile, config: dict) -> dict:
    # The file does not hold the query scale: 27B alone (46 layers) divides by hidden / heads in place of the head's width.
    scalar = _query_scalar(config, odd_layers=46)
    return _gemma(file, config) | _windows(file, config, 2) | {
        "query_pre_attn_scalar": scalar, "attn_logit_softcapping": file.get("attn_logit_softcapping", 50.0),
        "final_logit_softcapping": file.get("final_logit_softcapping", 30.0)}


def _gemma3(file: GgufFile, config: dict) -> dict:
    # As above: 27B alone (62 layers) has a scale of its own.
    scalar = _query_scalar(config, odd_layers=62)
    return _gemma(file, config) | _windows(file, config, 6) | {
        "query_pre_attn_scalar": scalar, "rope_local_base_freq": float(file.get("rope.freq_base_swa", 10000.0)),
        "rope_theta": float(file.get("rope.freq_base", 1e6)), "attn_logit_softcapping": None,
        "final_logit_softcapping": file.get("final_logit_softcapping")}


FAMILIES: dict[str, Family] = {
    "llama": Family("llama", "LlamaForCausalLM", BLOCK, paired=True, fields=_llama),
    "qwen2": Family("qwen2", "Qwen2ForCausalLM", BLOCK, fields=_qwen),
    "qwen3": Family("qwen3", "Qwen3ForCausalLM", BLOCK, fields=_qwen),
    "smollm3": Family("smollm3", "SmolLM3ForCausalLM", BLOCK, paired=True, fields=_smollm3),
    "gemma": Family("gemma", "GemmaForCausalLM", BLOCK, offset=1.0, fields=_gemma),
    "gemma2": Family("gemma2", "Gemma2ForCausalLM", BLOCK_GEMMA, offset=1.0, fields=_gemma2),
    "gemma3": Family("gemma3_text", "Gemma3ForCausalLM", BLOCK_GEMMA, offset=1.0, fields=_gemma3)}


# ---------------------------------------------------------------------------------------------- config
def config_of(file: GgufFile, rope_factors: Callable[[str], list[float]]) -> dict[str, Any]:
    """config.json of a file whose architecture is in `FAMILIES`. ``rope_factors`` reads a small float tensor."""
    family = FAMILIES[file.architecture]
    _check_neutral(file)
    hidden, heads = int(number(file, "embedding_length")), int(number(file, "attention.head_count"))
    head_dim = int(number(file, "attention.key_length", hidden // heads))
    for key in ("attention.value_length", "rope.dimension_count"):
        if file.get(key, head_dim) != head_dim:
            raise NotSupported(f"{file.path.name}: {key} differs from the width of a head, which is not translated.",
                               value=file.get(key), head=head_dim)
    config = {
        "model_type": family.model_type, "architectures": [family.title], "hidden_size": hidden,
        "intermediate_size": int(number(file, "feed_forward_length")), "num_hidden_layers": int(number(file, "block_count")),
        "num_attention_heads": heads, "num_key_value_heads": int(number(file, "attention.head_count_kv", heads)),
        "head_dim": head_dim,
        "max_position_embeddings": int(number(file, "context_length")), "vocab_size": _shape(file, "token_embd.weight")[0],
        "rms_norm_eps": float(number(file, "attention.layer_norm_rms_epsilon")),
        "rope_theta": float(file.get("rope.freq_base", 10000.0)),
        "tie_word_embeddings": "output.weight" not in file.tensors}
    for ours, theirs in (("bos_token_id", "bos"), ("eos_token_id", "eos"), ("pad_token_id", "padding")):
        config[ours] = file.metadata.get(f"tokenizer.ggml.{theirs}_token_id")
    config["rope_scaling"] = rope_scaling(file, config, rope_factors)
    config |= family.fields(file, config)
    return config


def _check_neutral(file: GgufFile) -> None:
    for key, harmless in NEUTRAL.items():
        value = file.get(key, harmless)
        if value != harmless:
            raise NotSupported(f"{file.path.name}: {file.architecture}.{key} = {value} changes the arithmetic in a way that "
                               f"is not translated.", key=key, value=value)


def unread(file: GgufFile) -> tuple[str, ...]:
    """Keys of the architecture that nothing here reads."""
    prefix = file.architecture + "."
    return tuple(key for key in file.metadata if key.startswith(prefix) and key[len(prefix):] not in READ | NEUTRAL.keys())


def _shape(file: GgufFile, name: str) -> tuple[int, ...]:
    if name not in file.tensors:
        raise BrokenFile(f"{file.path.name}: the tensor {name!r} is missing.", tensor=name)
    return file.tensors[name].shape


def rope_scaling(file: GgufFile, config: dict, factors: Callable[[str], list[float]]) -> dict | None:
    """The rope_scaling of config.json; the file keeps some kinds as numbers and some as tensors of factors."""
    kind, trained = file.get("rope.scaling.type", "none"), config["max_position_embeddings"]
    original = int(file.get("rope.scaling.original_context_length", trained))
    if "rope_freqs.weight" in file.tensors:
        return _frequency_factors(factors("rope_freqs.weight"), config)
    if "rope_factors_long.weight" in file.tensors:
        return {"rope_type": "longrope", "long_factor": factors("rope_factors_long.weight"),
                "short_factor": factors("rope_factors_short.weight"), "original_max_position_embeddings": original,
                "factor": trained / original} | _given(file, attention_factor="rope.scaling.attn_factor")
    factor = float(file.get("rope.scaling.factor", file.get("rope.scale_linear", 1.0)))
    if kind == "none" and file.get("rope.scale_linear") is None or factor in (0.0, 1.0):
        return None
    if kind in ("linear", "none"):
        return {"rope_type": "linear", "factor": factor}
    if kind == "yarn":
        return {"rope_type": "yarn", "factor": factor, "original_max_position_embeddings": original} | _given(
            file, beta_fast="rope.scaling.yarn_beta_fast", beta_slow="rope.scaling.yarn_beta_slow")
    raise NotSupported(f"{file.path.name}: the rope scaling {kind!r} is not known.", kind=kind)


def _given(file: GgufFile, **keys: str) -> dict[str, float]:
    return {ours: float(file.get(theirs)) for ours, theirs in keys.items() if file.get(theirs) is not None}


def _frequency_factors(stored: list[float], config: dict) -> dict:
    """Divisors of the rotation frequencies. Llama 3's rule is named by its parameters if these give the very factors stored;
    anything else keeps the factors themselves, in the form that takes them one by one."""
    for original in (8192, 4096, 2048, 16384, 32768, 65536, 131072):
        rule = {"rope_type": "llama3", "factor": round(max(stored), 4), "low_freq_factor": 1.0, "high_freq_factor": 4.0,
                "original_max_position_embeddings": original}
        made = llama3_factors(rule, config["rope_theta"], config["head_dim"])
        if len(made) == len(stored) and all(abs(a - b) <= 1e-4 * b for a, b in zip(made, stored)):
            return rule
    return {"rope_type": "longrope", "short_factor": stored, "long_factor": stored, "factor": 1.0, "attention_factor": 1.0,
            "original_max_position_embeddings": config["max_position_embeddings"]}


def llama3_factors(rule: Mapping[str, Any], theta: float, head_dim: int) -> list[float]:
    """What Llama 3's scaling divides each of the head_dim / 2 frequencies by."""
    factor, low, high, original = (rule[k] for k in ("factor", "low_freq_factor", "high_freq_factor",
                                                     "original_max_position_embeddings"))
    out = []
    for i in range(0, head_dim, 2):
        wavelength = 2 * 3.141592653589793 * theta ** (i / head_dim)
        smooth = min(max((original / wavelength - low) / (high - low), 0.0), 1.0)
        out.append(1 / ((1 - smooth) / factor + smooth))
    return out


# ---------------------------------------------------------------------------------------------- names
def names_of(file: GgufFile) -> dict[str, str]:
    """transformers name → GGUF name, for every tensor. UnsupportedTensor naming one that the family has no place for."""
    block, names = FAMILIES[file.architecture].block, {}
    for name in file.tensors:
        if name in ROPE_TENSORS:
            continue
        match = re.fullmatch(r"blk\.(\d+)\.(\w+)\.(weight|bias)", name) or re.fullmatch(r"()(\w+)\.(weight|bias)", name)
        known = (block if match and match[1] else TOP).get(match[2]) if match else None
        if known is None:
            raise UnsupportedTensor(f"{file.path.name}: {file.architecture!r} models have no place for the tensor {name!r}.",
                                    tensor=name, type=file.tensors[name].type, shape=file.tensors[name].shape)
        names[f"model.layers.{match[1]}.{known}.{match[3]}" if match[1] else f"{known}.{match[3]}"] = name
    return names


def check_shapes(file: GgufFile, config: Mapping[str, Any], names: Mapping[str, str]) -> None:
    """Every matrix and norm that the config promises is there, in its shape. BrokenFile naming the first that is not."""
    h, i, d = config["hidden_size"], config["intermediate_size"], config["head_dim"]
    q, kv = config["num_attention_heads"] * d, config["num_key_value_heads"] * d
    block = {"attn_norm": (h,), "ffn_norm": (h,), "attn_q": (q, h), "attn_k": (kv, h), "attn_v": (kv, h),
             "attn_output": (h, q),
             "ffn_gate": (i, h), "ffn_up": (i, h), "ffn_down": (h, i)}
    extra = {"attn_q_norm": (d,), "attn_k_norm": (d,), "post_attention_norm": (h,), "post_ffw_norm": (h,)}
    expected = {"token_embd.weight": (config["vocab_size"], h), "output_norm.weight": (h,)}
    if not config["tie_word_embeddings"]:
        expected["output.weight"] = (config["vocab_size"], h)
    required = block | {k: v for k, v in extra.items() if k.startswith("post_") and k in FAMILIES[file.architecture].block}
    for layer in range(config["num_hidden_layers"]):
        expected |= {f"blk.{layer}.{key}.weight": shape for key, shape in required.items()}
        expected |= {f"blk.{layer}.{key}.weight": shape for key, shape in extra.items()
                     if f"blk.{layer}.{key}.weight" in file.tensors}
        expected |= {f"blk.{layer}.{key}.bias": shape[:1] for key, shape in block.items()
                     if f"blk.{layer}.{key}.bias" in file.tensors}
    for name, shape in expected.items():
        if _shape(file, name) != shape:
            raise BrokenFile(f"{file.path.name}: the tensor {name!r} does not have the shape that the header implies.",
                             tensor=name,
                             shape=file.tensors[name].shape, expected=shape)
    for name in sorted(set(names.values()) - expected.keys()):
        raise BrokenFile(f"{file.path.name}: the tensor {name!r} belongs to no layer of this model.", tensor=name,
                         layers=config["num_hidden_layers"])
