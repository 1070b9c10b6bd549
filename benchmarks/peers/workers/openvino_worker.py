"""OpenVINO GenAI reading the GGUF itself: the same 4-bit codes."""

import numpy as np
import openvino as ov
import openvino_genai as genai
from wire import Wire, now, spans


class OpenVino:
    def __init__(self):
        self.models = {}

    def versions(self):
        return {"openvino": ov.__version__, "openvino-genai": genai.__version__}

    def load(self, name, model, threads, streams=1, context=1024):
        start = now()
        self.models[name] = genai.LLMPipeline(model, "CPU", {"INFERENCE_NUM_THREADS": threads, "PERFORMANCE_HINT": "LATENCY"})
        return {"seconds": now() - start}

    def run(self, name, prompt, tokens):
        ids = ov.Tensor(np.array([prompt], np.int64))
        given = genai.TokenizedInputs(ids, ov.Tensor(np.ones((1, len(prompt)), np.int64)))
        config = genai.GenerationConfig(max_new_tokens=tokens, ignore_eos=True, do_sample=False)
        times, start = [], now()

        class Clock(genai.StreamerBase):
            def write(self, token):
                times.extend([now()] * (len(token) if isinstance(token, list) else 1))
                return genai.StreamingStatus.RUNNING

            def end(self):
                pass

        found = self.models[name].generate(given, config, Clock())
        return spans(start, times, found.tokens[0])

    def unload(self, name):
        self.models.pop(name)
        return {}


wire = Wire()
wire.serve(OpenVino())
