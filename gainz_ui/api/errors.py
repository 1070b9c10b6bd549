"""Typed errors to HTTP, once: status, and one JSON shape for everything that goes wrong.

``{"error": {"code", "message", "remedy", "field", "evidence"}}``. A subclass has its parent's status unless it is listed.
"""

from __future__ import annotations

import logging
from typing import Any

from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse
from starlette.exceptions import HTTPException

from backends import base
from backends.base import GainzError

log = logging.getLogger(__name__)

STATUS: dict[type[GainzError], int] = {
    GainzError: 500,
    base.InvalidRequest: 400, base.NameRefused: 400, base.NotSupported: 400, base.BadSetting: 400,
    base.ModelNotFound: 404, base.ModelNotLoaded: 409, base.NameTaken: 409, base.Cancelled: 499,
    base.LoadError: 422, base.MissingRequirement: 501,
    base.QueueFull: 429, base.EngineDied: 503, base.EngineStopping: 503, base.OutOfMemory: 503,
    base.StepFailed: 500, base.JobDied: 500, base.RegistryError: 500, base.PortTaken: 500,
    base.DiskFull: 507, base.FetchFailed: 502,
}
_PLAIN = {404: ("not_found", "There is nothing at this address.", "The API's addresses are listed in README.md, section API."),
          405: ("method_not_allowed", "This address does not take that method.", "See the Allow header of this answer.")}


def status(error: GainzError) -> int:
    return next(STATUS[kind] for kind in type(error).__mro__ if kind in STATUS)


def body(code: str, message: str, remedy: str = "", field: str | None = None, evidence: Any = None) -> dict[str, Any]:
    return {"error": {"code": code, "message": message, "remedy": remedy, "field": field, "evidence": evidence or {}}}


def error_body(error: GainzError) -> dict[str, Any]:
    data = error.to_dict()
    return body(data["code"], data["cause"], data["remedy"], data["field"], data["evidence"])


def respond(error: GainzError) -> JSONResponse:
    headers = {"retry-after": "1"} if status(error) in (429, 503) else None
    return JSONResponse(error_body(error), status(error), headers=headers)


def install(app: FastAPI) -> None:
    """The handlers of our own routes (Gradio's routes answer for themselves)."""
    app.add_exception_handler(GainzError, _gainz)
    app.add_exception_handler(RequestValidationError, _invalid)
    app.add_exception_handler(HTTPException, _http)
    app.add_exception_handler(Exception, _unexpected)


async def _gainz(request: Request, error: Exception) -> JSONResponse:
    assert isinstance(error, GainzError)
    return respond(error)


async def _invalid(request: Request, error: Exception) -> JSONResponse:
    """The first fault that pydantic found, in our words: which field, and what was wrong with it."""
    assert isinstance(error, RequestValidationError)
    fault = error.errors()[0]
    where = [str(part) for part in fault["loc"] if part not in ("body", "query", "path")]
    if fault["type"] == "json_invalid":
        return _no_json(fault.get("ctx", {}).get("error", fault["msg"]))
    if not where:
        return JSONResponse(body("invalid_request", "The body must be a JSON object, sent as Content-Type: application/json.",
                                 "With curl: -H 'Content-Type: application/json' -d '{\"prompt\": \"Hello\"}'"), 400)
    if fault["type"] == "extra_forbidden":
        return JSONResponse(body("invalid_request", f"Unknown field {where[-1]!r}.",
                                 "Remove it: a field that is not known is refused, never ignored.", where[-1]), 400)
    name = where[0] if where[0] != "messages" else ".".join(where)
    return JSONResponse(body("invalid_request", f"{name}: {fault['msg']}.", base.InvalidRequest.advice, name), 400)


async def _http(request: Request, error: Exception) -> JSONResponse:
    assert isinstance(error, HTTPException)
    if error.status_code == 400:        # the one 400 of the framework's own: a body that it could not read as JSON
        return _no_json(_why_no_json(error.__cause__ or error.__context__))
    code, message, remedy = _PLAIN.get(error.status_code, ("http_error", str(error.detail), "See this answer's status and headers."))
    return JSONResponse(body(code, message, remedy), error.status_code, headers=error.headers)


def _no_json(why: str) -> JSONResponse:
    return JSONResponse(body("invalid_json", f"The body is no JSON: {why}.",
                             "Check quotes, commas and brackets; on a command line quote the whole body."), 400)


def _why_no_json(reason: BaseException | None) -> str:
    if isinstance(reason, RecursionError):
        return "it is nested too deeply"
    if isinstance(reason, UnicodeDecodeError):
        return f"byte {reason.start} is not UTF-8"
    if isinstance(reason, ValueError) and "digits" in str(reason):
        return "a number in it has too many digits"
    return "it cannot be read"


async def _unexpected(request: Request, error: Exception) -> JSONResponse:
    """A bug of ours: the traceback goes to the log, the client learns that it was not the client's fault."""
    log.error("unexpected error on %s %s", request.method, request.url.path, exc_info=error)
    return JSONResponse(body("internal_error", "An unexpected error on the server.", "The server's log has the traceback; "
                             "please report it."), 500)
