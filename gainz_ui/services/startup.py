"""What happens after the page is up: the starter is fetched, the first models are loaded. Never before, never in its way.

The rule, without --load: the starter where it is there; else the only model there is; else, with nothing there at all, the
starter is fetched. Several models and no starter: nothing is loaded, the person chooses. With --no-starter nothing is
fetched and nothing is loaded unasked.
"""

from __future__ import annotations

from backends.base import Cancel, GainzError, Progress, ProgressFn
from gainz_ui.services import starter
from gainz_ui.services.store import Store
from gainz_ui.services.studio import Studio
from gainz_ui.services.tasks import Task, Tasks
from gainz_ui.settings import Settings

KIND = "start"


class Startup:
    """The first work of one server, as a task that page, /health and terminal watch. `begin` again tries again."""

    def __init__(self, settings: Settings, studio: Studio, store: Store, tasks: Tasks) -> None:
        self.settings, self.studio, self.store, self.tasks = settings, studio, store, tasks
        self.task: Task | None = None

    def begin(self, watch: ProgressFn = lambda progress: None) -> Task:
        """Start, or start again after a failure; returns at once. ``watch`` hears the progress beside the task's own."""
        def work(report: ProgressFn, cancel: Cancel) -> tuple[str, ...]:
            def both(progress: Progress) -> None:
                report(progress)
                watch(progress)
            return self._run(both, cancel)

        self.task = self.tasks.start(KIND, starter.NAME, work)
        return self.task

    @property
    def error(self) -> GainzError | None:
        """Why the start has failed, while no model is loaded that would make up for it."""
        task = self.task
        return task.error if task is not None and not task.running and not self.studio.loaded() else None

    def _run(self, progress: ProgressFn, cancel: Cancel) -> tuple[str, ...]:
        names, errors = [], []
        for name in self._wanted(progress, cancel):
            try:
                with self.studio.not_ready(f"loading {name}"):
                    self.studio.load(name, {}, progress, cancel)
                names.append(name)
            except GainzError as error:         # the others are loaded all the same; the first error is the task's
                errors.append(error)
        if errors:
            raise errors[0]
        return tuple(names)

    def _wanted(self, progress: ProgressFn, cancel: Cancel) -> tuple[str, ...]:
        if self.settings.load or not self.settings.starter:
            return self.settings.load
        entries = self.studio.catalog()
        if any(entry.name == starter.NAME and entry.ready for entry in entries):
            return (starter.NAME,)
        if entries:
            ready = [entry.name for entry in entries if entry.ready]
            return tuple(ready) if len(ready) == 1 else ()
        with self.studio.not_ready("fetching the starter model"):
            return (self.store.ensure_starter(progress, cancel),)
