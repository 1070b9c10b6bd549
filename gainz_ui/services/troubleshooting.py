"""docs/troubleshooting.md, made from the typed errors: symptom, cause, check, remedy. A test holds the file to it."""

from __future__ import annotations

from backends.errors import GainzError

HEAD = """# Troubleshooting

Made from the program's own errors by `python app.py doctor --troubleshooting`. Every message of Gainz carries one of these
codes, or over HTTP one of [those of the wire](#over-http-only): in the JSON of an HTTP answer as `error.code`, in `logs/` as
`error`. Start with `python app.py doctor`: it says what
this machine has, what it lacks and what to do.

| code | what it is |
|---|---|
"""

WIRE_HEAD = """
## Over HTTP only

What is refused before a request reaches the engine. `invalid_request` (above) comes with the name of the field.

| code | status | what it is | remedy |
|---|---|---|---|
"""
WIRE = (
    ("invalid_json", 400, "The body is no JSON: a missing quote, nested too deeply, or not UTF-8", "Check quotes, commas and brackets; on a "
     "command line quote the whole body"),
    ("key_required", 401, "The server was started with a key, and the request has none or a wrong one",
     "Send `Authorization: Bearer KEY`; in a browser any name and the key as password"),
    ("key_refused", 403, "The key has limits, and opens the API only, not the page", "Use a key without limits for the page"),
    ("key_limit", 429, "The key has begun as many requests in this minute, or has as many at once, as it may",
     "Wait as long as `Retry-After` says, or use another key"),
    ("host_refused", 403, "The Host header is a name that this server does not answer to",
     "Use the address that the server printed, or add the name to the setting `allowed_hosts`"),
    ("origin_refused", 403, "A page of another web site sent the request", "Add the site to the setting `allowed_origins` if it may call"),
    ("outside_refused", 403, "The request asks the server to fetch an address elsewhere", "It never does: fetch it yourself"),
    ("not_found", 404, "There is nothing at this address", "docs/api.md lists the addresses"),
    ("method_not_allowed", 405, "The address takes another method", "See the Allow header of the answer; `/generate` takes POST"),
    ("body_too_large", 413, "The body is larger than the server reads", "Send less at once"),
    ("internal_error", 500, "A fault of the server itself", "`logs/` and the terminal have the traceback: please report it"),
    ("http_error", "any other", "What the web server itself refuses", "See the answer's status and headers"),
)


def text() -> str:
    kinds = [kind for _, kind in sorted(GainzError.registry.items()) if kind.symptom]
    rows = [f"| [`{kind.code}`](#{kind.code}) | {kind.title} |" for kind in kinds]
    wire = [f"| `{code}` | {status} | {what} | {remedy} |" for code, status, what, remedy in WIRE]
    return HEAD + "\n".join(rows) + "\n\n" + "\n".join(_section(kind) for kind in kinds) + WIRE_HEAD + "\n".join(wire) + "\n"


def _section(kind: type[GainzError]) -> str:
    lines = [f"## {kind.code}", "", f"- **Cause:** {kind.title}.", f"- **Symptom:** {kind.symptom}"]
    lines += [f"- **Check:** {kind.check}"] if kind.check else []
    return "\n".join([*lines, f"- **Remedy:** {kind.advice}", ""])
