"""One server: page, API and the first work on one port, up in seconds and down within the drain time.

Knows how the parts are put together and how they stop. The socket is bound before anything slow is imported, so that a taken
port is one line at once, and nobody connects to a port that is not ours yet.
"""

from __future__ import annotations

import errno
import gc
import logging
import os
import signal
import socket
import sys
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from backends.base import BadSetting, PortTaken, ProgressFn
from gainz_ui.services.jobs import Jobs
from gainz_ui.services.keys import KeyFile, KeyRing
from gainz_ui.services.startup import Startup
from gainz_ui.services.store import Store
from gainz_ui.services.studio import Studio
from gainz_ui.services.tasks import Tasks
from gainz_ui.settings import Settings

log = logging.getLogger(__name__)
BACKLOG = 2048
FAREWELL = 0.3              # seconds in which pages hear the last of their answers, before their streams end
OVERTIME = 1.2              # seconds beyond the drain after which connections are cut
QUIET = {"GRADIO_ANALYTICS_ENABLED": "False", "HF_HUB_DISABLE_TELEMETRY": "1", "DO_NOT_TRACK": "1"}


@dataclass(frozen=True)
class House:
    """Everything that one server consists of."""

    settings: Settings
    studio: Studio
    store: Store
    tasks: Tasks
    startup: Startup
    jobs: Jobs


def furnish(settings: Settings, studio: Studio | None = None) -> House:
    """The services over one set of settings; a folder that is missing is made, but not the folders above it: a mistyped path
    must not become an empty place."""
    for folder in (settings.models, settings.outputs, settings.logs):
        try:
            folder.mkdir(exist_ok=True)
        except FileNotFoundError as error:
            raise BadSetting(f"There is no folder {folder.parent} to hold {folder.name}.", folder=folder,
                             remedy="Correct the path, or make the folder first.") from error
        except OSError as error:
            raise BadSetting(f"The folder {folder} cannot be made.", folder=folder, reason=error.strerror or error) from error
    studio, store, tasks = studio or Studio(settings), Store(settings.models), Tasks()
    store.revisions.mend()
    return House(settings, studio, store, tasks, Startup(settings, studio, store, tasks), Jobs(settings.models))


# ---------------------------------------------------------------------------------------------- the port
def bind(host: str, port: int) -> socket.socket:
    """A listening socket. PortTaken, or BadSetting for an address that is not of this machine."""
    try:
        family, kind, proto, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)[0]
    except socket.gaierror as error:
        raise BadSetting(f"--host {host} is no address.", field="host", reason=error.strerror) from error
    made = socket.socket(family, kind, proto)
    if os.name == "posix":          # on Windows this option would let two servers share a port
        made.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        made.bind(address)
        made.listen(BACKLOG)
    except OSError as error:
        made.close()
        raise _bind_error(error, host, port) from error
    return made


def _bind_error(error: OSError, host: str, port: int) -> Exception:
    if error.errno == errno.EADDRINUSE:
        return PortTaken(f"Port {port} is in use.", remedy=f"Stop the other program, or start with --port {port % 65535 + 1}.", port=port)
    if error.errno in (errno.EACCES, errno.EPERM):
        return BadSetting(f"Port {port} may not be opened by this user.", field="port", remedy="Choose a port above 1023.")
    return BadSetting(f"{host} is no address of this machine.", field="host", reason=error.strerror,
                      remedy="Use 127.0.0.1, or an address that this machine has.")


# ---------------------------------------------------------------------------------------------- the application
def build_app(house: House, page: Callable[[House], Any] | None = None) -> Any:
    """The ASGI application: guard, our routes, then the page. ``page``: makes the Blocks (default: the shell)."""
    os.environ.update({key: value for key, value in QUIET.items() if key not in os.environ})    # before gradio is imported
    import gradio as gr
    from fastapi import FastAPI

    from gainz_ui import live, shell
    from gainz_ui.api import errors, native, openai_routes, openapi
    from gainz_ui.api.security import UPLOAD_LIMIT, Guard
    settings = house.settings
    app = FastAPI(title="Gainz", docs_url=None, redoc_url=None)      # their pages load scripts from elsewhere
    errors.install(app, house.studio.meter.failed)
    app.include_router(native.router(house.studio, house.startup))
    app.include_router(openai_routes.router(house.studio))
    openapi.install(app)
    app.state.demo = (page or _page)(house)
    if (shown := getattr(app.state.demo, "gainz_page", None)) is not None:
        app.include_router(live.router(shown))
    app = gr.mount_gradio_app(app, app.state.demo, path="/", server_name=settings.host, server_port=settings.port,
                              allowed_paths=[str(settings.outputs.resolve())], max_file_size=UPLOAD_LIMIT,
                              blocked_paths=[str(folder.resolve()) for folder in (settings.models, settings.logs)],
                              **shell.mount_options(settings.language))
    _mounted(app).add_exception_handler(gr.route_utils.FnIndexInferError, errors.no_such_name)
    _mounted(app).add_exception_handler(404, errors.nothing_here)
    app.add_middleware(Guard, host=settings.host, keys=KeyRing(KeyFile(settings.keys), settings.api_key), hosts=settings.allowed_hosts,
                       origins=settings.allowed_origins, answered=house.studio.meter.answered, here=house.studio.reach.here)
    return app


def _mounted(app: Any) -> Any:
    """Gradio's own application inside ours."""
    import gradio as gr
    return next(route.app for route in app.routes if isinstance(getattr(route, "app", None), gr.routes.App))


def _page(house: House) -> Any:
    from gainz_ui import api_names, shell
    from gainz_ui.services import doctor
    return shell.build(house.studio, house.settings, house.store, house.tasks,
                       doctor=lambda: doctor.examine(house.settings, house.studio.registry),
                       api=lambda: api_names.register(house.studio, house.jobs), startup=house.startup, jobs=house.jobs)


# ---------------------------------------------------------------------------------------------- running
def make_server(app: Any, house: House, on_up: Callable[[], Any] = lambda: None) -> Any:
    """A uvicorn server that also stops with a page open: the page's event stream ends only when it is told to. ``on_up`` is
    called once the port answers: what takes long begins then, and competes with nothing before."""
    import uvicorn

    class Server(uvicorn.Server):
        async def startup(self, sockets=None) -> None:
            await super().startup(sockets)
            on_up()

        def handle_exit(self, sig, frame) -> None:
            super().handle_exit(sig, frame)
            threading.Thread(target=self.farewell, name="close", daemon=True).start()       # while the server drains

        def farewell(self) -> None:
            """Answers first, so that their last words reach the pages that watch; only then the pages' own streams: Gradio tells
            a page whose stream is closed under an answer nothing but that there was an error."""
            house.tasks.close()
            house.studio.close()
            time.sleep(FAREWELL)
            demo = app.state.demo
            demo.is_running = False
            demo._queue.close()
            mounted = _mounted(app)
            if mounted.stop_event is None:
                return
            try:
                self.loop.call_soon_threadsafe(mounted.stop_event.set)
            except RuntimeError:
                log.debug("the loop has ended already: nobody was connected")

        async def serve(self, sockets=None) -> None:
            import asyncio
            self.loop = asyncio.get_running_loop()
            await super().serve(sockets)

    config = uvicorn.Config(app, log_config=None, access_log=False, server_header=False,
                            timeout_graceful_shutdown=house.settings.drain + OVERTIME, timeout_keep_alive=30, backlog=BACKLOG)
    return Server(config)


def _begin(startup: Startup, watch: ProgressFn, say: Callable[[str], None]) -> None:
    """Start the first work, and say at its end how it went."""
    task = startup.begin(watch)

    def announce() -> None:
        task.wait()
        if task.error is not None and task.state != "cancelled":
            say(f"Error: {' '.join(str(task.error).split())} The page is up all the same.")
        elif task.result:
            say(f"Ready: {', '.join(task.result)}")

    threading.Thread(target=announce, name="announce", daemon=True).start()


def _heard(number: int, frame: Any) -> None:
    """uvicorn raises the signals that stopped it once more at its end; by then they have been heeded."""


def serve(settings: Settings, watch: ProgressFn, say: Callable[[str], None] = lambda text: print(text, file=sys.stderr, flush=True)) -> int:
    """Until a signal comes. Exit code."""
    bound = bind(settings.host, settings.port)
    address, port = settings.host, bound.getsockname()[1]
    say(f"Gainz is starting on port {port} …")
    house = furnish(settings)
    try:
        app = build_app(house)
        server = make_server(app, house, lambda: _begin(house.startup, watch, say))
        shown = f"[{address}]" if ":" in address else "127.0.0.1" if address == "0.0.0.0" else address
        say(f"Gainz is at http://{shown}:{port}   (Ctrl+C stops it)")
        for number in (signal.SIGINT, signal.SIGTERM):
            signal.signal(number, _heard)
        server.run(sockets=[bound])
    finally:
        house.tasks.close()
        house.studio.close()
        bound.close()
    say("Gainz has stopped.")
    gc.freeze()             # the interpreter's own end would look through every object once more: seconds on a busy machine
    return 0
