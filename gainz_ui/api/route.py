"""How our own routes read a body and answer other methods. The one place where the API reads JSON."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import Any

from fastapi import APIRouter, FastAPI, Request, Response
from fastapi.responses import JSONResponse
from fastapi.routing import APIRoute

from backends.characters import check_characters
from gainz_ui.api.errors import body as error_shape

METHODS = ("GET", "HEAD", "POST", "PUT", "PATCH", "DELETE", "OPTIONS")


class WholeRequest(Request):
    async def json(self) -> Any:
        found = await super().json()
        return check_characters("", found) if isinstance(found, dict) else found


class Route(APIRoute):
    """A body with half of a surrogate pair anywhere in it is refused before anything looks at its fields."""

    def get_route_handler(self) -> Callable[[Request], Awaitable[Response]]:
        handle = super().get_route_handler()

        async def handler(request: Request) -> Response:
            return await handle(WholeRequest(request.scope, request.receive, request._send))
        return handler


def only(routes: APIRouter | FastAPI, path: str, *taken: str) -> None:
    """Every other method is a 405 that says which are taken, and how."""
    posted = f"curl -X POST … {path} -H 'Content-Type: application/json' -d '{{…}}'; README.md has examples."
    remedy = posted if "POST" in taken else f"curl … {path}"

    async def refuse() -> JSONResponse:
        return JSONResponse(error_shape("method_not_allowed", f"{path} takes {taken[0]}.", remedy, status=405), 405, {"allow": ", ".join(taken)})
    routes.add_api_route(path, refuse, methods=[method for method in METHODS if method not in taken], include_in_schema=False)
