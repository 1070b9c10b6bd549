"""transformers: `generate` on bfloat16 weights, its own cache, times from a streamer."""

import torch
import transformers
from wire import Wire, now, spans


class Clock:
    """The first thing put is the prompt."""

    def __init__(self):
        self.times = []

    def put(self, ids):
        self.times.append(now())

    def end(self):
        pass


class Transformers:
    def __init__(self):
        self.models = {}

    def versions(self):
        return {"transformers": transformers.__version__, "torch": torch.__version__}

    def load(self, name, model, threads, streams=1, context=1024):
        start = now()
        torch.set_num_threads(threads)
        self.models[name] = transformers.AutoModelForCausalLM.from_pretrained(model, dtype=torch.bfloat16).eval()
        return {"seconds": now() - start}

    @torch.inference_mode()
    def run(self, name, prompt, tokens):
        ids, clock, start = torch.tensor([prompt]), Clock(), now()
        found = self.models[name].generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=tokens,
                                           min_new_tokens=tokens, do_sample=False, streamer=clock, eos_token_id=None)
        return spans(start, clock.times[1:], found[0, len(prompt):].tolist())

    def unload(self, name):
        self.models.pop(name)
        return {}


wire = Wire()
wire.serve(Transformers())
