"""Models that another server answers, by OpenAI's API: vLLM, SGLang, TGI, Ollama, llama-server, LM Studio, `transformers serve`, Gainz.

Claims folders whose manifest.json has ``remote`` with ``address`` and ``model``. Such a model lives in the front: no engine process, no
torch, no memory. What a server does not give (logits, a tokenizer, its cache, its revision) is absent, with the reason in the notes;
drafts for it are refused by `speculative.refuses`. The key is never in the manifest: it comes from `Reach.key`, by the server's origin.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields

from backends.base import (
    Backend, BrokenFile, Cancel, Cancelled, Claim, GainzError, InvalidRequest, Message, Model, ModelDir, ModelInfo, ModelNotFound,
    NotSupported, Progress, ProgressFn, Request, check_fields)
from backends.reach import Address, Reach
from backends.remote_answer import Places, RemoteAnswer
from backends.remote_dialects import AUTO, DIALECTS, PLAIN, Dialect, by_owner
from backends.remote_http import Client
from backends.remote_list import Listed, models
from backends.remote_wire import body

KEY = "remote"


@dataclass(frozen=True)
class RemoteOptions:
    """What can be chosen for a model of another server. Address and model stand in its manifest, its key nowhere near."""

    dialect: str = field(default=AUTO, metadata={"label": "Kind of server", "choices": (AUTO, *DIALECTS)})
    streams: int = field(default=8, metadata={"label": "Requests at once", "low": 1, "high": 256})
    connect_seconds: int = field(default=10, metadata={"label": "Seconds to connect", "low": 1, "high": 600})
    silence_seconds: int = field(default=300, metadata={"label": "Seconds of silence until an answer counts as lost", "low": 1,
                                                        "high": 86_400})
    retries: int = field(default=2, metadata={"label": "Further tries of a request that has not begun", "low": 0, "high": 10})
    counts: bool = field(default=True, metadata={"label": "Ask for token counts (stream_options)"})

    def __post_init__(self) -> None:
        check_fields(self)


def place(model: ModelDir) -> tuple[Address, str]:
    """Address and model name of the manifest. BrokenFile."""
    said = model.manifest[KEY]
    if not isinstance(said, Mapping) or not isinstance(said.get("model"), str) or not said["model"]:
        raise BrokenFile(f"manifest.json of {model.name!r} does not name a server's model.", file="manifest.json",
                         remedy='It holds "remote": {"address": "http://127.0.0.1:8000/v1", "model": "NAME"}.')
    try:
        return Address.parse(said.get("address")), said["model"]
    except InvalidRequest as error:
        raise BrokenFile(f"The address in manifest.json of {model.name!r} is none: {error.cause}", file="manifest.json",
                         remedy=error.remedy) from error


def claims(model: ModelDir) -> Claim | None:
    """BrokenFile for a manifest that says ``remote`` and not where."""
    if KEY not in model.manifest:
        return None
    address, _ = place(model)
    return Claim(100, "manifest.json names another server", f"OpenAI API at {address.host}")


# ---------------------------------------------------------------------------------------------- the model
class RemoteModel(Model):
    """Answers over one `Client`. ``called``: its name there."""

    def __init__(self, info: ModelInfo, client: Client, called: str, dialect: Dialect, options: RemoteOptions) -> None:
        self.info, self.called, self.dialect = info, called, dialect
        self._client, self._counts, self._places = client, options.counts, Places(options.streams)
        self._lock, self._running, self._closed = threading.Lock(), set(), False

    def generate(self, request: Request, cancel: Cancel) -> RemoteAnswer:
        """NotSupported at once for what cannot be asked; what the server itself says comes in the last event."""
        if request.draft is not None:
            raise NotSupported(f"{self.info.name} is answered by another server, which gives no logits to verify drafts with.",
                               field="draft", remedy="Ask without a draft.")
        asked = body(request, self.called, self.dialect, self._counts)
        with self._lock:
            if self._closed:
                raise Cancelled(f"{self.info.name} was unloaded.")
            answer = RemoteAnswer(self._client, self._places, request, asked, cancel, self._over)
            self._running.add(answer)
        return answer

    def _over(self, answer: RemoteAnswer) -> None:
        with self._lock:
            self._running.discard(answer)

    @property
    def running(self) -> int:
        """Requests that the server is answering."""
        return max(0, len(self._running) - self.waiting)

    @property
    def waiting(self) -> int:
        """Requests that wait for a free connection."""
        return self._places.waiting

    def tokenize(self, prompt: str | tuple[Message, ...], *, special: bool = True) -> tuple[int, ...]:
        raise NotSupported(f"{self.info.name} is answered by another server: its tokenizer is not here.", field="model",
                           remedy="Use a local model for this.")

    def detokenize(self, ids: Sequence[int]) -> str:
        return self.tokenize("")            # for the same reason

    def close(self) -> None:
        """Running answers end as cancelled."""
        with self._lock:
            self._closed, running = True, list(self._running)
        for answer in running:
            answer.cancel()
        self._client.close()


def load(model: ModelDir, options: RemoteOptions, progress: ProgressFn, cancel: Cancel, reach: Reach = Reach()) -> Model:  # noqa: B008  frozen
    """Asks the server for its list once. ModelNotFound where it does not have the model; what `models` raises. ``reach``: which
    addresses may be spoken to; public ones where nothing else is said."""
    began = time.monotonic()
    address, called = place(model)
    progress(Progress("connect", note=str(address)))
    client = Client(address, reach, connect=options.connect_seconds, silence=options.silence_seconds, retries=options.retries)
    try:
        found, notes = _find(client, called, cancel)
    except GainzError:
        client.close()
        raise
    dialect = DIALECTS[options.dialect] if options.dialect != AUTO else by_owner(found.owner)
    info = ModelInfo(model.name, "remote", f"OpenAI API · {dialect.title}", called, "remote", device="", dtype="", streams=options.streams,
                     trained_context=found.context, chat_template=True, lossless=False, load_seconds=time.monotonic() - began,
                     notes=(*notes, *_notes(dialect, address)),
                     options=tuple((item.name, getattr(options, item.name)) for item in fields(options)))
    return RemoteModel(info, client, called, dialect, options)


def _find(client: Client, called: str, cancel: Cancel) -> tuple[Listed, tuple[str, ...]]:
    listed = models(client, cancel)
    found = next((row for row in listed if row.name == called), None)
    if found is not None:
        return found, ()
    if not listed:                          # some load a model when it is first asked for
        return Listed(called), ("The server lists no models: whether it has this one shows with the first question.",)
    raise ModelNotFound(f"The server has no model {called!r}.", field="model", address=client.address,
                        remedy=f"It has: {', '.join(row.name for row in listed[:20])}.")


def _notes(dialect: Dialect, address: Address) -> tuple[str, ...]:
    """What a person should know before comparing figures."""
    told = [f"Answered by {address}: speed and time to the first token are measured here, the way there and back included.",
            "Not told by the server, and absent here: memory, cache, kernels, and which revision runs. Seeds are sent; whether they are "
            "honoured cannot be known."]
    if dialect is PLAIN:
        told.append("Its kind is not known: fields beyond OpenAI's (top_k, min_p, repetition_penalty …) are sent by vLLM's names, and "
                    "only where they are set.")
    if dialect.note:
        told.append(dialect.note)
    if dialect.ignores:
        told.append(f"Refused here, because {dialect.title} would ignore it: {', '.join(sorted(dialect.ignores))}.")
    return tuple(told)


BACKEND = Backend("remote", "Another server (OpenAI API)", (), RemoteOptions, claims, load, local=False, order=90)
