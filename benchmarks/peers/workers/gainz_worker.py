"""Gainz as it serves: a backend's own load, the engine's loop with its scheduler, sampler and detokenizer, in this process."""

import sys
import threading
from pathlib import Path

from wire import Wire, first_token, now, spans

sys.path.insert(0, str(Path(__file__).parents[3]))


class Gainz:
    def __init__(self):
        from backends import registry
        from backends.engine.loop import Engine
        self.registry, self.engine, self.models = registry, Engine(), {}
        threading.Thread(target=self.engine.run, args=(threading.Event(),), daemon=True).start()

    def versions(self):
        import torch
        return {"torch": torch.__version__}

    def load(self, name, model, threads, streams=1, context=1024, kv_type="auto"):
        start = now()
        loaded = self.registry.load_model(model, threads=threads, streams=streams, context=context, kv_type=kv_type)
        self.engine.attach(loaded)
        self.models[name] = loaded
        info = loaded.info
        return {"seconds": now() - start, "kernels": info.kernels, "kv_type": loaded.decoder.kv.kv_type,
                "weights_bytes": loaded.decoder.arch.weights_bytes()}

    def run(self, name, prompt, tokens):
        """One stream. The prefix cache may not answer for a prompt that is to be timed: prompts are fresh each round."""
        stream, ids, times, start = self._generate(name, prompt, tokens), [], [], now()
        for event in stream:
            if event.error:
                raise event.error
            ids += event.ids
            times += [now()] * len(event.ids)
        return spans(start, times, ids)

    def _generate(self, name, prompt, tokens):
        from backends.base import Cancel, Request, Sampling
        return self.models[name].generate(Request(tuple(prompt), Sampling(max_tokens=tokens, ignore_eos=True)), Cancel())

    def streams(self, name, prompts, tokens):
        """All at once; the clock runs from the moment when every stream has its first token to the last of all."""
        from backends.base import Cancel, Request, Sampling
        arrived = [[] for _ in prompts]
        done, left = threading.Event(), [len(prompts)]
        lock = threading.Lock()

        def sink(index, event):
            arrived[index] += [now()] * len(event.ids)
            if event.last:
                with lock:
                    left[0] -= 1
                    if not left[0]:
                        done.set()

        start = now()
        for index, prompt in enumerate(prompts):
            request = Request(tuple(prompt), Sampling(max_tokens=tokens, ignore_eos=True))
            self.engine.submit(self.models[name], request, Cancel(), lambda event, index=index: sink(index, event))
        done.wait()
        begun = max(times[0] for times in arrived)
        counted = sum(time > begun for times in arrived for time in times)
        return {"first": begun - start, "decode": max(times[-1] for times in arrived) - begun, "tokens": counted,
                "all": sum(map(len, arrived)), "seconds": max(times[-1] for times in arrived) - start}

    def first(self, model, threads, prompt):
        return first_token(self, prompt, model, threads)

    def unload(self, name):
        model = self.models.pop(name)
        self.engine.detach(model)
        model.close()
        return {}


wire = Wire()
wire.serve(Gainz())
