"""A request against one model's vocabulary and context: its prompt as ids, or the typed error that says what does not fit.

What can be judged without the model was judged when the `Request` was made. Runs in the caller's thread, before queueing.
"""

from __future__ import annotations

from collections.abc import Sequence

from backends.base import ContextTooLong, InvalidRequest, Message, Request, Sampling, Vocab
from backends.engine.text import TextCodec


def prompt_ids(request: Request, text: TextCodec, vocab: Vocab) -> list[int]:
    """At least one id. An empty prompt is one BOS where the tokenizer has one."""
    prompt = request.prompt
    if isinstance(prompt, str):
        ids = text.encode(prompt)
    elif prompt and all(isinstance(turn, Message) for turn in prompt):
        ids = text.chat(prompt, continue_last=request.continue_last, **dict(request.template))
    else:
        ids = list(prompt)
        check_ids("prompt", ids, vocab)
    if request.prompt_limit is not None and len(ids) > request.prompt_limit:
        raise InvalidRequest(f"The prompt has {len(ids)} tokens; {request.prompt_limit} are allowed.", field="prompt",
                             prompt_tokens=len(ids), remedy="Shorten the prompt, or use a key with a higher limit.")
    if not ids:
        if text.bos_id is None:
            raise InvalidRequest("The prompt is empty, and this model has no token to begin a text with.", field="prompt")
        return [text.bos_id]
    return ids


def check_ids(field: str, ids: Sequence[int], vocab: Vocab) -> None:
    for token in ids:
        if isinstance(token, bool) or not isinstance(token, int) or not 0 <= token < vocab.size:
            raise InvalidRequest(f"{field} holds {token!r}; this model's token ids are 0 to {vocab.size - 1}.", field=field)


def check(sampling: Sampling, prompt: Sequence[int], vocab: Vocab, context: int) -> int:
    """The most tokens that prompt and answer may have together. Raises InvalidRequest, ContextTooLong."""
    check_ids("logit_bias", [token for token, _ in sampling.logit_bias], vocab)
    check_ids("stop_ids", sampling.stop_ids, vocab)
    wanted = sampling.max_tokens if sampling.max_tokens is not None else max(1, sampling.min_tokens)
    if len(prompt) + wanted > context:
        raise ContextTooLong(f"A prompt of {len(prompt)} tokens and an answer of {wanted} do not fit into {context}.", field="max_tokens" if len(prompt) < context else "prompt",
                             prompt_tokens=len(prompt), max_tokens=sampling.max_tokens, context=context)
    return context if sampling.max_tokens is None else len(prompt) + wanted


def check_length(prompt: Sequence[int], context: int) -> None:
    if len(prompt) > context:
        raise ContextTooLong(f"A text of {len(prompt)} tokens does not fit into {context}.", field="input",
                             prompt_tokens=len(prompt), context=context)


def continues(request: Request) -> bool:
    """Whether the answer goes on from a text that stands before it, so that its leading space is part of it."""
    return request.continue_last or isinstance(request.prompt, str) and bool(request.prompt)
