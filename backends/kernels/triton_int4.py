"""torch's own int4 product on CUDA as another layout of a matrix, where measuring says that it is faster.

`torch._weight_int4pack_mm` takes bfloat16 rows, groups of 32 to 256, and computes (code - 8) * scale + shift with scale and
shift rounded to bfloat16: a little less exact than ours. It must agree with ours to `AGREE`, win at one row by `WIN`, and lose
at `MANY` rows by no more than `LOSE`. Each shape is measured once a load; the winner is noted. Knows tensors only.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from backends.kernels import QWeight
from backends.kernels.triton_matmul import Ending
from backends.kernels.triton_pack import PackedMatrix, bias_on, nbytes

GROUPS = (32, 64, 128, 256)
TILES = 8                               # of 16 columns, in the layout's inner dimension
TABLE = 12                              # times as many rows as columns: a vocabulary, which may have to be read by rows
MANY, AGREE, WIN, LOSE = 256, 2e-2, 0.95, 1.1
REPEAT, ROUNDS = 10, 5
Time = Callable[[Callable[[], object]], float]


def fits(weight: QWeight, dtype: torch.dtype) -> bool:
    n, k = weight.shape
    return (dtype == torch.bfloat16 and weight.bits <= 4 and weight.group in GROUPS and k % weight.group == 0
            and k % (16 * TILES) == 0 and n % 8 == 0 and n <= TABLE * k)


@dataclass(eq=False)
class AtenMatrix:
    """``scales`` bfloat16 [G, N, 2]: scale and shift."""

    rows: int
    columns: int
    group: int
    codes: Tensor
    scales: Tensor
    perm: Tensor | None
    bias: Tensor | None

    def __post_init__(self) -> None:
        self.nbytes = nbytes(self.codes, self.scales, self.perm, self.bias)

    def product(self, a: Tensor) -> Tensor:
        a = a if self.perm is None else a[:, self.perm]
        return torch._weight_int4pack_mm(a.contiguous(), self.codes, self.group, self.scales)


def pack_aten(weight: QWeight, bias: Tensor | None, device: torch.device) -> AtenMatrix:
    codes = weight.codes.to(device)
    pairs = (codes[:, ::2] << 4 | codes[:, 1::2]).contiguous()                  # the even column in the high nibble
    scale = weight.scale.to(device, torch.float32)
    offset = -weight.zero.to(device, torch.float32) * scale if weight.bias is None else weight.bias.to(device, torch.float32)
    scales = torch.stack((scale.t(), (offset + 8 * scale).t()), dim=-1).to(torch.bfloat16).contiguous()
    perm = None if weight.perm is None else weight.perm.to(device)
    return AtenMatrix(*weight.shape, weight.group, torch._convert_weight_to_int4pack(pairs, TILES), scales, perm,
                      bias_on(bias, device))


class Race:
    """``time``: seconds of some work on the device."""

    def __init__(self, dtype: torch.dtype, time: Time, pack_theirs: Callable[..., AtenMatrix] = pack_aten) -> None:
        self._dtype, self._time, self._pack = dtype, time, pack_theirs
        self._won: dict[tuple, bool] = {}       # by shape and group: did ATen's win?

    def faster(self, weight: QWeight, ours: PackedMatrix, product: Callable[[Tensor, object, Ending], None],
               note: Callable[[str], None]) -> PackedMatrix | AtenMatrix:
        """``ours`` or the same matrix in ATen's layout. ``product``: computes with either."""
        if not fits(weight, self._dtype):
            return ours
        key = (*weight.shape, weight.group, ours.kind, weight.perm is None)
        if self._won.get(key) is False:
            return ours
        theirs = self._pack(weight, ours.bias, ours.words.device)
        if key not in self._won:
            self._won[key] = self._wins(ours, theirs, product, note)
        return theirs if self._won[key] else ours

    def _wins(self, ours: PackedMatrix, theirs: AtenMatrix, product: Callable, note: Callable[[str], None]) -> bool:
        seconds = {}
        for rows in (1, MANY):
            x = torch.randn(rows, ours.columns, dtype=self._dtype, device=ours.words.device)
            ends = [Ending(x.new_empty(rows, ours.rows)) for _ in range(2)]
            for end, matrix in zip(ends, (ours, theirs)):
                product(x, matrix, end)
            one, two = (end.out.to(torch.float32) for end in ends)
            if float((one - two).norm()) > AGREE * float(one.norm()):
                note(f"torch's int4 product disagrees with ours at {ours.rows} × {ours.columns} and is not used")
                return False
            for end, matrix in zip(ends, (ours, theirs)):
                seconds[rows, matrix is theirs] = self._time(lambda x=x, m=matrix, e=end: product(x, m, e))
        won = seconds[1, True] < WIN * seconds[1, False] and seconds[MANY, True] <= LOSE * seconds[MANY, False]
        if won:
            note(f"matrices of {ours.rows} × {ours.columns} use torch's int4 product: {seconds[1, True] * 1e6:.1f} µs a row, "
                 f"ours {seconds[1, False] * 1e6:.1f}")
        return won


def time_on_device(device: torch.device, work: Callable[[], object]) -> float:
    """Seconds of one call, without the host's share: `REPEAT` calls recorded as a graph, the best of `ROUNDS` replays."""
    with torch.cuda.device(device):
        stream = torch.cuda.Stream()
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            work()
        torch.cuda.current_stream().wait_stream(stream)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, capture_error_mode="thread_local"):
            for _ in range(REPEAT):
                work()
        best = float("inf")
        for _ in range(ROUNDS):
            begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
            begin.record()
            graph.replay()
            end.record()
            end.synchronize()
            best = min(best, begin.elapsed_time(end) / 1e3)
    return best / REPEAT
