"""What torch and the memory of this machine can do, told as one JSON object: ``python -m backends.probe``.

Run as a child by whoever must not import torch; nothing heavy is imported before `main`. Measures, never guesses.
"""

from __future__ import annotations

import json
import sys
import threading
import time
from typing import Any

BLOCK = 64 << 20            # bytes each thread reads in a pass: far beyond any cache
PASSES = 5
DEVICES = {"cpu": "cpu", "triton": "cuda"}     # of targets that run on one kind


def bandwidth(threads: int) -> float:
    """Bytes a second that ``threads`` threads together read from memory; the best of a few passes."""
    import numpy as np
    blocks = [np.ones(BLOCK // 8, dtype=np.float64) for _ in range(threads)]
    for block in blocks:
        block.sum()
    best = float("inf")
    for _ in range(PASSES):
        workers = [threading.Thread(target=block.max) for block in blocks]
        began = time.perf_counter()
        for worker in workers:
            worker.start()
        for worker in workers:
            worker.join()
        best = min(best, time.perf_counter() - began)
    return threads * BLOCK / best


def kernels() -> list[dict[str, Any]]:
    """Every target with what it is here, or why it is not available."""
    from backends.base import GainzError, LocalOptions
    from backends.kernels import choose
    names = [name for name in LocalOptions.__dataclass_fields__["kernels"].metadata["choices"] if name != "auto"]
    rows = []
    for name in names:
        try:
            ops, _ = choose(name, DEVICES.get(name, "auto"), "auto", 0)
            rows.append({"name": name, "available": True, "detail": ops.detail})
        except GainzError as error:
            rows.append({"name": name, "available": False, "detail": error.cause})
        except (OSError, RuntimeError, ImportError) as error:       # a library that does not load is a finding, not a crash
            rows.append({"name": name, "available": False, "detail": f"{type(error).__name__}: {error}"[:300]})
    return rows


def torch_facts() -> dict[str, Any]:
    import torch
    from backends.kernels import select
    devices = [{"name": torch.cuda.get_device_name(i), "capability": ".".join(map(str, torch.cuda.get_device_capability(i)))}
               for i in range(torch.cuda.device_count())] if torch.cuda.is_available() else []
    return {"version": torch.__version__, "cuda": torch.version.cuda, "hip": torch.version.hip, "cuda_devices": devices,
            "mps": torch.backends.mps.is_available(), "cpu_capability": torch.backends.cpu.get_cpu_capability(),
            "threads": select.default_threads()}


def main() -> int:
    try:
        facts: dict[str, Any] = {"torch": torch_facts()}
        facts["kernels"] = kernels()
    except ImportError as error:
        facts = {"error": f"{type(error).__name__}: {error}"}
    facts["bandwidth"] = bandwidth(facts.get("torch", {}).get("threads", 1))
    print(json.dumps(facts))
    return 0


if __name__ == "__main__":
    sys.exit(main())
