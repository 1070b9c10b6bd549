"""Our own OpenAPI description against the routes it describes: whatever is sent, no 5xx, and the answers that were promised."""

from __future__ import annotations

import logging

import pytest
from fastapi import FastAPI
from hypothesis import HealthCheck, Phase, settings

from gainz_ui.api import errors, native, openai_routes, openapi
from gainz_ui.services.startup import Startup
from gainz_ui.services.tasks import Tasks
from gainz_ui.settings import Settings
from tests.api_fakes import FakeStudio

schemathesis = pytest.importorskip("schemathesis", reason="requirements-dev.txt has it")
pytestmark = pytest.mark.filterwarnings("ignore")          # of the generator's own dependencies


def make() -> FastAPI:
    studio = FakeStudio()
    app = FastAPI(docs_url=None, redoc_url=None)
    errors.install(app)
    app.include_router(native.router(studio, Startup(Settings(), studio, None, Tasks())))
    app.include_router(openai_routes.router(studio))
    openapi.install(app)
    return app


from schemathesis.checks import not_a_server_error  # noqa: E402  after the skip
from schemathesis.specs.openapi.checks import (  # noqa: E402
    content_type_conformance, response_schema_conformance, status_code_conformance)

described = schemathesis.openapi.from_asgi("/openapi.json", make())
CHECKS = [not_a_server_error, status_code_conformance, content_type_conformance, response_schema_conformance]


@described.parametrize()
@settings(max_examples=6, deadline=None, derandomize=True, phases=[Phase.explicit, Phase.generate], suppress_health_check=list(HealthCheck))
def test_no_request_makes_the_server_fail(case):
    logging.disable(logging.CRITICAL)
    try:
        case.call_and_validate(checks=CHECKS)
    finally:
        logging.disable(logging.NOTSET)
