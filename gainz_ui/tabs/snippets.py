"""Ready code for what the page just did: the Gradio client for Python, curl for everything else. Pure."""

from __future__ import annotations

import json
import re
import shlex
from dataclasses import fields
from typing import Any

from backends.base import Request, Sampling

ADDRESS = "http://127.0.0.1:7860"


def address_of(request: Any) -> str:
    """Where this page was fetched from. ``request``: a gr.Request."""
    headers = getattr(request, "headers", None) or {}
    host = headers.get("host")
    scheme = headers.get("x-forwarded-proto", "http")
    return f"{scheme}://{host}" if host else ADDRESS


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


def chat_snippets(request: Request, model: str | None, address: str = ADDRESS) -> tuple[str, str]:
    """(Python, curl) of one chat request whose last message is the question."""
    options = changed(request.sampling)
    *earlier, last = request.prompt
    system = next((m.content for m in earlier if m.role == "system"), None)
    history = [{"role": m.role, "content": m.content} for m in earlier if m.role != "system"]
    given = {"history": history, "system": system, "model": model, **options}
    arguments = "".join(f"    {name}={value!r},\n" for name, value in given.items() if value)
    python = (
        f"from gradio_client import Client\n\nclient = Client({address!r})\njob = client.submit(\n    {last.content!r},\n"
        f'{arguments}    api_name="/chat",\n)\nfor answer in job:                    # the answer as it grows\n'
        '    print(answer["text"])\n'
    )
    messages = [{"role": m.role, "content": m.content} for m in request.prompt]
    return python, _curl(f"{address}/generate", {"model": model, "messages": messages, **options})


def call_snippets(name: str, arguments: dict[str, Any], address: str = ADDRESS) -> tuple[str, str]:
    """(Python, curl) of one call by its public name."""
    listed = ", ".join(f"{key}={value!r}" for key, value in arguments.items())
    python = (f"from gradio_client import Client\n\nclient = Client({address!r})\n"
              f"print(client.predict({listed + ', ' if listed else ''}api_name=\"/{name}\"))\n")
    data = _curl(f"{address}/gradio_api/call/{name}", {"data": list(arguments.values())})
    follow = f"# the answer names an event_id; read its result with\n# curl -N {address}/gradio_api/call/{name}/EVENT_ID"
    return python, f"{data}\n{follow}"


def _curl(url: str, body: dict[str, Any]) -> str:
    text = json.dumps(body, ensure_ascii=False, indent=1)
    return f"curl {url} \\\n  -H 'Content-Type: application/json' \\\n  -d {shlex.quote(text)}"
