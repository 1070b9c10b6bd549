"""The public names of Gradio's client that are about variants: /compare and /quantize; `api_names` registers them.

Knows the services and how a generator speaks to a client; the same rules and errors as on the page.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import gradio as gr

from backends.base import DraftSpec, Message, Request, Sampling, make_options
from backends.recipe import QuantizeOptions
from gainz_ui import api_values
from gainz_ui.api_work import BEAT_SECONDS, working
from gainz_ui.page import asker
from gainz_ui.services import compare as side_by_side
from gainz_ui.services.jobs import Jobs
from gainz_ui.services.variants import Variants


def functions(studio: Any, jobs: Jobs, spoken: Callable[[Callable[[], Any]], Any]) -> tuple[Callable, ...]:
    """compare and quantize. ``spoken``: turns a typed error into one that the client hears."""
    def compare(prompt: str, models: list[str], max_tokens: int | None = 256, temperature: float = 0.0,
                seed: int | None = None,
                system: str | None = None, in_turn: bool = False, plain: bool = False, options: dict | None = None,
                draft: str | None = None, draft_length: int | None = None, who: gr.Request | None = None) -> dict:
        """The same prompt and seed to 2 to 4 models. Yields all answers as they grow, with their figures and the token at
        which each parts from the first. `in_turn`: one after another, so that their speeds are those of each alone.
        `plain`: the prompt as it is, without a chat template. `options`: further sampling fields, as for /generate. `draft`:
        "lookup", a loaded model, or "lookup+NAME", for each model that it fits."""
        def asked() -> Request:
            head = (Message("system", system),) if system else ()
            turns = api_values.text("prompt", prompt) if plain else (*head, Message("user", prompt))
            spec = DraftSpec.asked(api_values.optional_text("draft", draft), api_values.whole(draft_length))
            return Request(turns, _sampling({"max_tokens": max_tokens, "temperature": temperature, "seed": seed}, options), spec, key=asker(who))

        request = spoken(asked)
        plan = spoken(lambda: side_by_side.plan(studio, models, in_turn, side_by_side.room(request)))
        yield from _growing(spoken(lambda: side_by_side.Comparison(studio, plan, request)))

    def quantize(model: str, method: str = "gptq", bits: int = 4, group: int = 64, name: str | None = None,
                 text: str | None = None,
                 options: dict | None = None) -> dict:
        """Make a GPTQ or AWQ variant of a model in models/. Yields {"stage", "done", "total"} while it works, at last the
        variant's manifest. `text`: a calibration text on the server's machine; `options`: further fields of the Models
        tab's form."""
        variants = Variants(studio, jobs)
        given = {"method": method, "bits": api_values.whole(bits), "group": api_values.whole(group)}
        made = spoken(lambda: make_options(QuantizeOptions, {**given, **api_values.mapping("options", options)}))
        plan = spoken(lambda: variants.plan(model, made, name or None, Path(api_values.text("text", text)) if text else None))
        yield from working("quantize", plan.name, lambda report, cancel: variants.make(plan, report, cancel), spoken, "file")

    return compare, quantize


def _sampling(given: dict[str, Any], options: Any) -> Sampling:
    """JSON's numbers, lists and objects as `Sampling` holds them."""
    plain = {name: tuple(value) if isinstance(value, list) else api_values.whole(value)
              for name, value in {**given, **api_values.mapping("options", options)}.items()}
    if isinstance(plain.get("logit_bias"), dict):
        plain["logit_bias"] = api_values.biases(plain["logit_bias"])
    return make_options(Sampling, plain)


def _growing(comparison: side_by_side.Comparison) -> Iterator[dict]:
    try:
        while comparison.running:       # at once the first time: only a call that has answered can be cancelled
            yield side_by_side.to_dict(comparison, comparison.shots())
            comparison.wait(BEAT_SECONDS)
        yield side_by_side.to_dict(comparison, comparison.shots())
    finally:
        comparison.stop()
