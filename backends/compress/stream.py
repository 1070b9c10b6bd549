"""Calibration windows on their way through the layers: hidden states, what else a layer is called with, and partial passes.

A layer is run several times, each time only as far as needed: up to the next matrices to be measured. What is already
settled
(`Memo`) is kept and played back instead of computed again, as far as the memory allowed for it goes; without it the outcome
is
the same, only later. Knows nothing of rounding.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from backends.base import Cancel, NotSupported
from backends.compress.skeleton import Skeleton, linears

MEMO_BYTES = 640 << 20          # of played-back outputs; part of the promise "one layer above the model"


class _Stop(Exception):
    """Ends a pass inside a layer: what was asked for has been seen."""


class Stream:
    """``hidden``: one float32 [1, T, H] a window, the input of the layer that is next."""

    def __init__(self, skeleton: Skeleton, windows: Sequence[Sequence[int]], precision: str, cancel: Cancel) -> None:
        self.skeleton, self.cancel = skeleton, cancel
        self.device, self.precision = skeleton.device, precision
        self.windows = [torch.tensor([window], dtype=torch.int64) for window in windows]
        self.calls: list[tuple[tuple, dict]] = []
        self.tuples: list[bool] = []
        self.hidden: list[Tensor] = []

    # ---- the start
    @torch.no_grad()
    def begin(self) -> None:
        """Learn how the model calls its layers, and take the first layer's input of every window.

        Raises NotSupported where a layer is given something that depends on the text besides the hidden states."""
        probes = [self._probe(window) for window in (self.windows[0], self.windows[-1])]
        if not all(_same(one, two) for one, two in zip(probes[0], probes[1])):
            raise NotSupported("The layers of this model take more from the text than hidden states.",
                               architecture=type(self.skeleton.model).__name__)
        self.calls = probes[0]
        for window in self.windows:
            self.cancel.raise_if_set("The job")
            self.hidden.append(self._first_input(window))

    def _probe(self, window: Tensor) -> list[tuple[tuple, dict]]:
        """One pass through the whole model, its layers loaded one at a time."""
        calls, tuples, hooks = [], [], []

        def before(index: int) -> Callable:
            def hook(module: nn.Module, args: tuple, kwargs: dict) -> None:
                self.cancel.raise_if_set("The job")
                self.skeleton.load(index)
                calls.append((args[1:], {key: value for key, value in kwargs.items() if key != "hidden_states"}))
            return hook

        def after(index: int) -> Callable:
            def hook(module: nn.Module, args: tuple, output: Any) -> None:
                self.skeleton.drop(index)
                tuples.append(isinstance(output, tuple))
            return hook

        for index, layer in enumerate(self.skeleton.layers):
            hooks.append(layer.register_forward_pre_hook(before(index), with_kwargs=True))
            hooks.append(layer.register_forward_hook(after(index)))
        try:
            self._model(window)
        finally:
            for hook in hooks:
                hook.remove()
        self.tuples = tuples
        return calls

    def _model(self, window: Tensor) -> None:
        head = self.skeleton.head
        stop = head.register_forward_pre_hook(_stop) if head is not None else None
        try:
            with self.autocast():
                self.skeleton.model(window.to(self.device), use_cache=False)
        except _Stop:
            pass
        finally:
            if stop is not None:
                stop.remove()

    def _first_input(self, window: Tensor) -> Tensor:
        seen: list[Tensor] = []

        def catch(module: nn.Module, args: tuple, kwargs: dict) -> None:
            seen.append((args[0] if args else kwargs["hidden_states"]).float().clone())
            raise _Stop
        hook = self.skeleton.layers[0].register_forward_pre_hook(catch, with_kwargs=True)
        try:
            self._model(window)
        finally:
            hook.remove()
        return seen[0]

    # ---- passes
    def autocast(self):
        if self.precision == "float32":
            return nullcontext()
        return torch.autocast(self.device.type, getattr(torch, self.precision))

    def run(self, index: int, hidden: Tensor) -> Tensor:
        """The layer's output for one window, float32 [1, T, H]."""
        args, kwargs = self.calls[index]
        with torch.no_grad(), self.autocast():
            out = self.skeleton.layers[index](hidden, *args, **kwargs)
        return (out[0] if isinstance(out, tuple) else out).float()

    def watch(self, index: int, module: nn.Module, see: Callable[[Tensor], None], memo: Memo | None = None) -> None:
        """``see`` gets what ``module`` of the layer is given, [rows, K], once a window; the layer is run no further."""
        def hook(_: nn.Module, args: tuple) -> None:
            see(args[0].reshape(-1, args[0].shape[-1]))
            raise _Stop
        handle = module.register_forward_pre_hook(hook)
        try:
            self._each(index, memo, lambda number, hidden: self._until_stop(index, hidden))
        finally:
            handle.remove()

    def advance(self, index: int, memo: Memo | None = None) -> None:
        """Every window's hidden state becomes the layer's output."""
        def step(number: int, hidden: Tensor) -> None:
            self.hidden[number] = self.run(index, hidden)
        self._each(index, memo, step)

    def _each(self, index: int, memo: Memo | None, step: Callable[[int, Tensor], None]) -> None:
        for number in range(len(self.hidden)):
            self.cancel.raise_if_set("The job")
            if memo is not None:
                memo.window = number
            step(number, self.hidden[number])

    def _until_stop(self, index: int, hidden: Tensor) -> None:
        try:
            self.run(index, hidden)
        except _Stop:
            return

    @torch.no_grad()
    def head_inputs(self, see: Callable[[Tensor], None]) -> None:
        """``see`` gets the input of the output head, [rows, H], once a window: the hidden states through what follows the
        last layer. Layers are passed over."""
        head = self.skeleton.head
        hook = head.register_forward_pre_hook(lambda _, args: see(args[0].reshape(-1, args[0].shape[-1])))
        last = len(self.skeleton.layers) - 1
        try:
            with self._bypassed() as given:
                for window, hidden in zip(self.windows, self.hidden):
                    self.cancel.raise_if_set("The job")
                    given["value"] = (hidden,) if self.tuples[last] else hidden
                    self._model(window)
        finally:
            hook.remove()

    @torch.no_grad()
    def loss(self, states: Sequence[Tensor]) -> float:
        """Mean cross-entropy, nats a token, of the windows' own tokens, where ``states`` are what the last layer gives."""
        last, total, count = len(self.skeleton.layers) - 1, 0.0, 0
        with self._bypassed() as given, self.autocast():
            for window, hidden in zip(self.windows, states):
                given["value"] = (hidden,) if self.tuples[last] else hidden
                logits = self.skeleton.model(window.to(self.device), use_cache=False).logits[0, :-1]
                total += float(cross_entropy(logits.float(), window[0, 1:].to(self.device), reduction="sum"))
                count += len(logits)
        return total / max(count, 1)

    @contextmanager
    def _bypassed(self) -> Iterator[dict[str, Any]]:
        """Every layer returns ``given["value"]``, whatever it is given."""
        given: dict[str, Any] = {}
        layers = list(self.skeleton.layers)
        try:
            for layer in layers:
                layer.forward = lambda *args, **kwargs: given["value"]
            yield given
        finally:
            for layer in layers:
                del layer.forward

    # ---- what a layer is made of
    def stages(self, index: int) -> list[list[str]]:
        """The layer's matrices in the order in which they are met, those with the same input together."""
        layer, met, alive = self.skeleton.layers[index], {}, []

        def note(name: str) -> Callable:
            def hook(_: nn.Module, args: tuple) -> None:
                alive.append(args[0])           # kept, so that no later input gets the same address
                met.setdefault(name, (args[0].data_ptr(), args[0].shape))
            return hook
        hooks = [module.register_forward_pre_hook(note(name)) for name, module in linears(layer).items()]
        try:
            self.run(index, self.hidden[0])
        finally:
            for hook in hooks:
                hook.remove()
        groups: dict[Any, list[str]] = {}
        for name, key in met.items():
            groups.setdefault(key, []).append(name)
        return list(groups.values())


def _stop(*_: Any) -> None:
    raise _Stop


def _same(one: Any, two: Any) -> bool:
    if isinstance(one, Tensor) or isinstance(two, Tensor):
        return isinstance(one, Tensor) and isinstance(two, Tensor) and torch.equal(one, two)
    if isinstance(one, (tuple, list)):
        return len(one) == len(two) and all(map(_same, one, two))
    if isinstance(one, dict):
        return one.keys() == two.keys() and all(_same(value, two[key]) for key, value in one.items())
    return one is two or type(one) is type(two)


class Memo:
    """Outputs of finished modules of one layer, by window. ``window``: which one is on its way."""

    def __init__(self, limit: int = MEMO_BYTES) -> None:
        self.window, self.limit = 0, limit
        self._paused = False
        self._kept: dict[nn.Module, dict[int, Any]] = {}
        self._bytes: dict[nn.Module, int] = {}

    def keep(self, module: nn.Module) -> None:
        """From now on ``module`` is computed once a window, then played back; what is kept of its parts is given up by
        then."""
        self.forget(module)
        self._kept[module], self._bytes[module] = {}, 0
        original = module.forward

        def forward(*args: Any, **kwargs: Any) -> Any:
            kept = self._kept[module]
            if self._paused:
                return original(*args, **kwargs)
            if self.window in kept and _versions(kept[self.window][0]) == kept[self.window][1]:
                return kept[self.window][0]
            output = original(*args, **kwargs)      # also where the caller has changed the kept one in place
            size = _bytes(output)
            if self.window not in kept and sum(self._bytes.values()) + size <= self.limit:
                kept[self.window] = output, _versions(output)
                self._bytes[module] += size
                self._give_up_parts(module)
            return output
        module.forward = forward

    def _give_up_parts(self, module: nn.Module) -> None:
        for part in module.modules():
            if part is not module and part in self._kept and self.window in self._kept[part]:
                self._bytes[part] -= _bytes(self._kept[part].pop(self.window)[0])

    def forget(self, module: nn.Module) -> None:
        if module in self._kept:
            del self._kept[module], self._bytes[module], module.forward

    def renew(self, module: nn.Module) -> None:
        """The module has changed: what is kept of it, or of what it is a part of, is computed anew."""
        for kept in list(self._kept):
            if any(part is module for part in kept.modules()):
                self.keep(kept)

    @contextmanager
    def paused(self) -> Iterator[None]:
        """Nothing is played back or kept: for trials with weights that will not stay."""
        self._paused = True
        try:
            yield
        finally:
            self._paused = False

    def clear(self) -> None:
        for module in list(self._kept):
            self.forget(module)


def _bytes(value: Any) -> int:
    if isinstance(value, Tensor):
        return value.numel() * value.element_size()
    return sum(map(_bytes, value)) if isinstance(value, (tuple, list)) else 0


def _versions(value: Any) -> tuple:
    """Counts of changes in place."""
    if isinstance(value, Tensor):
        return (value._version,)
    return tuple(map(_versions, value)) if isinstance(value, (tuple, list)) else ()
