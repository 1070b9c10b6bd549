"""docs/troubleshooting.md, made from the typed errors: symptom, cause, check, remedy. A test holds the file to it."""

from __future__ import annotations

from backends.errors import GainzError

HEAD = """# Troubleshooting

Made from the program's own errors by `python app.py doctor --troubleshooting`. Every message of Gainz carries one of these
codes: in the JSON of an HTTP answer as `error.code`, in `logs/` as `error`. Start with `python app.py doctor`: it says what
this machine has, what it lacks and what to do.

| code | what it is |
|---|---|
"""


def text() -> str:
    kinds = [kind for _, kind in sorted(GainzError.registry.items()) if kind.symptom]
    rows = [f"| [`{kind.code}`](#{kind.code}) | {kind.title} |" for kind in kinds]
    return HEAD + "\n".join(rows) + "\n\n" + "\n".join(_section(kind) for kind in kinds)


def _section(kind: type[GainzError]) -> str:
    lines = [f"## {kind.code}", "", f"- **Cause:** {kind.title}.", f"- **Symptom:** {kind.symptom}"]
    lines += [f"- **Check:** {kind.check}"] if kind.check else []
    return "\n".join([*lines, f"- **Remedy:** {kind.advice}", ""])
