"""A model whose weights are in this process: a decoder and a text codec behind the `Model` protocol.

Its answers come from the engine it is attached to; one that is attached to none gets an engine of its own, with a thread, on
first use, so that tests, tools and the command line need no more than the model.
"""

from __future__ import annotations

import queue
import threading
from collections.abc import Iterator, Sequence

from backends.base import Cancel, Decoder, Embeddings, Event, Message, ModelInfo, Request
from backends.engine.loop import Engine
from backends.engine.text import TextCodec


class EventStream(Iterator[Event]):
    """The events of one request, in order, to the last one. Closing it, or dropping it, cancels what still runs."""

    def __init__(self, cancel: Cancel) -> None:
        self._events: queue.SimpleQueue[Event] = queue.SimpleQueue()
        self._gone = Cancel()                       # the client's side; the caller's own flag is never set from here
        self._ended = False
        cancel.on_set(self._gone.set)

    @property
    def cancel(self) -> Cancel:
        return self._gone

    def put(self, event: Event) -> None:
        self._events.put(event)

    def __iter__(self) -> EventStream:
        return self

    def __next__(self) -> Event:
        if self._ended:
            raise StopIteration
        event = self._events.get()
        self._ended = event.last
        return event

    def close(self) -> None:
        if not self._ended:
            self._ended = True
            self._gone.set()

    def __del__(self) -> None:
        self.close()


class LocalModel:
    """``info.name`` is how drafts refer to it; ``info.streams`` how many sequences run at once."""

    def __init__(self, info: ModelInfo, decoder: Decoder, text: TextCodec) -> None:
        self.info, self.decoder, self.text = info, decoder, text
        self.engine: Engine | None = None           # set by whoever attaches it
        self._own: _OwnEngine | None = None
        self._starting = threading.Lock()

    def generate(self, request: Request, cancel: Cancel) -> EventStream:
        """Queued when this returns. Raises InvalidRequest, ContextTooLong, NoChatTemplate, QueueFull … before that."""
        stream = EventStream(cancel)
        self._running_engine().submit(self, request, stream.cancel, stream.put)
        return stream

    def _running_engine(self) -> Engine:
        with self._starting:
            if self.engine is None:
                self._own = _OwnEngine(self)
                self.engine = self._own.engine
            return self.engine

    def tokenize(self, prompt: str | tuple[Message, ...], *, special: bool = True) -> tuple[int, ...]:
        """Ids of a text, or of a chat as its template writes it."""
        return tuple(self.text.encode(prompt, special=special) if isinstance(prompt, str) else self.text.chat(prompt))

    def detokenize(self, ids: Sequence[int]) -> str:
        return self.text.decode(ids)

    def embed(self, prompts: Sequence[str | tuple[int, ...]], cancel: Cancel) -> Embeddings:
        """Mean-pooled last hidden states; waits. Raises NotSupported, InvalidRequest, QueueFull, Cancelled."""
        return self._running_engine().embed(self, prompts, cancel).result()

    def close(self) -> None:
        """End the answers that still run, and give the decoder's memory back. Harmless when done twice."""
        with self._starting:
            own, self._own, self.engine = self._own, None, None
        if own is not None:
            own.close(self)
        self.decoder.close()


class _OwnEngine:
    """An engine for one model, with a thread that sleeps while there is nothing to do."""

    def __init__(self, model: LocalModel) -> None:
        self.engine = Engine()
        self.engine.attach(model)
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self.engine.run, args=(self._stop,), name="engine", daemon=True)
        self._thread.start()

    def close(self, model: LocalModel) -> None:
        self._stop.set()
        self.engine.wake()
        self._thread.join()
        self.engine.detach(model)
