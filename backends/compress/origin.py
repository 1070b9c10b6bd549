"""The model that a variant is made from: its weights as floats, its tokenizer, and the files that go along unchanged.

Knows float safetensors folders and GGUF files (dequantized, and labelled so). A model that is quantized already is refused.
"""

from __future__ import annotations

import hashlib
import json
import shutil
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer, processors

from backends.base import ModelDir, NotSupported, UnknownFormat
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

    def parent(self, progress: Any) -> dict[str, Any]:
        """The parent in the variant's manifest: name, format and SHA-256 of its weight files."""
        known = {item.get("path"): item for item in self.model.manifest.get("files", ()) if isinstance(item, Mapping)}
        rows = []
        for path in sorted(self._weights()):
            row = known.get(path.name)
            if row is None or row.get("size") != path.stat().st_size:
                row = {"path": path.name, "size": path.stat().st_size, "sha256": sha256(path)}
            rows.append({key: row[key] for key in ("path", "size", "sha256")})
        return {"name": self.model.name, "format": self.label, "revision": self.model.manifest.get("revision"), "files": rows}

    def _weights(self) -> list[Path]:
        if self.gguf is not None:
            return sorted({tensor.path for tensor in self.gguf.tensors.values()})
        return [self.model.folder / name for name in self.model.ending(".safetensors")]

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
    note = f"Made from {label} weights, dequantized: quantized twice, so it differs more from the original model than its report says."
    return Origin(model, source, text, label, (note,), file)


# ---------------------------------------------------------------------------------------------- a GGUF's tokenizer
def _write_gguf_text(file: GgufFile, text: TextCodec, config: Mapping[str, Any], folder: Path) -> None:
    tokenizer = Tokenizer.from_str(text.tokenizer.to_str())
    names = text.names
    if text.add_bos and text.bos_id is not None:
        bos = tokenizer.id_to_token(text.bos_id)
        tokenizer.post_processor = _bos_first(tokenizer, bos, text.bos_id)
    tokenizer.save(str(folder / "tokenizer.json"))
    templates = {key: value for key, value in file.metadata.items() if key.startswith("tokenizer.chat_template") and isinstance(value, str)}
    extra = {"chat_template": _templates(templates)} if templates else {}
    _dump(folder / "tokenizer_config.json", {"tokenizer_class": "PreTrainedTokenizerFast", "clean_up_tokenization_spaces": False,
                                             **names, **extra})
    _dump(folder / "generation_config.json", {"bos_token_id": text.bos_id, "eos_token_id": sorted(text.eos_ids),
                                              "pad_token_id": config.get("pad_token_id")})


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
