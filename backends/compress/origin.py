"""The model that a variant is made from: its weights as floats, its tokenizer, and the files that go along unchanged.

Knows float safetensors folders and GGUF files (dequantized, and labelled so). A model that is quantized already is refused.
"""

from __future__ import annotations

import hashlib
import json
import shutil
from collections.abc import Collection, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from tokenizers import Tokenizer, processors
from torch import Tensor

from backends.base import Cancel, ModelDir, NotSupported, ProgressFn, UnknownFormat
from backends.engine.hf_load import causal_config, load_folder
from backends.engine.text import TextCodec
from backends.engine.weights import SafetensorsSource, WeightSource
from backends.gguf_file import GgufFile, read_model

OWN = {"config.json", "manifest.json", "quantize_config.json", "quant_config.json"}     # written anew
ALONG = (".json", ".jinja", ".txt", ".model", ".tiktoken", ".md")                       # never code, never weights


@dataclass(frozen=True)
class Origin:
    """``label``: what the weights were, for people. ``notes`` go into the variant's manifest."""

    model: ModelDir
    source: WeightSource
    text: TextCodec
    label: str
    notes: tuple[str, ...]
    gguf: GgufFile | None = None

    def digest(self) -> str:
        """A hash over names, sizes and times of the weight files: whose part a half-done job is."""
        digest = hashlib.sha256()
        for path in sorted(self._weights()):
            state = path.stat()
            digest.update(f"{path.name}\0{state.st_size}\0{state.st_mtime_ns}\n".encode())
        return digest.hexdigest()

    def parent(self) -> dict[str, Any]:
        """The parent in the variant's manifest: name, format and SHA-256 of its weight files."""
        known = {item.get("path"): item for item in self.model.manifest.get("files", ()) if isinstance(item, Mapping)}
        rows = []
        for path in sorted(self._weights()):
            row = known.get(path.name)
            if row is None or row.get("size") != path.stat().st_size:
                row = {"path": path.name, "size": path.stat().st_size, "sha256": sha256(path)}
            rows.append({key: row[key] for key in ("path", "size", "sha256")})
        return {"name": self.model.name, "format": self.label, "revision": self.model.manifest.get("revision"),
                "files": rows}

    def _weights(self) -> list[Path]:
        if self.gguf is not None:
            return sorted({tensor.path for tensor in self.gguf.tensors.values()})
        return [self.model.folder / name for name in self.model.ending(".safetensors")]

    def whole(self, progress: ProgressFn, cancel: Cancel) -> Origin:
        """The same model read by transformers as a whole, for files whose names or shapes it translates (experts, old
        names).
        It is then in memory in its own type until the job ends."""
        if self.gguf is not None:
            return self
        self.source.close()
        return replace(self, source=_Whole(self.model, self.source.config, progress, cancel))

    def write_text(self, folder: Path) -> None:
        """Tokenizer, template, generation defaults, licence: copied, or written from what the GGUF file carries."""
        if self.gguf is not None:
            _write_gguf_text(self.gguf, self.text, self.source.config, folder)
            return
        for name in self.model.files:
            path = self.model.folder / name
            wanted = name.lower().endswith(ALONG) or path.stem.upper().startswith(("LICENSE", "NOTICE"))
            if wanted and name not in OWN and not name.endswith(".index.json"):
                (folder / name).parent.mkdir(parents=True, exist_ok=True)
                shutil.copyfile(path, folder / name)


class _Whole:
    """A `WeightSource` over a module that transformers has read."""

    def __init__(self, model: ModelDir, config: Mapping[str, Any], progress: ProgressFn, cancel: Cancel) -> None:
        stored = str(config.get("dtype") or config.get("torch_dtype") or "float32").removeprefix("torch.")
        dtype = getattr(torch, stored, torch.float32)
        place = SimpleNamespace(dtype=dtype, weight_dtype=dtype, device=torch.device("cpu"))
        self.config = config
        self._module, _ = load_folder(model.folder, causal_config(config), place, progress, cancel)
        self._tensors = dict(self._module.state_dict())

    def names(self) -> Collection[str]:
        return self._tensors.keys()

    def tensor(self, name: str) -> Tensor:
        return self._tensors[name]

    def linear(self, module: str) -> tuple[Tensor, Tensor | None]:
        return self._tensors[f"{module}.weight"], self._tensors.get(f"{module}.bias")

    def close(self) -> None:
        self._tensors = {}


def sha256(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def open_origin(model: ModelDir) -> Origin:
    """NotSupported for a model that is quantized in a way that is no GGUF; UnknownFormat; what its files raise."""
    if model.path.is_file() and model.path.suffix.lower() == ".gguf":
        return _open_gguf(model)
    if "quantization_config" in model.config or "quantize_config.json" in model.files:
        raise NotSupported(f"{model.name!r} is quantized already.", model=model.name,
                           remedy="Start from the float model that it was made from.")
    if not model.config:
        raise UnknownFormat(f"{model.name!r} is no folder with a config.json and no GGUF file.", model=model.name)
    source = SafetensorsSource(model)
    stored = str(model.config.get("dtype") or model.config.get("torch_dtype") or "").removeprefix("torch.")
    return Origin(model, source, TextCodec.from_folder(model.folder), f"safetensors {stored}".strip(), ())


def _open_gguf(model: ModelDir) -> Origin:
    from backends.engine.gguf_config import FAMILIES
    from backends.engine.gguf_foreign import ForeignGguf
    from backends.engine.gguf_text import text_of
    from backends.engine.gguf_weights import GgufWeights
    file = read_model(model.path)
    source = GgufWeights(file) if file.architecture in FAMILIES else ForeignGguf(file)
    text, _ = text_of(file)
    label = f"GGUF {file.weight_type()}"
    note = (f"Made from {label} weights, dequantized: it was quantized twice, and differs from the original model by more "
            f"than a comparison with that file shows.")
    return Origin(model, source, text, label, (note,), file)


# ---------------------------------------------------------------------------------------------- a GGUF's tokenizer
def _write_gguf_text(file: GgufFile, text: TextCodec, config: Mapping[str, Any], folder: Path) -> None:
    tokenizer = _without_filler(text.tokenizer, text.vocab.size)
    names = text.names
    if text.add_bos and text.bos_id is not None:
        bos = tokenizer.id_to_token(text.bos_id)
        tokenizer.post_processor = _bos_first(tokenizer, bos, text.bos_id)
    tokenizer.save(str(folder / "tokenizer.json"))
    templates = {key: value for key, value in file.metadata.items() if key.startswith("tokenizer.chat_template")
                 and isinstance(value, str)}
    extra = {"chat_template": _templates(templates)} if templates else {}
    _dump(folder / "tokenizer_config.json", {"tokenizer_class": "PreTrainedTokenizerFast",
                                             "clean_up_tokenization_spaces": False,
                                             **names, **extra})
    _dump(folder / "generation_config.json", {"bos_token_id": text.bos_id, "eos_token_id": sorted(text.eos_ids),
                                              "pad_token_id": config.get("pad_token_id")})


def _without_filler(tokenizer: Tokenizer, size: int) -> Tokenizer:
    """A copy that ends where the real tokens end: a GGUF file fills a padded head with unused ones, a tokenizer.json does
    not."""
    data = json.loads(tokenizer.to_str())
    vocabulary = data["model"]["vocab"]
    data["model"]["vocab"] = ({token: id for token, id in vocabulary.items() if id < size} if isinstance(vocabulary, dict)
                              else vocabulary[:size])
    data["added_tokens"] = [token for token in data["added_tokens"] if token["id"] < size]
    return Tokenizer.from_str(json.dumps(data))


def _bos_first(tokenizer: Tokenizer, bos: str, bos_id: int) -> Any:
    template = processors.TemplateProcessing(single=[bos, "$A"], pair=[bos, "$A", bos, "$B"], special_tokens=[(bos, bos_id)])
    return template if tokenizer.post_processor is None else processors.Sequence([tokenizer.post_processor, template])


def _templates(found: Mapping[str, str]) -> str | list[dict[str, str]]:
    prefix = "tokenizer.chat_template"
    if set(found) == {prefix}:
        return found[prefix]
    return [{"name": key[len(prefix) + 1:] or "default", "template": value} for key, value in found.items()]


def _dump(path: Path, value: Mapping[str, Any]) -> None:
    kept = {key: item for key, item in value.items() if item is not None}
    path.write_text(json.dumps(kept, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")
