"""A key's limits on one request: prompt and answer. The guard has put the key's holder into the request's scope; rate and
concurrency it has judged itself.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from backends.base import InvalidRequest, Request
from gainz_ui.services.keys import Holder
from gainz_ui.services.studio import Studio

PLACE = "gainz.key"                     # of the holder in the scope
REMEDY = "Ask for less, or use a key with a higher limit."


def holder(scope: Any) -> Holder | None:
    return scope.get(PLACE)


def bounded(scope: Any, requests: Sequence[Request]) -> tuple[Request, ...]:
    """The same requests within the key's limits: an answer without max_tokens gets what is allowed; one with more is refused."""
    found = holder(scope)
    if found is None or not found.limits.any:
        return tuple(requests)
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


def check_texts(scope: Any, studio: Studio, prompts: Sequence[str | tuple[int, ...]], model: str | None) -> None:
    """The key's limit on prompts, for texts that are embedded."""
    found = holder(scope)
    if found is None or not found.limits.prompt_tokens:
        return
    for prompt in prompts:
        size = len(studio.tokenize(prompt, model) if isinstance(prompt, str) else prompt)
        if size > found.limits.prompt_tokens:
            raise InvalidRequest(f"This key may send {found.limits.prompt_tokens} tokens, and a text has {size}.", field="input", remedy=REMEDY)
