"""vLLM's CPU build on bfloat16 weights. A run's prompt is timed by a run of one token before it.

It takes minutes to load and gives its memory back only with its process: one engine for each model serves every workload.
"""

import importlib
import os

from wire import Wire, now


class Vllm:
    def __init__(self):
        os.environ.setdefault("VLLM_LOGGING_LEVEL", "WARNING")
        os.environ.setdefault("VLLM_CPU_KVCACHE_SPACE", "2")
        os.environ["VLLM_NO_USAGE_STATS"] = os.environ["DO_NOT_TRACK"] = "1"
        self.library = importlib.import_module("vllm")
        self.models, self.engines = {}, {}

    def versions(self):
        return {"vllm": self.library.__version__}

    def load(self, name, model, threads, streams=1, context=1024):
        start = now()
        if model not in self.engines:
            os.environ["VLLM_CPU_OMP_THREADS_BIND"] = f"0-{threads - 1}"
            self.engines[model] = self.library.LLM(model=model, dtype="bfloat16", max_model_len=max(context, 4096),
                                                   max_num_seqs=max(streams, 16), enable_prefix_caching=False,
                                                   disable_log_stats=True)
        self.models[name] = self.engines[model]
        return {"seconds": now() - start}

    def _take(self, name, prompts, tokens):
        options = self.library.SamplingParams(temperature=0.0, max_tokens=tokens, ignore_eos=True, detokenize=False)
        start = now()
        found = self.models[name].generate([{"prompt_token_ids": p} for p in prompts], options, use_tqdm=False)
        return now() - start, [list(one.outputs[0].token_ids) for one in found]

    def run(self, name, prompt, tokens):
        first, ids = self._take(name, [prompt], 1)
        if tokens == 1:
            return {"first": first, "decode": 0.0, "tokens": 1, "ids": ids[0]}
        whole, ids = self._take(name, [prompt], tokens)
        return {"first": first, "decode": whole - first, "tokens": tokens, "ids": ids[0]}

    def streams(self, name, prompts, tokens):
        first, _ = self._take(name, prompts, 1)
        whole, _ = self._take(name, prompts, tokens)
        rows = len(prompts)
        return {"first": first, "decode": whole - first, "tokens": rows * (tokens - 1), "all": rows * tokens,
                "seconds": whole}

    def unload(self, name):
        self.models.pop(name)
        return {}


if __name__ == "__main__":                  # its engine is a process of its own, which imports this file again
    Wire().serve(Vllm())
