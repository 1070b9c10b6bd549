"""A Llama of any size with random weights, for speed alone: every engine that reads the file does the same work.

    python -m benchmarks.synthetic OUT.gguf [--shape 1.2b] [--type Q4_0] [--tokenizer STARTER.gguf]
    python -m benchmarks.synthetic OUT_FOLDER --type BF16 …       # the same weights as safetensors, for transformers and vLLM

Knows shapes, a scale at which activations stay near one (1/sqrt(columns); matrices that write to the residual stream also by
1/sqrt(2 layers)), and how llama.cpp names things. Both forms hold the same numbers, drawn from one seed a tensor, so a 4-bit
file and a bfloat16 folder are one model. Refuses to know any engine. The tokenizer, template included, is that of another
GGUF file; what such a model says is noise, so no quality may ever be read from it.
"""

from __future__ import annotations

import argparse
import json
import shutil
import sys
import zlib
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import gguf
import numpy as np
from gguf.quants import quantize

EPSILON, THETA, CONTEXT = 1e-5, 10_000.0, 8192
BLOCK = {"attn_q": "self_attn.q_proj", "attn_k": "self_attn.k_proj", "attn_v": "self_attn.v_proj",
         "attn_output": "self_attn.o_proj", "ffn_gate": "mlp.gate_proj", "ffn_up": "mlp.up_proj", "ffn_down": "mlp.down_proj",
         "attn_norm": "input_layernorm", "ffn_norm": "post_attention_layernorm"}
TOP = {"token_embd": "model.embed_tokens", "output_norm": "model.norm", "output": "lm_head"}


@dataclass(frozen=True)
class Shape:
    """Sizes of a Llama, in elements; ``head`` is the width of one attention head."""

    hidden: int
    layers: int
    heads: int
    kv_heads: int
    inner: int
    vocab: int = 49152

    @property
    def head(self) -> int:
        return self.hidden // self.heads

    def tensors(self) -> Iterator[tuple[str, tuple[int, ...]]]:
        """(llama.cpp's name without ".weight", shape [rows, columns] or [columns]) in the order of the file."""
        yield "token_embd", (self.vocab, self.hidden)
        kv = self.kv_heads * self.head
        for layer in range(self.layers):
            for name, shape in (
                    ("attn_norm", (self.hidden,)), ("attn_q", (self.hidden, self.hidden)), ("attn_k", (kv, self.hidden)),
                    ("attn_v", (kv, self.hidden)), ("attn_output", (self.hidden, self.hidden)), ("ffn_norm", (self.hidden,)),
                    ("ffn_gate", (self.inner, self.hidden)), ("ffn_up", (self.inner, self.hidden)),
                    ("ffn_down", (self.hidden, self.inner))):
                yield f"blk.{layer}.{name}", shape
        yield "output_norm", (self.hidden,)
        yield "output", (self.vocab, self.hidden)


SHAPES = {"tiny": Shape(256, 2, 4, 2, 512), "1.2b": Shape(2048, 16, 32, 8, 8192), "8b": Shape(4096, 32, 32, 8, 14336)}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("out", type=Path, help="a new .gguf file, or a new folder for safetensors")
    parser.add_argument("--shape", choices=sorted(SHAPES), default="1.2b")
    parser.add_argument("--type", choices=("Q4_0", "Q4_1", "Q8_0", "F16", "BF16"), default="Q4_0")
    parser.add_argument("--tokenizer", type=Path, required=True, help="a GGUF file, or for a folder one with tokenizer.json")
    given = parser.parse_args()
    if given.out.exists():
        parser.error(f"{given.out} exists already.")
    if given.out.suffix == ".gguf":
        write_gguf(given.out, SHAPES[given.shape], given.type, given.tokenizer)
    elif given.type == "BF16":
        write_folder(given.out, SHAPES[given.shape], given.tokenizer)
    else:
        parser.error("A folder of safetensors is written in BF16 only.")
    return 0


def values(shape: Shape, name: str, size: tuple[int, ...]) -> np.ndarray:
    """float32 of one tensor, the same at every call. Norms are ones; logits get a spread of about three."""
    if len(size) == 1:
        return np.ones(size, np.float32)
    scale = {"token_embd": 1.0, "output": 3 * size[1] ** -0.5}.get(name, size[1] ** -0.5)
    if name.endswith(("attn_output", "ffn_down")):
        scale *= (2 * shape.layers) ** -0.5
    noise = np.random.default_rng(zlib.crc32(name.encode())).standard_normal(size, np.float32)
    return noise * np.float32(scale)


# ---------------------------------------------------------------------------------------------- GGUF
def write_gguf(out: Path, shape: Shape, kind: str, tokenizer: Path) -> None:
    """One file, head apart from the embeddings, every matrix of the same type, norms in float32."""
    writer = gguf.GGUFWriter(out, "llama")
    writer.add_name(f"synthetic {out.stem}")
    writer.add_block_count(shape.layers)
    writer.add_context_length(CONTEXT)
    writer.add_embedding_length(shape.hidden)
    writer.add_feed_forward_length(shape.inner)
    writer.add_head_count(shape.heads)
    writer.add_head_count_kv(shape.kv_heads)
    writer.add_layer_norm_rms_eps(EPSILON)
    writer.add_rope_freq_base(THETA)
    writer.add_rope_dimension_count(shape.head)
    writer.add_vocab_size(shape.vocab)
    writer.add_file_type(gguf.LlamaFileType[{"F16": "MOSTLY_F16", "BF16": "MOSTLY_BF16"}.get(kind, f"MOSTLY_{kind}")])
    copy_tokenizer(writer, tokenizer, shape.vocab)
    stored = gguf.GGMLQuantizationType[kind]
    for name, size in shape.tensors():
        data = values(shape, name, size)
        if data.ndim == 2:
            writer.add_tensor(name + ".weight", quantize(data, stored), raw_dtype=stored)
        else:
            writer.add_tensor(name + ".weight", data)
        print(f"\r{name:24}", end="", file=sys.stderr)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    print(f"\r{out}: {out.stat().st_size:,} bytes", file=sys.stderr)


def copy_tokenizer(writer: gguf.GGUFWriter, source: Path, vocab: int) -> None:
    """Every key under "tokenizer." as it stands there."""
    fields = gguf.GGUFReader(source).fields
    tokens = len(fields["tokenizer.ggml.tokens"].data)
    if tokens != vocab:
        raise SystemExit(f"{source} has {tokens} tokens; the shape has {vocab}.")
    for key, field in fields.items():
        if key.startswith("tokenizer."):
            inner = field.types[1] if len(field.types) > 1 else None
            writer.add_key_value(key, field.contents(), field.types[0], inner)


# ---------------------------------------------------------------------------------------------- safetensors
def write_folder(out: Path, shape: Shape, tokenizer: Path) -> None:
    """config.json, model.safetensors in bfloat16 and the tokenizer's files of the folder ``tokenizer``.

    A GGUF file keeps the two halves of each q and k head interleaved, as llama.cpp's converter does; transformers keeps them
    apart. The same model therefore needs its rows put back.
    """
    import torch
    from safetensors.torch import save_file
    out.mkdir(parents=True)
    tensors = {}
    for name, size in shape.tensors():
        data = torch.from_numpy(values(shape, name, size))
        if name.endswith(("attn_q", "attn_k")):
            data = data.view(-1, shape.head // 2, 2, size[1]).transpose(1, 2).reshape(size)
        tensors[there(name) + ".weight"] = data.to(torch.bfloat16).contiguous()
    save_file(tensors, out / "model.safetensors", {"format": "pt"})
    (out / "config.json").write_text(json.dumps(config(shape), indent=1))
    for file in tokenizer.iterdir():
        if file.name.startswith("tokenizer") or file.name in ("generation_config.json", "chat_template.jinja"):
            shutil.copyfile(file, out / file.name)


def there(name: str) -> str:
    """The transformers name of a tensor, without ".weight"."""
    if name in TOP:
        return TOP[name]
    _, layer, part = name.split(".")
    return f"model.layers.{layer}.{BLOCK[part]}"


def config(shape: Shape) -> dict:
    return {"model_type": "llama", "architectures": ["LlamaForCausalLM"], "hidden_size": shape.hidden,
            "intermediate_size": shape.inner, "num_hidden_layers": shape.layers, "num_attention_heads": shape.heads,
            "num_key_value_heads": shape.kv_heads, "head_dim": shape.head, "vocab_size": shape.vocab,
            "max_position_embeddings": CONTEXT, "rms_norm_eps": EPSILON, "rope_theta": THETA, "hidden_act": "silu",
            "tie_word_embeddings": False, "bos_token_id": 1, "eos_token_id": 2, "dtype": "bfloat16"}


if __name__ == "__main__":
    sys.exit(main())
