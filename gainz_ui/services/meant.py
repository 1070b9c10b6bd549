"""A field that is not known, and the one of ours that was probably meant by it. The one home of other programs' names for our fields."""

from __future__ import annotations

import difflib
import re
from collections.abc import Collection

LIKE, LONGEST, BEGUN = 0.82, 64, 3      # share of signs in common; signs of a name that is looked at; signs that begin one
ELSEWHERE = {                           # ours: what it is called in llama.cpp, Ollama, vLLM, transformers, text-generation-webui, OpenAI
    "max_tokens": ("max_new_tokens", "n_predict", "num_predict", "max_length", "max_output_tokens", "max_tokens_to_sample",
                   "max_completion_tokens", "n_tokens"),
    "min_tokens": ("min_new_tokens", "min_length"),
    "repetition_penalty": ("repeat_penalty", "rep_pen", "penalty_repeat"),
    "frequency_penalty": ("penalty_freq",),
    "presence_penalty": ("penalty_present",),
    "top_k": ("topk",),
    "top_p": ("topp", "nucleus"),
    "min_p": ("minp",),
    "stop": ("stop_sequences", "stop_sequence", "stop_strings", "stopping_strings", "stop_words", "until"),
    "stop_ids": ("stop_token_ids", "eos_token_id", "stop_tokens"),
    "ignore_eos": ("ban_eos_token", "ignore_eos_token"),
    "logprobs": ("n_probs", "num_logprobs", "return_logprobs"),
    "n": ("num_return_sequences", "n_completions", "best_of"),
    "seed": ("random_seed", "manual_seed", "rng_seed"),
    "time_limit": ("timeout", "max_time", "t_max_predict_ms"),
    "draft": ("draft_model", "speculative_model", "assistant_model", "num_speculative_tokens", "prompt_lookup_num_tokens"),
    "length": ("num_tokens", "num_draft_tokens", "draft_max", "n_max", "max"),
    "prompt": ("inputs", "input", "text", "content", "query"),
    "messages": ("history", "conversation"),
    "model": ("model_name", "model_id", "engine"),
    "response_format": ("json_schema", "guided_json", "grammar", "format"),
    "tools": ("functions",),
    "tool_choice": ("function_call",),
    "chat_template_kwargs": ("template_kwargs",),
    "tokens": ("ids", "token_ids"),
    "add_special": ("add_special_tokens",),
    "input": ("prompt", "text", "texts", "content"),
}
OURS = {theirs: [ours for ours, names in ELSEWHERE.items() if theirs in names] for names in ELSEWHERE.values() for theirs in names}


def meant(name: str, known: Collection[str]) -> str | None:
    """The one of ``known`` that is spelled almost like ``name``, that another program calls so, or that alone begins so."""
    plain = re.sub(r"(?<=[a-z0-9])(?=[A-Z])", "_", name[:LONGEST]).lower().replace("-", "_").replace(" ", "_")
    candidates = [plain, *OURS.get(plain, ()), *difflib.get_close_matches(plain, sorted(known), 1, LIKE)]
    begun = [one for one in known if len(plain) >= BEGUN and one.startswith(plain)]
    return next((one for one in candidates if one in known), begun[0] if len(begun) == 1 else None)
