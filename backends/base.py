"""The vocabulary of the whole program: frozen values, protocols, errors. Standard library only.

Everything that crosses a border (page to service, service to engine, process to process) is one of these values.
They validate themselves when made, so that a bad value is refused where it enters, by the name of its field.
"""

from __future__ import annotations

import math
import threading
from array import array
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, fields
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, Protocol, runtime_checkable

from backends.characters import check_characters
from backends.errors import (  # noqa: F401  (re-exported: one place to import the vocabulary from)
    AddressRefused, BadSetting, BrokenFile, Cancelled, ChecksumMismatch, ConfigConflict, ContextTooLong, DiskFull,
    DraftParent, EngineDied, EngineStopping, FetchFailed, GainzError, InvalidRequest, JobDied, LoadError,
    MissingRequirement, ModelNotFound, ModelNotLoaded, NameRefused, NameTaken, NoChatTemplate, NotMeasurable,
    NotSupported, OutOfMemory, PortTaken, QueueFull, RegistryError, RemoteFailed, RemoteRefused, RemoteUnreachable,
    StepFailed, UnknownFormat, UnsafeFile, UnsupportedTensor)

if TYPE_CHECKING:  # annotations only: this module never imports torch
    from torch import Tensor

ROLES = ("system", "developer", "user", "assistant", "tool")
FinishReason = Literal["stop", "length", "cancelled", "time_limit", "error"]
MAX_STOPS, MAX_STOP_CHARS, MAX_BIASES, MAX_LOGPROBS, MAX_CHOICES, MAX_TOKENS = 64, 1024, 1024, 20, 128, 2**31 - 1
MAX_SCHEMA_CHARS = 1 << 18
MAX_ENTRIES = 5000                      # files and folders in a model's folder


# ---------------------------------------------------------------------------------------------- requests
@dataclass(frozen=True)
class Message:
    """One turn of a chat. ``role``: one of `ROLES`; which of them a model's template takes, it says itself."""

    role: str
    content: str
    name: str | None = None
    extra: tuple[tuple[str, Any], ...] = ()  # further template fields (tool_calls, tool_call_id …)

    def __post_init__(self) -> None:
        if self.role not in ROLES:
            raise InvalidRequest(f"The role of a message is one of {', '.join(ROLES)}, not {_short(self.role)}.", field="role")
        if not isinstance(self.content, str):
            raise InvalidRequest(f"The content of a message must be text, not {type(self.content).__name__}.", field="content")


def _short(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 40 else text[:39] + "…"


def _is_whole(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def _check(name: str, value: Any, low: float, high: float, *, whole: bool = False, what: str = "") -> None:
    """``what``: how the value is called where its field holds more than it."""
    kind, called = "a whole number" if whole else "a number", what or name
    if isinstance(value, bool) or not isinstance(value, int if whole else (int, float)):
        raise InvalidRequest(f"{called} must be {kind}, not {type(value).__name__}.", field=name)
    if not whole and not math.isfinite(value) or not low <= value <= high:
        raise InvalidRequest(f"{called} must be from {low} to {high}.", field=name, **{name: value})


TEXT_TOKENS = 256                       # of a continued text, where nothing is said: it has no end of its own


@dataclass(frozen=True)
class Sampling:
    """How tokens are chosen. Order: bias and penalties, temperature, top-k, top-p on renormalised mass, min-p.

    temperature 0 is greedy; top_k 0 or -1, top_p 1 and min_p 0 are off; max_tokens None runs to the end of the
    context; logprobs None gives none, 0 the chosen token's, k > 0 also the k best; seed None draws a fresh one.
    """

    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    frequency_penalty: float = 0.0
    presence_penalty: float = 0.0
    logit_bias: tuple[tuple[int, float], ...] = ()
    seed: int | None = None
    max_tokens: int | None = None
    min_tokens: int = 0
    stop: tuple[str, ...] = ()
    stop_ids: tuple[int, ...] = ()
    ignore_eos: bool = False
    logprobs: int | None = None
    prompt_logprobs: int | None = None
    n: int = 1

    def __post_init__(self) -> None:
        _check("temperature", self.temperature, 0, 100)
        _check("top_k", self.top_k, -1, MAX_TOKENS, whole=True)
        _check("top_p", self.top_p, 0, 1)
        _check("min_p", self.min_p, 0, 1)
        _check("repetition_penalty", self.repetition_penalty, 0.01, 100)
        _check("frequency_penalty", self.frequency_penalty, -2, 2)
        _check("presence_penalty", self.presence_penalty, -2, 2)
        for name, low, high in (("seed", -2**63, 2**64 - 1), ("max_tokens", 0, MAX_TOKENS), ("logprobs", 0, MAX_LOGPROBS),
                                ("prompt_logprobs", 0, MAX_LOGPROBS)):
            if getattr(self, name) is not None:
                _check(name, getattr(self, name), low, high, whole=True)
        _check("min_tokens", self.min_tokens, 0, MAX_TOKENS, whole=True)
        _check("n", self.n, 1, MAX_CHOICES, whole=True)
        if self.max_tokens is not None and self.min_tokens > self.max_tokens:
            raise InvalidRequest("min_tokens is larger than max_tokens.", field="min_tokens",
                                 min_tokens=self.min_tokens, max_tokens=self.max_tokens)
        self._check_lists()

    def _check_lists(self) -> None:
        if not isinstance(self.ignore_eos, bool):
            raise InvalidRequest(f"ignore_eos is true or false, not {_short(self.ignore_eos)}.", field="ignore_eos")
        if len(self.stop) > MAX_STOPS or any(not isinstance(s, str) or not 0 < len(s) <= MAX_STOP_CHARS for s in self.stop):
            raise InvalidRequest(f"stop takes up to {MAX_STOPS} texts of 1 to {MAX_STOP_CHARS} characters.", field="stop",
                                 count=len(self.stop))
        check_characters("stop", self.stop)                 # such a one can never be found
        if len(self.stop_ids) > MAX_STOPS:
            raise InvalidRequest(f"stop_ids takes up to {MAX_STOPS} ids.", field="stop_ids", count=len(self.stop_ids))
        for token in self.stop_ids:
            _check("stop_ids", token, 0, MAX_TOKENS, whole=True, what="A token id of stop_ids")
        if len(self.logit_bias) > MAX_BIASES:
            raise InvalidRequest(f"logit_bias takes up to {MAX_BIASES} entries.", field="logit_bias", count=len(self.logit_bias))
        for token, bias in self.logit_bias:
            _check("logit_bias", token, 0, MAX_TOKENS, whole=True, what="A token id of logit_bias")
            _check("logit_bias", bias, -100, 100, what="A bias of logit_bias")


@dataclass(frozen=True)
class DraftSpec:
    """Which drafter proposes tokens: the name of a loaded model, ``lookup``, or both as ``lookup+NAME``.

    ``length``: tokens a draft; None: chosen pass by pass from what was measured, 0 where drafting does not pay.
    """

    name: str
    length: int | None = None

    def __post_init__(self) -> None:
        if not isinstance(self.name, str) or not self.name:
            raise InvalidRequest("draft is the name of a loaded model, or lookup.", field="draft")
        if self.length is not None:
            _check("draft_length", self.length, 1, 64, whole=True)

    @classmethod
    def asked(cls, name: str | None, length: int | None) -> DraftSpec | None:
        """What two fields of a form or a call ask for. InvalidRequest for a length without a draft."""
        if name not in (None, ""):
            return cls(name, length)
        if length is not None:
            raise InvalidRequest("draft_length is given without a draft.", field="draft_length",
                                 remedy='Name a draft ("lookup", or a loaded model), or leave the length out.')
        return None


@dataclass(frozen=True)
class Request:
    """One generation. ``prompt`` is text, a chat, or token ids (already with whatever BOS is wanted)."""

    prompt: str | tuple[Message, ...] | tuple[int, ...]
    sampling: Sampling = Sampling()
    draft: DraftSpec | None = None
    id: str = ""                       # given by whoever submits; shows up in logs and events
    key: str = ""                      # label of the API key that it came with, for the log: never the key itself
    time_limit: float | None = None    # seconds from submission; at the limit the partial text, finish "time_limit"
    template: tuple[tuple[str, Any], ...] = ()  # extra variables for the chat template (tools, enable_thinking …)
    continue_last: bool = False        # chat: continue the last assistant turn in place of opening a new one
    queue_limit: float | None = None   # seconds it may wait for its turn; then QueueFull
    prompt_limit: int | None = None    # most tokens that the prompt may have, whatever the context
    via: tuple[str, ...] = ()          # the installations that it came through, the first first (`reach.VIA`)
    schema: str | None = None          # a JSON schema, as JSON text: the answer is one JSON text of it, by masks before sampling

    def __post_init__(self) -> None:
        parts = () if isinstance(self.prompt, str) else self.prompt
        if not isinstance(parts, tuple) or not (all(map(_is_whole, parts)) or all(isinstance(part, Message) for part in parts)):
            raise InvalidRequest("The prompt must be text, messages or token ids.", field="prompt")
        if self.time_limit is not None:
            _check("time_limit", self.time_limit, 0.001, 86_400)
        if self.queue_limit is not None:
            _check("queue_limit", self.queue_limit, 0.001, 86_400)
        if self.schema is not None:
            self._check_schema()

    def _check_schema(self) -> None:
        if len(self.schema) > MAX_SCHEMA_CHARS:
            raise InvalidRequest(f"The schema is longer than {MAX_SCHEMA_CHARS} characters.", field="response_format")
        for name in ("ignore_eos", "min_tokens"):
            if getattr(self.sampling, name):
                raise InvalidRequest(f"{name} does not go with a schema: the answer ends where its JSON text does.", field=name)


# ---------------------------------------------------------------------------------------------- events
@dataclass(frozen=True)
class TokenLogprob:
    """One token's natural-log probability under the unmodified distribution, with the best alternatives."""

    id: int
    text: str
    logprob: float
    top: tuple[tuple[int, str, float], ...] = ()  # (id, text, logprob), best first
    raw: bytes | None = None                      # what the token adds to the text: ``text`` cannot show a part of a character
    top_raw: tuple[bytes, ...] = ()               # the same for each of ``top``


@dataclass(frozen=True)
class Speculation:
    """How drafting went in one answer. Rates are of the drafted tokens, so between 0 and 1; a token that the verifier adds
    itself is none. Passes without a draft count as passes."""

    draft: str                          # as asked for: "lookup", a model's name, "lookup+NAME"
    length: int | None = None           # as asked for; None: chosen by measurement
    acceptance: float | None = None     # accepted / drafted
    tokens_per_pass: float | None = None                # of the passes after the first, which only reads the prompt
    positions: tuple[tuple[int, int], ...] = ()         # place in the draft from 1 on: (verified there, accepted there)
    lengths: tuple[tuple[int, int], ...] = ()           # (draft length, passes), 0 included
    sources: tuple[tuple[str, int, int], ...] = ()      # (kind of guess, drafted, accepted)
    draft_seconds: float = 0.0          # spent on drafting
    speedup: float | None = None        # seconds of the same tokens by plain passes, as measured here / seconds they took
    resting: bool = False               # length by measurement: it had turned itself off when the answer ended


@dataclass(frozen=True)
class Usage:
    prompt_tokens: int = 0
    completion_tokens: int = 0         # over all choices; an end-of-sequence token counts, as it was computed
    cached_tokens: int | None = 0      # prompt tokens found in the prefix cache, always < prompt_tokens; None: not told
    drafted: int = 0                   # proposed draft tokens
    accepted: int = 0                  # of them kept
    passes: int = 0                    # verifier passes that yielded tokens; 0 where nobody counts them (another server)
    speculation: Speculation | None = None              # where a draft was asked for


@dataclass(frozen=True)
class Timing:
    """Seconds, measured where the tokens are made. None = not measurable (one token has no decode speed)."""

    queue_seconds: float | None = 0.0             # waiting for its turn; of another server: here, for a free connection
    ttft_seconds: float | None = None             # submission to first token
    prefill_seconds: float | None = None
    decode_seconds: float | None = None           # first token to last
    total_seconds: float = 0.0
    prefill_tokens_per_second: float | None = None  # uncached prompt tokens / prefill_seconds
    decode_tokens_per_second: float | None = None   # (tokens - 1) / decode_seconds


@dataclass(frozen=True)
class Progress:
    """How far something is. ``total`` 0 = unknown."""

    stage: str                          # "queue", "prefill", "read", "fetch" …
    done: float = 0
    total: float = 0
    note: str = ""


@dataclass(frozen=True)
class Event:
    """One piece of an answer.

    Per choice: any number of events with ``text`` and ``ids``, the last of them (and only it) with ``finish``.
    Per request: at last exactly one event with ``index`` -1 and ``usage`` and ``timing``, and ``error`` if it failed
    (choices not yet ended get ``finish`` "error" before it). Events with ``progress`` only may come in between.
    ``ids`` are the tokens computed since this choice's previous event, the end token included; ``text`` is what they
    made certain: never half a character, never part of a stop string, never a special token.
    """

    index: int = 0
    text: str = ""
    ids: tuple[int, ...] = ()
    logprobs: tuple[TokenLogprob, ...] = ()
    drafted: tuple[bool, ...] = ()       # for each of ids: was it an accepted draft token
    finish: FinishReason | None = None
    matched: str | int | None = None     # the stop string or token id behind finish "stop"
    progress: Progress | None = None
    prompt_logprobs: tuple[TokenLogprob | None, ...] | None = None
    usage: Usage | None = None
    timing: Timing | None = None
    error: GainzError | None = None
    seed: int | None = None              # with usage: the seed that was used, so that an answer can be had again
    parts: tuple[str, ...] = ()          # where some of ids were drafted: what of ``text`` became certain with each of ids

    @property
    def last(self) -> bool:
        return self.index < 0 and self.timing is not None


class Cancel:
    """A flag that one side sets and the other polls or subscribes to. Setting it twice is harmless."""

    def __init__(self) -> None:
        self._event = threading.Event()
        self._lock = threading.Lock()
        self._callbacks: list[Callable[[], None]] = []

    def set(self) -> None:
        with self._lock:
            first, callbacks = not self._event.is_set(), list(self._callbacks)
            self._event.set()
        if first:
            for callback in callbacks:
                callback()

    def is_set(self) -> bool:
        return self._event.is_set()

    def on_set(self, callback: Callable[[], None]) -> None:
        """Call ``callback`` once when set, or now if it already is."""
        with self._lock:
            if not self._event.is_set():
                self._callbacks.append(callback)
                return
        callback()

    def raise_if_set(self, what: str = "The work") -> None:
        if self.is_set():
            raise Cancelled(f"{what} was cancelled.")


ProgressFn = Callable[[Progress], None]


# ---------------------------------------------------------------------------------------------- models
@dataclass(frozen=True)
class LayerKV:
    """What one layer keeps per token: heads, widths of a key and a value, and the window it looks back (None: all)."""

    heads: int
    key_width: int
    value_width: int
    window: int | None = None


@dataclass(frozen=True)
class MemoryEstimate:
    """Bytes. ``largest_context`` is the most tokens that fit ``free`` beside the weights, at most the trained context."""

    weights: int
    kv: int
    workspace: int
    free: int
    context: int
    largest_context: int
    notes: tuple[str, ...] = ()

    @property
    def total(self) -> int:
        return self.weights + self.kv + self.workspace

    @property
    def fits(self) -> bool:
        return self.total <= self.free


@dataclass(frozen=True)
class ModelInfo:
    """What a loaded model is, in values a page can show. ``notes`` are the things that were not as asked: fallbacks."""

    name: str
    backend: str                        # registry name
    format: str                         # "safetensors", "gguf Q4_1" …
    architecture: str = ""
    path: Literal["fused", "generic", "generic-sequential", "remote"] = "fused"
    kernels: str = ""                   # "ref", "aten", "cpu avx512-vnni" …
    device: str = "cpu"
    dtype: str = "float32"              # of activations
    bits: float | None = None           # mean bits per weight
    parameters: int | None = None
    context: int = 0                    # tokens this load has room for
    trained_context: int | None = None
    hidden: int | None = None           # width of the residual stream
    vocab_size: int = 0
    vocab_fingerprint: str = ""
    eos_ids: tuple[int, ...] = ()
    chat_template: bool = False
    kv_type: str = ""
    kv_bytes_per_token: int | None = None
    streams: int = 1
    threads: int | None = None
    weights_bytes: int | None = None
    estimate: MemoryEstimate | None = None
    peak_bytes: int | None = None       # observed growth of the engine process during the load
    load_seconds: float | None = None
    revision: str | None = None
    lossless: bool = True               # same text alone, in a batch and drafted, promised by the kernels
    capabilities: tuple[str, ...] = ()  # "batch", "prefix", "draft", "logprobs", "embeddings", "states", "reads states" …
    notes: tuple[str, ...] = ()
    options: tuple[tuple[str, Any], ...] = ()

    @property
    def speaks(self) -> bool:
        """Does it answer by itself? A draft that reads another model's states does not."""
        return "reads states" not in self.capabilities


@dataclass(frozen=True)
class Embeddings:
    """``vectors``: for each prompt the mean of the last hidden states (after the final norm) over its tokens, as they are, not
    normalised; ``tokens``: how many each prompt had."""

    vectors: tuple[tuple[float, ...], ...]
    tokens: tuple[int, ...]


@runtime_checkable
class Model(Protocol):
    """What every load returns, local or remote, on both sides of the process border."""

    info: ModelInfo

    def generate(self, request: Request, cancel: Cancel) -> Iterator[Event]:
        """Events in order; never raises once the first event is out; see `Event` for what comes last.
        Raises InvalidRequest, QueueFull … before the first event."""
        ...

    def tokenize(self, prompt: str | tuple[Message, ...], *, special: bool = True) -> tuple[int, ...]: ...
    def detokenize(self, ids: Sequence[int]) -> str: ...
    def close(self) -> None: ...
    # with "embeddings" among info.capabilities also:
    # def embed(self, prompts: Sequence[str | tuple[int, ...]], cancel: Cancel) -> Embeddings


# ---------------------------------------------------------------------------------------------- token level
@dataclass(frozen=True)
class Vocab:
    """``size`` real ids (a padded head's extra rows are not tokens); ``fingerprint`` hashes id → token."""

    size: int
    eos_ids: frozenset[int]
    fingerprint: str


@runtime_checkable
class Slot(Protocol):
    """A sequence's place in a decoder's KV cache; ``length`` tokens are held."""

    length: int


@dataclass(frozen=True)
class Step:
    """Append ``tokens`` to ``slot``; return the logits of the last ``want`` of them."""

    slot: Slot
    tokens: Sequence[int]
    want: int


class Decoder(Protocol):
    """Token level, local weights only. One forward verb: prefill, chunked prefill, decode and verification are `extend`.

    Invariant after each step of the engine: ``kv == tokens[:slot.length]`` and ``slot.length <= len(tokens) - 1``.
    """

    vocab: Vocab
    context: int                        # most tokens a slot may hold

    def open(self, tokens: Sequence[int], *, reuse: bool = True) -> Slot:
        """A slot whose ``length`` is the reused prefix, < len(tokens); 0 without ``reuse``."""
        ...

    def reserve(self, slot: Slot, n: int) -> bool:
        """Make room for n more tokens. False: there is none, and nothing changed."""
        ...

    def extend(self, steps: Sequence[Step]) -> list[Tensor]:
        """float32 [want, vocab.size] for each step. Room must have been reserved. Raises: state as after the call
        for unknown slots, so callers truncate and retry alone."""
        ...

    def truncate(self, slot: Slot, length: int) -> None:
        """Forget the tokens from ``length`` on."""
        ...

    def release(self, slot: Slot) -> None:
        """Give the slot back; its full pages stay findable as prefixes until the room is needed."""
        ...

    def stats(self) -> Mapping[str, int]:
        """pages_total, pages_free, pages_cached, pages_used, page_size, steps."""
        ...

    def close(self) -> None: ...


class Draft(list):
    """Proposed ids, and what they were made from: ``source`` names a kind of guess whose luck is counted by itself. ``dropped``: so
    many more were made and found not to be worth verifying."""

    def __init__(self, ids: Sequence[int] = (), source: str = "") -> None:
        super().__init__(ids)
        self.source, self.dropped = source, 0


class Judge(Protocol):
    """Decides over one draft while it is made, after `DraftJob.limit` was asked. ``sure``: the draft's own probability of each of its
    ids so far."""

    def more(self, sure: Sequence[float]) -> bool:
        """Is a further id worth making?"""
        ...

    def ends(self) -> tuple[array, array, array]:
        """`more` in numbers, see `backends.kernels.Ahead`, for who makes a draft in one call; they may change after it."""
        ...

    def worth(self, sure: Sequence[float]) -> int:
        """How many of the ids are worth verifying."""
        ...


@dataclass(slots=True)
class DraftJob:
    """``k``: the most ids that are of use; ``limit``: for a source of drafts, how many of its ids are worth verifying (None:
    k of any); ``read``: the most tokens that a model should read before it drafts (None: all); of a longer text it reads the
    end. ``kept``: what the target kept of its hidden states, where the drafter reads them. ``judge``: who ends a draft early (None:
    nobody)."""

    tokens: Sequence[int]
    k: int
    sampling: Sampling
    seed: int
    sequence: int = 0                   # the same for all jobs of one sequence: by this a drafter keeps what it knows of it
    limit: Callable[[str], int] | None = None
    read: int | None = None
    kept: Any = None
    judge: Judge | None = None

    def most(self, source: str) -> int:
        return self.k if self.limit is None else min(self.k, self.limit(source))


class Drafter(Protocol):
    reads_states: bool                  # the target has to keep its hidden states for it

    def propose(self, batch: Sequence[DraftJob]) -> list[list[int]]:
        """At most k ids of the target's vocabulary each, best as a `Draft`; [] is fine."""
        ...

    def forget(self, sequence: int) -> None:
        """The sequence has ended, or its room is needed: give back what is kept for it."""
        ...

    def shed(self, decoder: Decoder) -> bool:
        """Give back whatever is held in ``decoder``, whose own sequences lack room. False: it was nothing."""
        ...

    def close(self) -> None: ...


# ---------------------------------------------------------------------------------------------- backends
@dataclass(frozen=True)
class Claim:
    """How sure a backend is that a folder is its own: the highest score wins, a tie is an error."""

    score: int
    reason: str
    format: str = ""                    # what the catalog shows, e.g. "GGUF Q4_1"
    bits: float | None = None


@dataclass(frozen=True)
class LocalOptions:
    """What can be chosen when a local model is loaded. Forms are made from these fields and their metadata.

    A backend with more to choose derives from this class beside its code. metadata: ``label``, ``help``, ``choices``,
    ``low``, ``high``; 0 or "auto" means chosen for the machine.
    """

    context: int = field(default=0, metadata={"label": "Context (tokens, 0 = as much as fits, at most the trained one)",
                                              "low": 0, "high": 1 << 20})
    kv_type: str = field(default="auto", metadata={"label": "KV cache type", "choices": ("auto", "float32", "float16", "bfloat16", "int8")})
    streams: int = field(default=8, metadata={"label": "Streams at once", "low": 1, "high": 256})
    threads: int = field(default=0, metadata={"label": "Threads (0 = auto)", "low": 0, "high": 1024})
    device: str = field(default="auto", metadata={"label": "Device", "choices": ("auto", "cpu", "cuda", "mps", "xpu")})
    dtype: str = field(default="auto", metadata={"label": "Compute type", "choices": ("auto", "float32", "bfloat16", "float16")})
    kernels: str = field(default="auto", metadata={"label": "Kernels", "choices": ("auto", "ref", "aten", "cpu", "triton")})
    activations: str = field(default="auto", metadata={"label": "Activations beside quantized weights",
                                                       "choices": ("auto", "int8", "float32")})
    prefix_cache: bool = field(default=True, metadata={"label": "Reuse common prefixes"})

    def __post_init__(self) -> None:
        check_fields(self)


def check_fields(options: Any) -> None:
    """InvalidRequest where a field of an options dataclass is outside of what its metadata says."""
    for item in fields(options):
        value, meta = getattr(options, item.name), item.metadata
        if "low" in meta and (isinstance(value, bool) or not isinstance(value, int) or not meta["low"] <= value <= meta["high"]):
            raise InvalidRequest(f"{item.name} must be a whole number from {meta['low']} to {meta['high']}.",
                                 field=item.name, **{item.name: value})
        if "choices" in meta and value not in meta["choices"]:
            raise InvalidRequest(f"{item.name} must be one of {', '.join(meta['choices'])}.", field=item.name, **{item.name: value})


def make_options(cls: type, values: Mapping[str, Any]) -> Any:
    """An options dataclass from a mapping; an unknown name is an InvalidRequest that lists the known ones."""
    known = {item.name for item in fields(cls)}
    for name in values:
        if name not in known:
            raise InvalidRequest(f"Unknown option {name!r}.", field=name, remedy=f"Known options: {', '.join(sorted(known))}.")
    return cls(**values)


@dataclass(frozen=True)
class Backend:
    """One file in backends/ that defines ``BACKEND``. ``claims`` is cheap and imports nothing heavy; ``load`` runs in the
    engine process (local) or in the front (remote) and may take long: it reports and honours ``cancel``. ``check`` runs
    where ``load`` does, reads no weight, and raises what is wrong with the options on this machine: whoever reloads asks it
    before the model that works is given up."""

    name: str
    title: str
    requires: tuple[str, ...]           # importable module names
    options: type
    claims: Callable[[ModelDir], Claim | None]
    load: Callable[[ModelDir, Any, ProgressFn, Cancel], Model]
    local: bool = True
    order: int = 100
    check: Callable[[ModelDir, Any], None] | None = None
    helper: bool = False                # its models serve others, and are not meant to answer by themselves

    def missing(self) -> tuple[str, ...]:
        from importlib.util import find_spec
        return tuple(name for name in self.requires if find_spec(name) is None)


@dataclass(frozen=True)
class ModelDir:
    """A model on disk: a folder, or a single file (``files`` then has one entry). Nothing but names and small JSON is read."""

    name: str
    path: Path                          # the folder, or the file itself
    files: tuple[str, ...]              # names relative to the folder, sorted
    config: Mapping[str, Any] = field(default_factory=dict)       # config.json, or empty
    manifest: Mapping[str, Any] = field(default_factory=dict)     # manifest.json, or empty

    @property
    def folder(self) -> Path:
        return self.path if self.path.is_dir() else self.path.parent

    def ending(self, suffix: str) -> tuple[str, ...]:
        return tuple(name for name in self.files if name.lower().endswith(suffix))

    @staticmethod
    def of(path: str | Path, name: str | None = None) -> ModelDir:
        """Raises ModelNotFound where nothing is, BrokenFile where config.json or manifest.json is no JSON object, or where there is so
        much that it is no model's folder (a link to somebody's home, say)."""
        path = Path(path)
        if path.is_file():
            return ModelDir(name or path.stem, path, (path.name,))
        if not path.is_dir():
            raise ModelNotFound(f"There is nothing at {path}.")
        inside = list(islice(path.rglob("*"), MAX_ENTRIES + 1))
        if len(inside) > MAX_ENTRIES:
            raise BrokenFile(f"{path.name} holds more than {MAX_ENTRIES} files and folders: it is no model's folder.", folder=path.name,
                             remedy="Put the model's own folder under models/, not one above it.")
        files = tuple(sorted(str(p.relative_to(path)).replace("\\", "/") for p in inside
                             if p.is_file() and not any(part.startswith(".") for part in p.relative_to(path).parts)))
        return ModelDir(name or path.name, path, files, read_json(path / "config.json"), read_json(path / "manifest.json"))


def read_json(path: Path) -> Mapping[str, Any]:
    """The JSON object in ``path``; {} if there is no such file. Raises BrokenFile for anything else."""
    import json
    if not path.is_file():
        return {}
    try:
        data = json.loads(path.read_text(encoding="utf-8-sig"))
    except (ValueError, OSError) as error:
        raise BrokenFile(f"{path.name} cannot be read as JSON.", file=path.name, reason=error) from error
    if not isinstance(data, dict):
        raise BrokenFile(f"{path.name} holds no JSON object.", file=path.name)
    return data


__all__ = [name for name in dir() if not name.startswith("_") and name not in {"annotations", "TYPE_CHECKING", "Any"}]
