"""Ready code for what the page just did: the Gradio client for Python, curl for everything else. Pure."""

from __future__ import annotations

import json
import re
import shlex
from dataclasses import dataclass, fields
from typing import Any

from backends.base import Request, Sampling

@dataclass(frozen=True)
class Address:
    """Where a script finds the server, and whether it has to bring the key (which is named, never shown)."""

    url: str = "http://127.0.0.1:7860"
    key: bool = False


def address_of(request: Any) -> Address:
    """Where this page was fetched from; a page that had to log in tells that scripts have to, too. ``request``: a gr.Request."""
    headers = getattr(request, "headers", None) or {}
    host = headers.get("host")
    scheme = headers.get("x-forwarded-proto", "http")
    key = "authorization" in headers or "x-api-key" in headers
    return Address(f"{scheme}://{host}", key) if host else Address()


def snippets(python: str, curl: str) -> str:
    """Both as Markdown; the fences are longer than any inside."""
    fence = "`" * max(3, *(len(run) + 1 for run in re.findall("`+", python + curl) or [""]))
    return f"Python\n\n{fence}python\n{python.rstrip()}\n{fence}\n\ncurl\n\n{fence}bash\n{curl.rstrip()}\n{fence}"


def changed(sampling: Sampling) -> dict[str, Any]:
    """The sampling fields that differ from their defaults, as JSON."""
    plain = Sampling()
    values = {item.name: getattr(sampling, item.name) for item in fields(Sampling)}
    out = {
        name: list(value) if isinstance(value, tuple) else value
        for name, value in values.items()
        if value != getattr(plain, name)
    }
    if "logit_bias" in out:
        out["logit_bias"] = {str(token): bias for token, bias in sampling.logit_bias}
    return out


def chat_snippets(request: Request, model: str | None, address: Address = Address()) -> tuple[str, str]:
    """(Python, curl) of one chat request whose last message is the question."""
    options = changed(request.sampling)
    *earlier, last = request.prompt
    system = next((m.content for m in earlier if m.role == "system"), None)
    history = [{"role": m.role, "content": m.content} for m in earlier if m.role != "system"]
    draft, length = (request.draft.name, request.draft.length) if request.draft else (None, None)
    given = {"history": history, "system": system, "model": model, "draft": draft, "draft_length": length, **options}
    arguments = "".join(f"    {name}={value!r},\n" for name, value in given.items() if value)
    python = (
        f"{_client(address)}job = client.submit(\n    {last.content!r},\n"
        f'{arguments}    api_name="/chat",\n)\nfor answer in job:                    # the answer as it grows\n'
        '    print(answer["text"])\n'
    )
    messages = [{"role": m.role, "content": m.content} for m in request.prompt]
    drafted = {"draft": {"name": draft, "length": length} if length else draft} if draft else {}
    return python, _curl(address, "/generate", {"model": model, "messages": messages, **drafted, **options})


def call_snippets(name: str, arguments: dict[str, Any], address: Address = Address()) -> tuple[str, str]:
    """(Python, curl) of one call by its public name."""
    listed = ", ".join(f"{key}={value!r}" for key, value in arguments.items())
    python = (f"{_client(address)}"
              f"print(client.predict({listed + ', ' if listed else ''}api_name=\"/{name}\"))\n")
    data = _curl(address, f"/gradio_api/call/{name}", {"data": list(arguments.values())})
    follow = ("# the answer names an event_id; read its result with\n"
              f"# curl -N {address.url}/gradio_api/call/{name}/EVENT_ID{_header(address)}")
    return python, f"{data}\n{follow}"


def _client(address: Address) -> str:
    if not address.key:
        return f"from gradio_client import Client\n\nclient = Client({address.url!r})\n"
    return ("import os\nfrom gradio_client import Client\n\n"
            f'client = Client({address.url!r}, headers={{"Authorization": "Bearer " + os.environ["GAINZ_API_KEY"]}})\n')


def _header(address: Address) -> str:
    return ' -H "Authorization: Bearer $GAINZ_API_KEY"' if address.key else ""


def _curl(address: Address, path: str, body: dict[str, Any]) -> str:
    text = json.dumps(body, ensure_ascii=False, indent=1)
    return f"curl {address.url}{path}{_header(address)} \\\n  -H 'Content-Type: application/json' \\\n  -d {shlex.quote(text)}"
