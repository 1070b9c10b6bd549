"""What works is kept, and offered when a load fails."""

from __future__ import annotations

import json
from dataclasses import replace
from types import SimpleNamespace

import pytest

from backends.base import DiskFull, InvalidRequest, MemoryEstimate, ModelNotLoaded
from gainz_ui.services.working import FILE, SMALLEST, Working
from gainz_ui.tabs.models_working import WorkingForm
from tests.api_fakes import INFO


class Studio:
    def __init__(self, fits: bool = True, error: Exception | None = None) -> None:
        self.fits, self.error, self.present = fits, error, {"tiny": replace(INFO, context=777, options=(("context", 0), ("streams", 2)))}

    def loaded(self):
        return self.present

    def estimate(self, name, options):
        if self.error:
            raise self.error
        return MemoryEstimate(1, 1, 1, 100 if self.fits else 1, options["context"], 9)


def test_what_works_is_kept_with_the_context_that_it_got(tmp_path):
    made = Working(Studio(), tmp_path)
    assert made.kept("tiny") is None and made.offer("tiny") == SMALLEST
    assert made.keep("tiny") == {"context": 777, "streams": 2} == Working(Studio(), tmp_path).kept("tiny") == made.offer("tiny")
    with pytest.raises(ModelNotLoaded):
        made.keep("other")
    assert list(tmp_path.iterdir()) == [tmp_path / FILE]


def test_without_one_the_smallest_is_offered_where_it_can_work(tmp_path):
    assert Working(Studio(fits=False), tmp_path).offer("tiny") is None
    assert Working(Studio(error=InvalidRequest("no such option")), tmp_path).offer("tiny") is None


def test_a_broken_file_and_a_folder_that_is_gone(tmp_path):
    made = Working(Studio(), tmp_path)
    (tmp_path / FILE).write_text("{")
    assert made.kept("tiny") is None
    made.keep("tiny")
    assert json.loads((tmp_path / FILE).read_text())["tiny"]["streams"] == 2
    with pytest.raises(DiskFull):
        Working(Studio(), tmp_path / "gone").keep("tiny")


@pytest.mark.parametrize("state,loaded,keep,retry", [("failed", False, False, True), ("done", True, True, False), ("cancelled", False, False, False)])
def test_the_page_offers_it_only_after_a_failure(tmp_path, state, loaded, keep, retry):
    studio = Studio()
    if not loaded:
        studio.present = {}
    page = SimpleNamespace(studio=studio, settings=SimpleNamespace(models=tmp_path), tasks=SimpleNamespace(latest=lambda kind, name: SimpleNamespace(state=state)))
    form = WorkingForm.__new__(WorkingForm)
    form.page, form.working = page, Working(studio, tmp_path)
    first, second, said = form.show(None, "tiny")
    assert (first.visible, second.visible, "context = 512" in said["value"]) == (keep, retry, retry)
