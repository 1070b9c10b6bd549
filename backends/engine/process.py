"""What the engine process asks of the operating system: threads, memory given back, who is killed first, where faults go.

Knows Linux, macOS and Windows only as far as each offers the thing; where it does not, nothing happens and nothing breaks.
"""

from __future__ import annotations

import ctypes
import faulthandler
import gc
import logging
import signal
import sys
import threading
from contextlib import contextmanager
from logging.handlers import RotatingFileHandler
from pathlib import Path

import psutil

from backends.base import GainzError, LoadError, MissingRequirement, OutOfMemory, StepFailed

OOM_SCORE = 500                         # of 1000: the kernel ends the engine before the page and before the desktop
SAMPLE_SECONDS = 0.02
# One glibc arena: with one for each thread, what stays after an unload lies scattered over pages that cannot be given back
# (measured: 25 to 45 MB up and down beside a 135M model; with one arena 1 to 2).
M_ARENA_MAX, ARENAS = -8, 1


def settle(logs: Path | None) -> None:
    """The child's first act. Ctrl-C reaches the whole terminal group, and the front decides what it means: ignored here."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    _glibc("mallopt", M_ARENA_MAX, ARENAS)
    _offer_for_oom_kill()
    root = logging.getLogger()
    root.setLevel(logging.INFO)
    if logs is None:
        return
    logs.mkdir(parents=True, exist_ok=True)
    handler = RotatingFileHandler(logs / "engine.log", maxBytes=5_000_000, backupCount=3, encoding="utf-8")
    handler.setFormatter(logging.Formatter("%(asctime)s %(levelname)s %(threadName)s %(name)s: %(message)s"))
    root.addHandler(handler)
    faulthandler.enable(open(logs / "engine-crash.log", "a", encoding="utf-8"))  # noqa: SIM115  open as long as we live


def _offer_for_oom_kill() -> None:
    score = Path("/proc/self/oom_score_adj")
    if not score.exists():
        return
    try:
        if int(score.read_text()) < OOM_SCORE:
            score.write_text(str(OOM_SCORE))
    except (OSError, ValueError) as error:
        logging.getLogger(__name__).info("the OOM score stays as it is: %s", error)


def bound_threads() -> None:
    """One thread for work between operators: the loop is the only one that computes. Those inside an operator are counted
    out at load (`kernels.select`)."""
    torch = sys.modules.get("torch")
    if torch is None:
        return
    try:
        torch.set_num_interop_threads(1)
    except RuntimeError as error:       # work has already run on that pool: what it has is what it keeps
        logging.getLogger(__name__).info("interop threads stay as they are: %s", error)


def give_memory_back() -> None:
    """Collect cycles, return the allocators' free pages to the system."""
    gc.collect()
    torch = sys.modules.get("torch")
    if torch is not None and torch.cuda.is_available() and torch.cuda.is_initialized():
        torch.cuda.empty_cache()
    _glibc("malloc_trim", 0)


def _glibc(name: str, *arguments: int) -> None:
    """Call what glibc has and other C libraries have not."""
    function = getattr(ctypes.CDLL(None), name, None) if sys.platform.startswith("linux") else None
    if function is not None:
        function(*arguments)


@contextmanager
def peak_growth():
    """Yields a list that holds, after the block, [bytes]: how far the resident memory rose above where it began; where memory
    of a GPU was taken, that."""
    process, done, seen = psutil.Process(), threading.Event(), []
    held = lambda: (process.memory_info().rss, _on_gpu())  # noqa: E731
    start = highest = held()

    def watch() -> None:
        nonlocal highest
        while not done.wait(SAMPLE_SECONDS):
            highest = tuple(map(max, highest, held()))

    watcher = threading.Thread(target=watch, name="peak", daemon=True)
    watcher.start()
    try:
        yield seen
    finally:
        done.set()
        watcher.join()
        rise, there = (max(high, now) - low for high, now, low in zip(highest, held(), start))
        seen.append(there if there > 0 else max(0, rise))


def _on_gpu() -> int:
    """Bytes that torch's allocator holds on the current CUDA device."""
    torch = sys.modules.get("torch")
    started = torch is not None and torch.cuda.is_available() and torch.cuda.is_initialized()
    return torch.cuda.memory_reserved() if started else 0


def is_out_of_memory(error: BaseException) -> bool:
    torch = sys.modules.get("torch")
    if isinstance(error, MemoryError) or torch is not None and isinstance(error, torch.OutOfMemoryError):
        return True
    return isinstance(error, RuntimeError) and "can't allocate memory" in str(error)    # torch's CPU allocator has no class


def typed(error: BaseException, doing: str) -> GainzError:
    """Any exception as one that crosses the border. What nobody foresaw keeps its class and text as evidence."""
    if isinstance(error, GainzError):
        return error
    if is_out_of_memory(error):
        return OutOfMemory(f"Memory ran out while {doing}.", free=psutil.virtual_memory().available, reason=error)
    if isinstance(error, ModuleNotFoundError):
        return MissingRequirement(f"{error.name} is missing while {doing}.", needs=error.name)
    family = LoadError if doing.startswith("loading") else StepFailed
    return family(f"An unforeseen fault while {doing}; logs/engine.log has the traceback.",
                  exception=f"{type(error).__name__}: {error}")
