"""A real Chromium against a real server. Two servers, each once for all tests in here: the page over a studio without an
engine, whose speed and state a test sets; and the whole program over two tiny checkpoints. Every page must end without an
error on its console and without a request to anywhere else."""

from __future__ import annotations

import os
import re
import shutil
import socket
import subprocess
import sys
import threading
import time
from pathlib import Path

import httpx
import pytest

os.environ.setdefault("GRADIO_ANALYTICS_ENABLED", "False")
playwright = pytest.importorskip("playwright.sync_api")
ROOT = Path(__file__).parents[2]
FLAGS = ["--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run", "--disable-background-networking",
         "--disable-component-update", "--disable-sync"]
TAKES = 30_000                          # ms, on two cores that do other things as well


def pytest_collection_modifyitems(items) -> None:
    for item in items:
        if Path(item.path).parent == Path(__file__).parent:
            item.add_marker(pytest.mark.browser)


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


@pytest.fixture(scope="package")
def chromium():
    found = next((path for name in ("chromium", "chromium-browser", "google-chrome") if (path := shutil.which(name))), None)
    if found is None:
        pytest.skip("no Chromium here")
    with playwright.sync_playwright() as driver:
        browser = driver.chromium.launch(executable_path=found, args=FLAGS)
        playwright.expect.set_options(timeout=TAKES)
        yield browser
        browser.close()


class Stage:
    """The page over a fake studio, in this process."""

    def __init__(self) -> None:
        from tests.fakes.studio import FakeStudio
        from gainz_ui.services.tasks import Tasks
        self.studio, self.tasks, self.port = FakeStudio(), Tasks(), free_port()
        self.url = f"http://127.0.0.1:{self.port}/"
        self.startup, self.jobs = Startup(self.tasks), ScriptedJobs(self.studio)
        self.blocks = None
        self._server = self._make()
        self._thread = threading.Thread(target=self._server.run, daemon=True)
        self._thread.start()
        _wait_for(self.url)

    def _make(self):
        import fastapi
        import gradio as gr
        import uvicorn
        from gainz_ui import live, shell
        from gainz_ui.api.security import Guard
        from gainz_ui.settings import Settings
        self.blocks = shell.build(self.studio, Settings(), FakeStore(), self.tasks, doctor=report, startup=self.startup,
                                  jobs=self.jobs)
        app = fastapi.FastAPI(docs_url=None, redoc_url=None, openapi_url=None)
        app.include_router(live.router(self.blocks.gainz_page))
        app = gr.mount_gradio_app(app, self.blocks, path="/", **shell.mount_options())
        app.add_middleware(Guard, host="127.0.0.1")
        return uvicorn.Server(uvicorn.Config(app, port=self.port, log_level="error", timeout_graceful_shutdown=1))

    def reset(self, loaded: tuple[str, ...] = ("starter",)) -> None:
        """As at the start; ``loaded`` models in memory. What the last test asked for has ended by then and is forgotten."""
        from tests.fakes.studio import info
        self._end_work()
        self.tasks._tasks.clear()
        self.blocks.gainz_page.answers._answers.clear()
        studio = self.studio
        studio.speed, studio.tokens, studio.context, studio.load_seconds, studio.dead = 200.0, 40, 2048, 0.6, ""
        studio._models.clear()
        studio._models.update({name: info(name, studio.context) for name in loaded})
        studio.requests.clear()
        studio.speedup, studio.resting = 1.62, ()
        self.startup.task, self.startup.error = None, None
        self.jobs.reset()
        studio.changed.emit()

    def _end_work(self, seconds: float = 30) -> None:
        """Also what a page asked for while it was closed and what that begins in its turn."""
        end = time.monotonic() + seconds
        while busy := self._busy():
            self.tasks.close()
            self.blocks.gainz_page.answers.close()
            assert time.monotonic() < end, f"{busy} do not end"
            time.sleep(0.02)

    def _busy(self) -> list:
        """Events of pages, tasks and answers that are under way."""
        queue = self.blocks._queue
        events = [event.fn.name for job in queue.active_jobs for event in job or ()]
        return [*events, *([f"{len(queue)} events"] if len(queue) else []), *(task.kind for task in self.tasks.running()),
                *(["answer"] * self.studio._running)]

    def stop(self) -> None:
        self.blocks.gainz_page.answers.close()
        self.blocks.is_running = False
        self.blocks._queue.close()
        self._server.should_exit = True
        self._thread.join(10)


class Startup:
    """The server's first work, driven by the test."""

    def __init__(self, tasks) -> None:
        self.tasks, self.task, self.error, self.begun = tasks, None, None, 0
        self.work = lambda report, cancel: ()

    def begin(self) -> None:
        self.begun, self.error = self.begun + 1, None
        self.task = self.tasks.start("start", "starter", self.work)


class ScriptedJobs:
    """Jobs without a child: ten steps, then a result; ``made``: variants that stand in models/ from then on. A test sets
    ``error``."""

    def __init__(self, studio) -> None:
        self.studio = studio
        self.reset()

    def reset(self) -> None:
        self.calls, self.error, self.seconds = [], None, 0.5
        for name in [name for name in self.studio._entries if "-4bit-" in name]:
            del self.studio._entries[name]

    def run(self, command, arguments, progress, cancel, need=0):
        from backends.base import Progress
        self.calls.append((command, arguments, need))
        for step in range(10):
            cancel.raise_if_set("The job")
            if self.error is not None and step == 2:
                raise self.error
            progress(Progress("quantize" if command == "quantize" else "compare", step, 10))
            end = time.monotonic() + self.seconds / 10
            while time.monotonic() < end and not cancel.is_set():
                time.sleep(0.01)
        value = lambda option: arguments[arguments.index(option) + 1]  # noqa: E731
        if "--plan" in arguments:
            return {"name": value("--out"), "kept": [0, 3], "perplexity_before": 9.5, "perplexity_after": 1234.5}
        makes = command in ("quantize", "draft")
        return self._made(value("--out")) if makes else figures(value("--ref"), value("--model"))

    def _made(self, name):
        from types import SimpleNamespace
        entry = vars(self.studio._entries["starter"]) | {"name": name, "backend": "gguf", "format": "GPTQ 4-bit g64",
                                                         "size": 91_000_000}
        self.studio._entries[name] = SimpleNamespace(**entry)
        if self.studio.settings.models.is_dir():
            (self.studio.settings.models / name).mkdir()
        return {"name": name}


def figures(reference, model):
    """What the quality command would say."""
    far = 0.19 if "gptq" in model else 0.31
    task = {"questions": 200, "accuracy": 0.48, "accuracy_low": 0.41, "accuracy_high": 0.55, "reference_accuracy": 0.5,
            "lost": 9, "won": 5,
            "flips": 0.07, "flips_low": 0.042, "flips_high": 0.114, "difference": -0.02, "difference_low": -0.056,
            "difference_high": 0.016,
            "kinds": {}}
    return {"reference": reference, "model": model, "text": "bundled", "text_sha256": "a7fa0432" * 8,
            "reference_kernels": "cpu avx2, 2 threads",
            "reference_dtype": "float32", "model_kernels": "cpu avx2, 2 threads", "model_dtype": "float32",
            "perplexity": 52.1,
            "perplexity_se": 2.2, "reference_perplexity": 44.6, "reference_perplexity_se": 1.9, "kl_mean": far,
            "kl_se": 0.005,
            "kl_low": far - 0.01, "kl_high": far + 0.01, "kl_median": far / 2, "kl_p99": far * 7, "kl_max": far * 20,
            "top1": 0.77,
            "top1_low": 0.76, "top1_high": 0.78, "nll_difference": 0.155, "nll_difference_se": 0.006, "tokens": 12264,
            "windows": 24,
            "window_tokens": 512, "questions": task, "pace": {"speed": 120.0, "low": 112.0, "high": 128.0, "blocks": 6,
                                                              "steps": 24, "prompt": 64},
            "reference_pace": {"speed": 55.0, "low": 49.0, "high": 60.0, "blocks": 6, "steps": 24, "prompt": 64}}


class FakeStore:
    def add_local(self, path, name=None, progress=None, cancel=None, *, link=False):
        from backends.base import ModelNotFound

        raise ModelNotFound(
            f"There is nothing at {path}.", field="path", remedy="Check the path on the machine of the server."
        )


def report():
    from gainz_ui.services.doctor import Check, Report

    return Report(
        (Check("system", "Python", "ok", "3.11.2"), Check("compiler", "C++ compiler", "warn", "none found", "Install g++."))
    )


def _wait_for(url: str, status: int = 200, seconds: float = 120) -> None:
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        try:
            if httpx.get(url, timeout=5).status_code == status:
                return
        except httpx.HTTPError:
            pass
        time.sleep(0.1)
    raise AssertionError(f"{url} did not answer {status} within {seconds} s")


@pytest.fixture(scope="package")
def the_stage():
    """Its pages ask twice a second how things stand: what a test changes is soon seen."""
    from gainz_ui import live
    with pytest.MonkeyPatch.context() as sooner:
        for name in ("CALM", "BUSY", "PLACE"):
            sooner.setattr(live, name, 0.5)
        stage = Stage()
        yield stage
        stage.stop()


@pytest.fixture
def stage(the_stage):
    the_stage.reset()
    return the_stage


@pytest.fixture(scope="package")
def app(tmp_path_factory):
    """The whole program in a process of its own, one tiny model loaded and another one to load. Its address."""
    home, port = tmp_path_factory.mktemp("gainz"), free_port()
    for name in ("llama-fp16", "qwen2-fp16"):
        shutil.copytree(ROOT / "tests" / "fixtures" / name, home / "models" / name)
    command = [sys.executable, str(ROOT / "app.py"), "--port", str(port), "--load", "llama-fp16"]
    command += [part for name in ("models", "outputs", "logs") for part in (f"--{name}", str(home / name))]
    with (home / "log").open("wb") as log:
        process = subprocess.Popen(command, cwd=home, stdout=log, stderr=log, env={**os.environ, "OMP_NUM_THREADS": "1"})
    try:
        _wait_for(f"http://127.0.0.1:{port}/health")
        yield f"http://127.0.0.1:{port}/"
    finally:
        process.terminate()
        process.wait(30)


class Windows:
    """The browser's windows, by language and by number within a test. One that was open before has fetched and compiled the page
    already, which is most of what a visit costs; cookies and all else that it kept are wiped before it serves again."""

    def __init__(self, chromium) -> None:
        self._chromium, self._contexts, self._taken = chromium, {}, []

    def take(self, locale: str, url: str):
        """An empty page in a window that nobody has in this test."""
        number = sum(key[0] == locale for key in self._taken)
        self._taken.append((locale, number))
        if (locale, number) not in self._contexts:
            self._contexts[locale, number] = self._chromium.new_context(locale=locale, accept_downloads=True)
        context = self._contexts[locale, number]
        context.clear_cookies()
        context.set_offline(False)
        page = context.new_page()
        protocol = context.new_cdp_session(page)
        protocol.send("Storage.clearDataForOrigin", {"origin": url.rstrip("/"), "storageTypes": "all"})
        protocol.detach()
        return page

    def pages(self) -> list:
        return [page for key in self._taken for page in self._contexts[key].pages]

    def give_back(self) -> None:
        for page in self.pages():
            page.close()
        self._taken.clear()


@pytest.fixture(scope="package")
def windows(chromium):
    return Windows(chromium)


EVENTS = re.compile(r"/gradio_api/(run/|queue/join|queue/data)")


def events(page) -> set:
    """The page's requests for events of Gradio's that are under way: kept up to date."""
    open_ = set()
    page.on("request", lambda request: open_.add(request) if EVENTS.search(request.url) else None)
    for name in ("requestfinished", "requestfailed"):
        page.on(name, lambda request: open_.discard(request))
    return open_


def settle(page, under_way: set, seconds: float = 3) -> None:
    """What a page asks for when it is opened is there, and comes after nothing that a test does. Not waited for longer than that: a
    page may be opened to watch work that goes on."""
    end, still = time.monotonic() + seconds, 0
    while still < 3 and time.monotonic() < end:
        page.wait_for_timeout(50)
        still = 0 if under_way else still + 1


@pytest.fixture
def visit(windows):
    """visit(url, …) → a page that stands, in a window of its own; what it logs, raises and asks for elsewhere is judged at the end."""
    faults, forgiven = [], []

    def asked(page, url: str, request) -> None:
        """A request to elsewhere is a fault; one for another page is a leaving, whoever began it."""
        if not request.url.startswith((url, "data:", "blob:")):
            faults.append(f"foreign: {request.url}")
        if request.is_navigation_request() and request.frame == page.main_frame and page.url.startswith(url):
            leaving()

    def go(url: str, *, width: int = 1280, height: int = 900, locale: str = "en-US", scheme: str = "light"):
        page = windows.take(locale, url)
        page.set_viewport_size({"width": width, "height": height})
        page.emulate_media(color_scheme=scheme)
        page.set_default_timeout(TAKES)
        page.on("console", lambda message: faults.append(f"console: {message.text}") if message.type == "error" else None)
        page.on("pageerror", lambda error: faults.append(f"page: {error}"))
        page.on("request", lambda request: asked(page, url, request))
        under_way = events(page)
        page.goto(url, wait_until="domcontentloaded")
        page.locator("#gz-header .gz-chip").first.wait_for()
        settle(page, under_way)
        return page

    def leaving(*more: str) -> None:
        """Gradio's own client reports the streams that a page breaks off by leaving, or stumbles over what still comes of them;
        these reports are no fault, nor those with the words of ``more``. What a page shows afterwards is for the test to see."""
        forgiven.extend(("AbortError", "errored out", "Unexpected client exception", *more))

    go.leaving = leaving
    yield go
    for page in windows.pages():
        page.evaluate("0")  # what was reported until now arrives; what closing itself breaks off is not waited for
    seen = list(faults)
    windows.give_back()
    assert [fault for fault in seen if not any(part in fault for part in forgiven)] == []
