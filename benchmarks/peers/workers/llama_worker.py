"""llama.cpp at its best: its C API without the Python package's sampling, greedy by numpy over the logits it gives.

Flash attention on or off, whichever was the faster when it was tried at load, for prompts and for decoding apart; prompts in
batches of 512; several streams as one batch a step, as its `parallel` example does. Its own sampling would only add time.
"""

import ctypes
from dataclasses import dataclass

import llama_cpp as C
import numpy as np
from wire import Wire, first_token, now, spans


@dataclass
class Model:
    """``contexts`` by kind of attention; ``prompt``, ``stream``: the kinds that prompts alone and decoding use."""

    loaded: object
    contexts: dict
    batch: object
    vocab: int
    prompt: int
    stream: int


class Llama:
    def __init__(self):
        C.llama_backend_init()
        self.quiet = C.llama_log_callback(lambda *_: None)
        C.llama_log_set(self.quiet, None)
        self.models = {}

    def versions(self):
        return {"llama-cpp-python": C.__version__, "features": C.llama_print_system_info().decode().strip()}

    def load(self, name, model, threads, streams=1, context=1024, flash=(0, 1)):
        """``flash``: kinds of attention to try: -1 as the library chooses, 0 plain, 1 flash."""
        start = now()
        loaded = C.llama_model_load_from_file(model.encode(), C.llama_model_default_params())
        if not loaded:
            raise RuntimeError(f"llama.cpp cannot load {model}")
        made = {kind: self.context(loaded, threads, streams, context, kind) for kind in flash}
        vocab = C.llama_vocab_n_tokens(C.llama_model_get_vocab(loaded))
        self.models[name] = Model(loaded, made, C.llama_batch_init(2048, 0, 1), vocab, flash[0], flash[0])
        took = now() - start
        return {"seconds": took, "flash": self.tune(name, min(192, context - 32)) if len(flash) > 1 else flash[0]}

    def context(self, loaded, threads, streams, context, flash):
        options = C.llama_context_default_params()
        options.n_ctx, options.n_batch, options.n_ubatch, options.n_seq_max = context * streams, 2048, 512, streams
        options.n_threads = options.n_threads_batch = threads
        options.flash_attn_type = flash
        made = C.llama_init_from_model(loaded, options)
        if not made:
            raise RuntimeError("llama.cpp cannot make a context")
        return made

    def tune(self, name, tokens):
        """The faster kind for prompts and for decoding: the best of three tries each, in turn."""
        model, first, decode = self.models[name], {}, {}
        for _ in range(3):
            for kind in model.contexts:
                model.prompt = model.stream = kind
                found = self.run(name, list(range(1000, 1000 + tokens)), 24)
                first[kind] = min(first.get(kind, 1e9), found["first"])
                decode[kind] = min(decode.get(kind, 1e9), found["decode"])
        model.prompt, model.stream = min(first, key=first.get), min(decode, key=decode.get)
        return {"prompt": model.prompt, "decode": model.stream}

    def decode(self, name, rows, kind):
        """rows: (token, position, stream, wants logits) of one pass; greedy ids of those that want."""
        model = self.models[name]
        context, batch, vocab = model.contexts[kind], model.batch, model.vocab
        batch.n_tokens = len(rows)
        for i, (token, position, stream, wants) in enumerate(rows):
            batch.token[i], batch.pos[i], batch.n_seq_id[i], batch.logits[i] = token, position, 1, wants
            batch.seq_id[i][0] = stream
        code = C.llama_decode(context, batch)
        if code:
            raise RuntimeError(f"llama_decode: {code}")
        return [int(np.ctypeslib.as_array(ctypes.cast(C.llama_get_logits_ith(context, i), ctypes.POINTER(ctypes.c_float)),
                                          (vocab,)).argmax()) for i, row in enumerate(rows) if row[3]]

    def clear(self, name, kind):
        C.llama_memory_clear(C.llama_get_memory(self.models[name].contexts[kind]), True)

    def prefill(self, name, prompt, stream, kind):
        for at in range(0, len(prompt), 2048):
            part = prompt[at:at + 2048]
            found = self.decode(name, [(t, at + i, stream, at + i == len(prompt) - 1) for i, t in enumerate(part)], kind)
        return found[0]

    def run(self, name, prompt, tokens):
        kind = self.models[name].prompt if tokens == 1 else self.models[name].stream
        self.clear(name, kind)
        start = now()
        ids = [self.prefill(name, prompt, 0, kind)]
        times = [now()]
        while len(ids) < tokens:
            ids += self.decode(name, [(ids[-1], len(prompt) + len(ids) - 1, 0, True)], kind)
            times.append(now())
        return spans(start, times, ids)

    def streams(self, name, prompts, tokens):
        kind = self.models[name].stream
        self.clear(name, kind)
        start = now()
        last = [self.prefill(name, prompt, i, kind) for i, prompt in enumerate(prompts)]
        begun = now()
        for step in range(tokens - 1):
            last = self.decode(name, [(t, len(prompts[i]) + step, i, True) for i, t in enumerate(last)], kind)
        end, rows = now(), len(prompts)
        return {"first": begun - start, "decode": end - begun, "tokens": rows * (tokens - 1), "all": rows * tokens,
                "seconds": end - start}

    def first(self, model, threads, prompt):
        return first_token(self, prompt, model, threads, flash=(-1,))

    def unload(self, name):
        model = self.models.pop(name)
        C.llama_batch_free(model.batch)
        for context in model.contexts.values():
            C.llama_free(context)
        C.llama_model_free(model.loaded)
        return {}

    def requantize(self, source, target, type, threads, pure):
        """``type`` as llama.cpp numbers file types (2: all Q4_0). ``pure``: embeddings and head in it too, else as it sees fit."""
        options = C.llama_model_quantize_default_params()
        options.ftype, options.nthread, options.allow_requantize, options.pure = type, threads, True, pure
        code = C.llama_model_quantize(source.encode(), target.encode(), ctypes.byref(options))
        if code:
            raise RuntimeError(f"llama_model_quantize: {code}")
        return {}


wire = Wire()
wire.serve(Llama())
