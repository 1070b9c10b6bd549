"""What a step sends to a device: one buffer whose views are the arrays; and a decoder whose tensors are all where it is."""

from __future__ import annotations

import subprocess
import sys

import numpy as np
import torch

from backends.base import LayerKV, Step, Vocab
from backends.engine import transfer
from backends.engine.kv import PagedKV
from backends.engine.runner import PagedDecoder

META = torch.device("meta")


class Elsewhere:
    """A device that is not the CPU, as far as `send` can tell, with what was sent in ``sent``."""

    type = "elsewhere"

    def __init__(self) -> None:
        self.sent = []


def test_everything_goes_over_in_one_copy(monkeypatch) -> None:
    place, plain = Elsewhere(), torch.Tensor.to
    monkeypatch.setattr(torch.Tensor, "to", lambda tensor, *to: place.sent.append(tensor.nbytes) or tensor.clone()
                        if to == (place,) else plain(tensor, *to))
    arrays = [np.array([3, -1, 7], np.int64), np.array([[1, 2, 3]], np.int32), np.zeros(0, np.int64),
              np.arange(12, dtype=np.int64)[::2], np.array([5], np.int32)]
    found = transfer.send(arrays, place)
    assert len(place.sent) == 1 and place.sent[0] % transfer.ALIGN == 0
    for array, tensor in zip(arrays, found):
        assert tensor.dtype == torch.from_numpy(array.copy()).dtype and tensor.shape == array.shape and tensor.is_contiguous()
        assert tensor.tolist() == array.tolist() and tensor.storage_offset() * tensor.itemsize % transfer.ALIGN == 0
    arrays[0][0] = 9
    assert found[0][0] == 3


def test_on_the_cpu_nothing_is_copied() -> None:
    array = np.array([1, 2], np.int64)
    tensor, = transfer.send([array], torch.device("cpu"))
    array[0] = 5
    assert tensor[0] == 5


def test_few_rows_of_logits_come_over_at_once_and_many_stay() -> None:
    here = torch.zeros(3, 5)
    assert transfer.fetch(here) is here
    many = torch.zeros(transfer.FETCHED + 1, 5, device=META)
    assert transfer.fetch(many) is many


class Arch:
    """Notes where every tensor of its batches lies."""

    layers, hidden = (LayerKV(2, 8, 8, None),), 4

    def __init__(self) -> None:
        self.places = set()

    def rotation(self, positions, last, run=False):
        return (torch.empty(1, len(positions), 4, device=positions.device),) * 2

    def forward(self, batch, kv):
        tensors = (batch.ids, batch.positions, batch.starts, batch.lengths, batch.pages, batch.slots, batch.wanted, batch.cos, kv[0].k,
                   kv[0].k_scale, kv[0].v_low)
        self.places |= {tensor.device.type for tensor in tensors}
        return torch.empty(len(batch.ids), 4, device=batch.ids.device)

    def logits(self, rows):
        self.places.add(rows.device.type)
        return torch.zeros(len(rows), 11)                          # a device that holds no numbers has none to fetch


def test_a_decoder_keeps_all_it_has_on_its_device() -> None:
    arch = Arch()
    decoder = PagedDecoder(arch, PagedKV(arch.layers, 16, "int8", META), Vocab(11, frozenset(), ""), 128, device=META)
    slots = [decoder.open([1, 2, 3]) for _ in range(2)]
    for slot in slots:
        assert decoder.reserve(slot, 4)
    first, second = decoder.extend([Step(slots[0], [1, 2, 3], 1), Step(slots[1], [4], 0)])
    assert first.shape == (1, 11) and second.shape == (0, 11) and arch.places == {"meta"}


def test_the_peak_of_a_load_is_the_gpus_where_it_takes_its_memory(monkeypatch) -> None:
    from backends.engine.process import peak_growth
    taken = [100]
    code = ("from backends.engine.process import peak_growth\nwith peak_growth() as peak:\n    held = bytearray(64 << 20)\n"
            "    held[::4096] = b'x' * len(held[::4096])\nprint(peak[0])")
    fresh = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)    # one without freed memory
    assert int(fresh.stdout) >= 60 << 20
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.cuda, "memory_reserved", lambda: taken[0])
    with peak_growth() as peak:
        taken[0] = 5100
    assert peak == [5000]
