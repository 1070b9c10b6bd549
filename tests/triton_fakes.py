"""What stands in for a CUDA device in tests of the Triton target."""

from __future__ import annotations

from backends.kernels.triton_graphs import Recorded


class FakeRecorder:
    """A recording that is replayed by doing the work again, from the same buffers into the same result. ``breaks``: replays
    give something else; ``error``: recording raises it."""

    def __init__(self, breaks: bool = False, error: Exception | None = None) -> None:
        self.breaks, self.error = breaks, error
        self.recorded = self.replayed = 0

    def record(self, work) -> Recorded:
        if self.error is not None:
            raise self.error
        self.recorded += 1
        result = work()

        def replay() -> None:
            self.replayed += 1
            result.copy_(work())
            if self.breaks:
                result.add_(1)

        return Recorded(result, replay)
