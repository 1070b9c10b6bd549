"""/openapi.json says what is true: FastAPI promises 422 for every body, which errors.py answers with 400 and another shape."""

from __future__ import annotations

from typing import Any

from fastapi import FastAPI
from fastapi.openapi.utils import get_openapi

from gainz_ui import __version__
from gainz_ui.api.route import only

NEVER = ("HTTPValidationError", "ValidationError")      # FastAPI's own shapes of a 422


def install(app: FastAPI) -> None:
    def describe() -> dict[str, Any]:
        if app.openapi_schema is None:
            app.openapi_schema = _true(get_openapi(title="Gainz", version=__version__, routes=app.routes))
        return app.openapi_schema
    app.openapi = describe
    only(app, "/openapi.json", "GET", "HEAD")


def _true(made: dict[str, Any]) -> dict[str, Any]:
    for operations in made["paths"].values():
        for operation in operations.values():
            operation["responses"].pop("422", None)
            if not operation["responses"].get("200", {}).get("content", {}).get("application/json", {"schema": 1}).get("schema"):
                del operation["responses"]["200"]["content"]["application/json"]
    for name in NEVER:
        made.get("components", {}).get("schemas", {}).pop(name, None)
    return made
