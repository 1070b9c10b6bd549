"""A key's limits on one request: prompt and answer; and its label for the log. The guard has put the key's holder into the
request's scope; rate and concurrency it has judged itself.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from backends.base import InvalidRequest, Request
from gainz_ui.services.keys import PLACE, Holder, label
from gainz_ui.services.studio import Studio

VIA = "gainz.via"                       # where the scope holds what the request came through
REMEDY = "Ask for less, or use a key with a higher limit."


def holder(scope: Any) -> Holder | None:
    return scope.get(PLACE)


def bounded(scope: Any, requests: Sequence[Request]) -> tuple[Request, ...]:
    """The same requests within the key's limits, with its label and the way that they came: an answer without max_tokens gets what is
    allowed; one with more is refused."""
    found = holder(scope)
    requests = tuple(replace(request, key=label(scope), via=scope.get(VIA, ())) for request in requests)
    if found is None or not found.limits.any:
        return requests
    prompt, output = found.limits.prompt_tokens, found.limits.output_tokens
    choices = sum(request.sampling.n for request in requests)
    out = []
    for request in requests:
        if output:
            most = output // choices
            asked = request.sampling.max_tokens
            if most == 0 or asked is not None and asked > most:
                raise InvalidRequest(f"This key may ask for {output} tokens at once, and this asks for more.", field="max_tokens", choices=choices,
                                     max_tokens=asked, remedy=REMEDY)
            request = replace(request, sampling=replace(request.sampling, max_tokens=most if asked is None else asked))
        out.append(replace(request, prompt_limit=prompt or None))
    return tuple(out)


def check_texts(scope: Any, studio: Studio, prompts: Sequence[Any], model: str | None, field: str = "input") -> None:
    """The key's limit on what one request may send, for all its texts together. A prompt by itself is judged by the engine
    (`Request.prompt_limit`); several, and texts that are only read, here."""
    found, total = holder(scope), 0
    if found is None or not found.limits.prompt_tokens:
        return
    for prompt in prompts:
        total += _count(studio, prompt, model)
        check_tokens(scope, total, field)


def _count(studio: Studio, prompt: Any, model: str | None) -> int:
    """Its tokens; where they are counted elsewhere, its bytes, of which a token has at least one."""
    if isinstance(prompt, tuple) and all(isinstance(one, int) for one in prompt):
        return len(prompt)
    if isinstance(prompt, str) and studio.model(model).info.path == "remote":
        return len(prompt.encode("utf-8", "surrogatepass"))
    return len(studio.tokenize(prompt, model))


def check_tokens(scope: Any, count: int, field: str) -> None:
    """As `check_texts`, of tokens that are counted already."""
    found = holder(scope)
    if found is not None and found.limits.prompt_tokens and count > found.limits.prompt_tokens:
        raise InvalidRequest(f"This key may send {found.limits.prompt_tokens} tokens at once, and this has {count} or more.", field=field,
                             remedy=REMEDY)
