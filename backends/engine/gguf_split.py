"""How byte-level BPE vocabularies cut text into words before merging, by the name that a GGUF file gives for it.

``tokenizer.ggml.pre`` names the rule; the rule itself is that of the tokenizer the name stands for. A name that is not
here is refused: a wrong cut gives wrong ids, and the model answers a little worse without a word about it.
"""

from __future__ import annotations

from dataclasses import dataclass

from tokenizers import Regex, normalizers, pre_tokenizers

from backends.errors import UnknownFormat

WORDS = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"                          # GPT-2
_SHORT = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)"
_END = r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
CL100K = _SHORT + r"|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}" + _END      # GPT-4, Llama 3
SINGLE_DIGITS = _SHORT + r"|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}" + _END      # Qwen 2
MARKS = _SHORT + (r"|[^\r\n\p{L}\p{N}]?[\p{L}\p{M}]+|\p{N}| ?[^\s\p{L}\p{M}\p{N}]+[\r\n]*|\s*[\r\n]+"
                  r"|\s+(?!\S)|\s+")      # Qwen 3.5
_UPPER, _LOWER = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]", r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]"
_END_SLASH = r"| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
TEKKEN = rf"[^\r\n\p{{L}}\p{{N}}]?{_UPPER}*{_LOWER}+|[^\r\n\p{{L}}\p{{N}}]?{_UPPER}+{_LOWER}*|\p{{N}}" + _END_SLASH
O200K = (rf"[^\r\n\p{{L}}\p{{N}}]?{_UPPER}*{_LOWER}+{_SHORT}?|[^\r\n\p{{L}}\p{{N}}]?{_UPPER}+{_LOWER}*{_SHORT}?"
         r"|\p{N}{1,3}"
         + _END_SLASH)
NO_PUNCTUATION = r" ?[^(\s|.,!?…。，、।۔،)]+"                                                                  # Bloom
CJK = r"[一-龥ࠀ-一가-퟿]+"
# Letters of scripts with case, without the mathematical ones: what DeepSeek's list of ranges amounts to.
_CASED = r"\s?(?:(?![\x{1D400}-\x{1D7FF}])[\p{Lu}\p{Ll}\p{Lt}])+"
_DEEPSEEK3 = (r"[!\"#$%&'()*+,\-./:;<=>?@\[\\\]^_`{|}~][A-Za-z]+|[^\r\n\p{L}\p{P}\p{S}]?[\p{L}\p{M}]+| ?[\p{P}\p{S}]+[\r\n]*"
              r"|\s*[\r\n]+|\s+(?!\S)|\s+")


@dataclass(frozen=True)
class Split:
    """``patterns``: cuts made one after another. ``whole``: a word that is a token needs no merges. ``nfc``: text is
    composed first. ``bos``: texts begin with BOS where the file says nothing about it."""

    patterns: tuple[str, ...]
    whole: bool = False
    nfc: bool = False
    bos: bool = False


def _by_name(*groups: tuple[str, Split]) -> dict[str, Split]:
    return {name: split for names, split in groups for name in names.split()}


SPLITS: dict[str, Split] = _by_name(
    ("gpt-2 phi-2 mpt olmo jais trillion granite-docling gigachat exaone4 mellum a.x-4.0 modern-bert roberta-bpe",
     Split((WORDS,))),
    ("smollm starcoder refact codeshell exaone minerva-7b mellum2", Split((r"\p{N}", WORDS))),
    ("command-r", Split((r"\p{N}", WORDS), nfc=True)),
    ("llama3 llama-v3 llama-bpe falcon3 falcon-h1 pixtral midm-2.0 lfm2", Split((CL100K,), whole=True, bos=True)),
    ("dbrx smaug-bpe chatglm-bpe glm4", Split((CL100K,))),
    ("qwen2", Split((SINGLE_DIGITS,), nfc=True)),
    ("deepseek-r1-qwen kormo f2llmv2 megrez stablelm2 hunyuan solar-open grok-2", Split((SINGLE_DIGITS,))),
    ("qwen35", Split((MARKS,), nfc=True)),
    ("tekken", Split((TEKKEN,), whole=True, bos=True)),
    ("gpt-4o llama4 kanana2 talkie minimax-m2", Split((O200K,))),
    ("falcon", Split((r"[\p{P}\$\+<=>\^~\|`]+", WORDS, r"[0-9][0-9][0-9]"))),
    ("bloom poro-chat gpt3-finnish", Split((NO_PUNCTUATION,))),
    ("viking", Split((NO_PUNCTUATION, r"\p{N}"))),
    ("deepseek-llm", Split((r"[\r\n]", _CASED, r"\s?[!-/:-~！-／：-～‘-‟　-。]+", r"\s+$", CJK, r"\p{N}+"))),
    ("deepseek-coder", Split((r"[\r\n]", r"\s?\p{L}+", r"\s?\p{P}+", CJK, r"\p{N}"))),
    ("deepseek-v3 hunyuan-dense joyai-llm", Split((r"\p{N}{1,3}", r"[一-龥぀-ゟ゠-ヿ]+", _DEEPSEEK3))),
    ("default", Split((r"[\p{P}\$\+<=>\^~\|]+", WORDS, r"\p{N}+", r"[0-9][0-9][0-9]"))))


def split_of(name: str | None) -> Split:
    """UnknownFormat naming a rule that is not known; None (older files) is "default"."""
    if name is not None and name not in SPLITS:
        raise UnknownFormat(f"The file's tokenizer cuts text by the rule {name!r}, which is not known here.", pre=name,
                            remedy="Use the safetensors folder of this model, or another conversion.")
    return SPLITS[name or "default"]


def normalizer(split: Split) -> normalizers.Normalizer | None:
    return normalizers.NFC() if split.nfc else None


def pre_tokenizer(split: Split) -> pre_tokenizers.PreTokenizer:
    cuts = [pre_tokenizers.Split(Regex(pattern), "isolated") for pattern in split.patterns]
    return pre_tokenizers.Sequence([*cuts, pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)])
