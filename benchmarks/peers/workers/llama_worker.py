"""llama.cpp at its best: its C API without the Python package's sampling, greedy by numpy over the logits it gives.

Flash attention as the library chooses; the prompt in batches of 512; several streams as one batch a step, as its
`parallel` example does. Its own sampling would only add time.
"""

import ctypes

import llama_cpp as C
import numpy as np
from wire import Wire, now, spans


class Llama:
    def __init__(self):
        C.llama_backend_init()
        self.quiet = C.llama_log_callback(lambda *_: None)
        C.llama_log_set(self.quiet, None)
        self.models = {}

    def versions(self):
        return {"llama-cpp-python": C.__version__, "features": C.llama_print_system_info().decode().strip()}

    def load(self, name, model, threads, streams=1, context=1024):
        start = now()
        loaded = C.llama_model_load_from_file(model.encode(), C.llama_model_default_params())
        if not loaded:
            raise RuntimeError(f"llama.cpp cannot load {model}")
        options = C.llama_context_default_params()
        options.n_ctx, options.n_batch, options.n_ubatch, options.n_seq_max = context * streams, 2048, 512, streams
        options.n_threads = options.n_threads_batch = threads
        made = C.llama_init_from_model(loaded, options)
        if not made:
            raise RuntimeError("llama.cpp cannot make a context")
        vocab = C.llama_vocab_n_tokens(C.llama_model_get_vocab(loaded))
        self.models[name] = (loaded, made, C.llama_batch_init(2048, 0, 1), vocab)
        return {"seconds": now() - start}

    def decode(self, name, rows):
        """rows: (token, position, stream, wants logits) of one pass; greedy ids of those that want."""
        _, context, batch, vocab = self.models[name]
        batch.n_tokens = len(rows)
        for i, (token, position, stream, wants) in enumerate(rows):
            batch.token[i], batch.pos[i], batch.n_seq_id[i], batch.logits[i] = token, position, 1, wants
            batch.seq_id[i][0] = stream
        code = C.llama_decode(context, batch)
        if code:
            raise RuntimeError(f"llama_decode: {code}")
        return [int(np.ctypeslib.as_array(ctypes.cast(C.llama_get_logits_ith(context, i), ctypes.POINTER(ctypes.c_float)),
                                          (vocab,)).argmax()) for i, row in enumerate(rows) if row[3]]

    def clear(self, name):
        C.llama_memory_clear(C.llama_get_memory(self.models[name][1]), True)

    def prefill(self, name, prompt, stream):
        for at in range(0, len(prompt), 2048):
            part = prompt[at:at + 2048]
            found = self.decode(name, [(t, at + i, stream, at + i == len(prompt) - 1) for i, t in enumerate(part)])
        return found[0]

    def run(self, name, prompt, tokens):
        self.clear(name)
        start = now()
        ids = [self.prefill(name, prompt, 0)]
        times = [now()]
        while len(ids) < tokens:
            ids += self.decode(name, [(ids[-1], len(prompt) + len(ids) - 1, 0, True)])
            times.append(now())
        return spans(start, times, ids)

    def streams(self, name, prompts, tokens):
        self.clear(name)
        start = now()
        last = [self.prefill(name, prompt, i) for i, prompt in enumerate(prompts)]
        begun = now()
        for step in range(tokens - 1):
            last = self.decode(name, [(t, len(prompts[i]) + step, i, True) for i, t in enumerate(last)])
        end, rows = now(), len(prompts)
        return {"first": begun - start, "decode": end - begun, "tokens": rows * (tokens - 1), "all": rows * tokens,
                "seconds": end - start}

    def first(self, model, threads, prompt):
        start = now()
        self.load("first", model, threads)
        loaded = now()
        found = self.run("first", prompt, 1)
        took = now() - start
        self.unload("first")
        return {"seconds": took, "load": loaded - start, "ids": found["ids"]}

    def unload(self, name):
        model, context, batch, _ = self.models.pop(name)
        C.llama_batch_free(batch)
        C.llama_free(context)
        C.llama_model_free(model)
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
