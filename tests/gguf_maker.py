"""Makes small GGUF files for tests: well-formed ones from transformers models as llama.cpp's converter lays them out, with
the `gguf` package as the writer, and malformed ones byte by byte."""

from __future__ import annotations

import struct
from pathlib import Path

import gguf
import numpy as np
import torch

TYPES = gguf.GGMLQuantizationType
# Where each block type keeps its fp16 numbers; the rest of a block may hold any bits.
HALVES = {"Q2_K": (80, 82), "Q3_K": (108,), "Q4_K": (0, 2), "Q5_K": (0, 2), "Q6_K": (208,), "Q4_0": (0,), "Q4_1": (0, 2),
          "Q5_0": (0,),
          "Q5_1": (0, 2), "Q8_0": (0,)}
HF_NAMES = {"self_attn.q_proj": "attn_q", "self_attn.k_proj": "attn_k", "self_attn.v_proj": "attn_v",
            "self_attn.o_proj": "attn_output",
            "mlp.gate_proj": "ffn_gate", "mlp.up_proj": "ffn_up", "mlp.down_proj": "ffn_down",
            "input_layernorm": "attn_norm",
            "self_attn.q_norm": "attn_q_norm", "self_attn.k_norm": "attn_k_norm", "post_attention_layernorm": "ffn_norm"}
GEMMA_NAMES = HF_NAMES | {"post_attention_layernorm": "post_attention_norm", "pre_feedforward_layernorm": "ffn_norm",
                          "post_feedforward_layernorm": "post_ffw_norm"}


def random_blocks(kind: str, rows: int, columns: int, seed: int = 0, size: float = 0.01) -> np.ndarray:
    """uint8 [rows, bytes]: any bits, with finite fp16 scales of the given size."""
    weights, width = gguf.GGML_QUANT_SIZES[TYPES[kind]]
    rng = np.random.default_rng(seed)
    raw = rng.integers(0, 256, (rows, columns // weights, width), dtype=np.uint8)
    for at in HALVES[kind]:
        halves = rng.normal(0, size, raw.shape[:2]).astype(np.float16)
        raw[..., at:at + 2] = halves[..., None].view(np.uint8)
    return raw.reshape(rows, -1)


def interleave(weight: torch.Tensor, heads: int) -> torch.Tensor:
    """What llama.cpp's converter does to q and k of Llama: rows j and j + d/2 of a head become neighbours."""
    return weight.reshape(heads, 2, weight.shape[0] // heads // 2, *weight.shape[1:]).swapaxes(1, 2).reshape(weight.shape)


def to_gguf_tensors(model, paired: bool = False, offset: float = 0.0, names: dict = HF_NAMES) -> dict[str, np.ndarray]:
    """float32 arrays under GGUF names of a transformers causal LM."""
    config, out = model.config, {}
    for name, value in model.state_dict().items():
        parts = name.split(".")
        value = value.float()
        if parts[:2] == ["model", "layers"]:
            key = names[".".join(parts[3:-1])]
            if paired and key in ("attn_q", "attn_k"):
                value = interleave(value, config.num_attention_heads if key == "attn_q" else config.num_key_value_heads)
            title = f"blk.{parts[2]}.{key}.{parts[-1]}"
        else:
            title = {"model.embed_tokens": "token_embd", "model.norm": "output_norm",
                     "lm_head": "output"}[name.rsplit(".", 1)[0]] + ".weight"
            if title == "output.weight" and config.tie_word_embeddings:
                continue
        out[title] = (value + offset if offset and title.endswith("norm.weight") else value).contiguous().numpy()
    return out


def base_metadata(config, **more) -> dict:
    """The keys that every architecture has, without the prefix."""
    return {"context_length": config.max_position_embeddings, "embedding_length": config.hidden_size,
            "block_count": config.num_hidden_layers,
            "feed_forward_length": config.intermediate_size, "attention.head_count": config.num_attention_heads,
            "attention.head_count_kv": config.num_key_value_heads, "attention.layer_norm_rms_epsilon": config.rms_norm_eps,
            "attention.key_length": config.head_dim, "attention.value_length": config.head_dim} | more


def byte_vocabulary(size: int = 320) -> dict:
    """A byte-level vocabulary with one merge. 256 <s>, 257 </s>, 258 "Ġa"; the rest fills a padded head."""
    from tokenizers import pre_tokenizers
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokens = [*alphabet, "<s>", "</s>", "Ġa", *(f"[PAD{i}]" for i in range(259, size))]
    return {"tokenizer.ggml.model": "gpt2", "tokenizer.ggml.pre": "gpt-2", "tokenizer.ggml.tokens": tokens,
            "tokenizer.ggml.token_type": [1] * 256 + [3, 3, 1] + [5] * (size - 259), "tokenizer.ggml.merges": ["Ġ a"],
            "tokenizer.ggml.bos_token_id": 256, "tokenizer.ggml.eos_token_id": 257}


def write(path: Path, architecture: str, metadata: dict, tensors: dict) -> Path:
    """``metadata`` keys without a dot-prefixed home get the architecture's; tensors: arrays, or (bytes, type name)."""
    writer = gguf.GGUFWriter(str(path), architecture)
    for key, value in metadata.items():
        full = key if key.split(".")[0] in ("general", "tokenizer", "split") else f"{architecture}.{key}"
        if isinstance(value, bool):
            writer.add_bool(full, value)
        elif isinstance(value, int):
            writer.add_int32(full, value) if value < 0 else writer.add_uint32(full, value)
        elif isinstance(value, float):
            writer.add_float32(full, value)
        elif isinstance(value, str):
            writer.add_string(full, value)
        elif len(value):
            writer.add_array(full, list(value))
    for name, value in tensors.items():
        data, kind = value if isinstance(value, tuple) else (value, None)
        writer.add_tensor(name, data, raw_dtype=None if kind is None else TYPES[kind])
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


# ---------------------------------------------------------------------------------------------- byte by byte
def text(value: str | bytes) -> bytes:
    raw = value.encode() if isinstance(value, str) else value
    return struct.pack("<Q", len(raw)) + raw


def pair(key: str, kind: int, payload: bytes) -> bytes:
    return text(key) + struct.pack("<I", kind) + payload


def entry(name: str, dims: list[int], kind: int, offset: int) -> bytes:
    return text(name) + struct.pack(f"<I{len(dims)}QIQ", len(dims), *dims, kind, offset)


def raw_file(path: Path, pairs: list[bytes], entries: list[bytes], data: bytes = b"", *, version: int = 3,
             magic: bytes = b"GGUF",
             counts: tuple[int, int] | None = None, alignment: int = 32) -> Path:
    tensors, keys = counts or (len(entries), len(pairs))
    head = magic + struct.pack("<IQQ", version, tensors, keys) + b"".join(pairs) + b"".join(entries)
    path.write_bytes(head + b"\0" * (-len(head) % alignment) + data)
    return path
