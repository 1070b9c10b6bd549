"""How far a variant is from a reference: perplexity, KL divergence and agreement on a text."""

from __future__ import annotations

import argparse
import hashlib
from pathlib import Path
from typing import Any

import backends
from backends.base import Cancel, GainzError, InvalidRequest, ProgressFn
from gainz_ui.longwork import failed, watched
from gainz_ui.services.store import Store
from gainz_ui.settings import Settings
from gainz_ui.terminal import show_json, show_table

NAME, HELP, ORDER = "quality", "measure a variant against a reference: perplexity, KL divergence, agreement", 47
SETTINGS = ("models",)
BUNDLED = Path(backends.__file__).parent / "data" / "evaluation.txt.gz"
PROMPT, ROOM = 64, 512                  # tokens before the pace is measured; context that it and the questions take


def arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--ref", required=True, metavar="NAME", help="the reference: a model under models/, or a path")
    parser.add_argument("--model", required=True, metavar="NAME",
                        help="the variant to judge: a model under models/, or a path")
    parser.add_argument("--text", type=Path, metavar="FILE",
                        help="text to judge on, UTF-8, plain or .gz; not the calibration text (default: the bundled one)")
    parser.add_argument("--windows", type=int, metavar="INT", help="windows taken from the start of the text (default: all)")
    parser.add_argument("--window-tokens", type=int, default=512, metavar="INT", help="tokens in a window (default: 512)")
    parser.add_argument("--questions", action="store_true",
                        help="the bundled task of short questions as well: accuracy and flips, paired")
    parser.add_argument("--pace", action="store_true", help="also how fast each of them makes tokens, alone")
    parser.add_argument("--kernels", default="auto", metavar="NAME", help="kernels for both models (default: auto)")
    parser.add_argument("--dtype", default="auto", metavar="TYPE", help="compute type for both models (default: auto)")
    parser.add_argument("--json", action="store_true", help="JSON lines on stderr while it runs, the result on stdout")


def run(settings: Settings, given: argparse.Namespace) -> int:
    with watched(given.json) as (progress, cancel):
        try:
            found = measure(settings, given, progress, cancel)
        except GainzError as error:
            return failed(error, given.json)
    if given.json:
        show_json(found)
    else:
        show_table(("MEASURE", "VALUE"), ((key, f"{value:.6g}" if isinstance(value, float) else value) for key,
                                          value in found.items()))
    return 0


def measure(settings: Settings, given: argparse.Namespace, progress: ProgressFn, cancel: Cancel) -> dict[str, Any]:
    """The measures, with everything that they depend on beside them."""
    from backends.evaluate import DecoderScorer, check_vocab, compare, windows
    text = _text(given.text)
    if given.window_tokens < 2 or given.windows is not None and given.windows < 1:
        raise InvalidRequest("A window has at least 2 tokens, and there is at least one window.", field="windows")
    reference = _load(settings, given.ref, given, progress, cancel)
    try:
        model = _load(settings, given.model, given, progress, cancel)
        try:
            check_vocab(reference.decoder.vocab, model.decoder.vocab)
            texts = windows(reference.text.encode(text), given.window_tokens, given.windows)
            quality = compare(DecoderScorer(reference.decoder), DecoderScorer(model.decoder), texts, progress, cancel)
            more = _more(reference, model, texts[0], given, progress, cancel)
        finally:
            model.close()
    finally:
        reference.close()
    return {"reference": given.ref, "model": given.model, "text": given.text.name if given.text else "bundled",
            "text_sha256": hashlib.sha256(text.encode()).hexdigest(),
            "reference_kernels": reference.info.kernels, "reference_dtype": reference.info.dtype,
            "model_kernels": model.info.kernels, "model_dtype": model.info.dtype, **quality.to_dict(), **more}


def _more(reference: Any, model: Any, window: tuple[int, ...], given: argparse.Namespace, progress: ProgressFn,
          cancel: Cancel) -> dict[str, Any]:
    """What was asked for beside the text: the questions, the pace."""
    from backends import pace, questions
    found: dict[str, Any] = {}
    if given.questions:
        found["questions"] = questions.compare(reference.decoder, model.decoder, reference.text.encode, None, progress,
                                               cancel).to_dict()
    if given.pace:
        theirs, ours = pace.race((reference.decoder, model.decoder), window[:PROMPT], progress, cancel)
        found |= {"pace": ours.to_dict(), "reference_pace": theirs.to_dict()}
    return found


def _text(path: Path | None) -> str:
    from backends.compress.calibrate import read_text
    return read_text(path or BUNDLED)[0]


def _load(settings: Settings, name: str, given: argparse.Namespace, progress: ProgressFn, cancel: Cancel) -> Any:
    from backends.registry import load_model
    path = Path(name) if any(sign in name
                             for sign in "/\\") and Path(name).exists() else Store(settings.models).existing(name)
    return load_model(path, progress=progress, cancel=cancel, kernels=given.kernels, dtype=given.dtype, streams=1,
                      context=max(given.window_tokens, ROOM if given.questions or given.pace else 0), prefix_cache=False)
