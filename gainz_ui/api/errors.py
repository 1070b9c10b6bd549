"""Typed errors to HTTP, once: status, and one JSON shape for everything that goes wrong.

``{"error": {"code", "message", "type", "param", "remedy", "field", "evidence"}}``: what OpenAI's clients read (message, type, param,
code) and what people need (remedy, field, evidence) in one. A subclass has its parent's status unless it is listed.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Callable
from typing import Any

from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse
from starlette.exceptions import HTTPException

from backends import base
from backends.base import GainzError
from gainz_ui.api import faults

log = logging.getLogger(__name__)
INTERNAL = "internal_error"             # the code of a fault of ours

STATUS: dict[type[GainzError], int] = {
    GainzError: 500,
    base.InvalidRequest: 400, base.NameRefused: 400, base.NotSupported: 400, base.BadSetting: 400,
    base.ModelNotFound: 404, base.ModelNotLoaded: 409, base.NameTaken: 409, base.Cancelled: 499,
    base.LoadError: 422, base.MissingRequirement: 501,
    base.QueueFull: 429, base.EngineDied: 503, base.EngineStopping: 503, base.OutOfMemory: 503,
    base.NotMeasurable: 400, base.StepFailed: 500, base.JobDied: 500, base.RegistryError: 500, base.PortTaken: 500,
    base.DiskFull: 507, base.FetchFailed: 502, base.RemoteUnreachable: 502, base.RemoteFailed: 502,
}
_PLAIN = {404: ("not_found", "There is nothing at this address.", "The API's addresses are listed in docs/api.md."),
          405: ("method_not_allowed", "This address does not take that method.", "See the Allow header of this answer.")}


def status(error: GainzError) -> int:
    return next(STATUS[kind] for kind in type(error).__mro__ if kind in STATUS)


def kind(status: int) -> str:
    """OpenAI's word for a class of errors."""
    named = {401: "authentication", 403: "permission", 404: "not_found", 429: "rate_limit"}
    return named.get(status, "server" if status >= 500 else "invalid_request") + "_error"


def body(code: str, message: str, remedy: str = "", field: str | None = None, evidence: Any = None, *,
         status: int = 400) -> dict[str, Any]:
    return {"error": {"code": code, "message": message, "type": kind(status), "param": field, "remedy": remedy, "field": field,
                      "evidence": evidence or {}}}


def error_body(error: GainzError) -> dict[str, Any]:
    data = error.to_dict()
    return body(data["code"], data["cause"], data["remedy"], data["field"], data["evidence"], status=status(error))


def respond(error: GainzError) -> JSONResponse:
    code = status(error)
    headers = {"retry-after": _seconds(error)} if code in (429, 503) else {"x-should-retry": "false"} if code in (409, 500) else None
    return JSONResponse(error_body(error), code, headers=headers)      # OpenAI's clients would try a 409 again, in vain


def _seconds(error: GainzError) -> str:
    """When to try again: what the queue expects, else soon."""
    try:
        return str(max(1, math.ceil(float(error.evidence.get("seconds", 1)))))
    except (TypeError, ValueError, OverflowError):
        return "1"


def install(app: FastAPI, failed: Callable[[str], None] = lambda code: None) -> None:
    """The handlers of our own routes (Gradio's routes answer for themselves). ``failed``: hears the code of each fault of ours that no
    request's record tells."""
    async def unexpected(request: Request, error: Exception) -> JSONResponse:
        failed(INTERNAL)
        return await _unexpected(request, error)

    app.add_exception_handler(GainzError, _gainz)
    app.add_exception_handler(RequestValidationError, _invalid)
    app.add_exception_handler(HTTPException, _http)
    app.add_exception_handler(Exception, unexpected)


async def _gainz(request: Request, error: Exception) -> JSONResponse:
    assert isinstance(error, GainzError)
    return respond(error)


async def _invalid(request: Request, error: Exception) -> JSONResponse:
    """The first fault that pydantic found, in our words."""
    assert isinstance(error, RequestValidationError)
    found = error.errors()
    if found[0]["type"] == "json_invalid":
        return _no_json(found[0].get("ctx", {}).get("error", found[0]["msg"]))
    expected = getattr(request.scope.get("route"), "body_field", None)
    told = faults.told(found, expected.field_info.annotation if expected is not None else None)
    return JSONResponse(body("invalid_request", told.message, told.remedy, told.field or None), 400)


async def _http(request: Request, error: Exception) -> JSONResponse:
    assert isinstance(error, HTTPException)
    if error.status_code == 400:        # the one 400 of the framework's own: a body that could not be read as JSON
        reason = error.__cause__ or error.__context__
        return respond(reason) if isinstance(reason, GainzError) else _no_json(_why_no_json(reason))
    code, message, remedy = _PLAIN.get(error.status_code, ("http_error", str(error.detail), "See this answer's status and headers."))
    return JSONResponse(body(code, message, remedy, status=error.status_code), error.status_code, headers=error.headers)


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


async def no_such_name(request: Request, error: Exception) -> JSONResponse:
    """Gradio's routes know no endpoint of that name; by itself it would call that a fault of the server."""
    return JSONResponse(body("not_found", "There is no endpoint of that name.", "The names are listed at "
                             "/gradio_api/info.", status=404), 404)


async def nothing_here(request: Request, error: Exception) -> JSONResponse:
    """A path that nobody answers, or a file that Gradio's routes do not find."""
    found = getattr(error, "detail", "Not Found")
    said = f"There is nothing at {request.url.path[:200]}." if found == "Not Found" else str(found)
    return JSONResponse(body("not_found", said, "The page is at /, our own API at /generate, /tokenize and /detokenize, OpenAI's at "
                             "/v1/chat/completions, /v1/completions, /v1/embeddings and /v1/models.", status=404), 404)


async def _unexpected(request: Request, error: Exception) -> JSONResponse:
    """A bug of ours: the traceback goes to the log, the client learns that it was not the client's fault."""
    log.error("unexpected error on %s %s", request.method, request.url.path, exc_info=error)
    return JSONResponse(body(INTERNAL, "An unexpected error on the server.", "The server's log has the traceback; "
                             "please report it.", status=500), 500)
