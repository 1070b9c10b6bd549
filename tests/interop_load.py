"""Run by the interop environment's Python, not by pytest: ``interop_load.py FOLDER OUT.safetensors ID …``

Loads a folder that Gainz wrote with the package whose format it is in, and saves its logits [tokens, vocab] as float32.
"""

import json
import sys

import torch
from safetensors.torch import load_file, save_file


def gptq(folder, ids):
    from auto_gptq import AutoGPTQForCausalLM
    model = AutoGPTQForCausalLM.from_quantized(folder, device="cpu", torch_dtype=torch.float32, use_safetensors=True,
                                               use_triton=False,
                                               disable_exllama=True, disable_exllamav2=True, inject_fused_attention=False,
                                               inject_fused_mlp=False, use_qigen=False, use_marlin=False)
    return model.model(input_ids=ids).logits


def awq(folder, ids):
    """Its loader wants IPEX on a CPU, so a float model is made and its linear layers are replaced by the package's own."""
    from awq.modules.linear.gemm import WQLinear_GEMM
    from transformers import AutoConfig, AutoModelForCausalLM
    config = AutoConfig.from_pretrained(folder)
    settings = config.quantization_config
    del config.quantization_config
    model, tensors = AutoModelForCausalLM.from_config(config,
                                                      torch_dtype=torch.float32), load_file(f"{folder}/model.safetensors")
    for name in [key.removesuffix(".qweight") for key in tensors if key.endswith(".qweight")]:
        old = model.get_submodule(name)
        model.set_submodule(name, WQLinear_GEMM(settings["bits"], settings["group_size"], old.in_features, old.out_features,
                                                old.bias is not None, "cpu"))
    missing, unexpected = model.load_state_dict(tensors, strict=False)
    assert not unexpected and set(missing) <= {"lm_head.weight"}, (missing, unexpected)
    model.tie_weights()
    return model.eval()(input_ids=ids).logits


def main():
    folder, out, *ids = sys.argv[1:]
    method = json.load(open(f"{folder}/config.json"))["quantization_config"]["quant_method"]
    with torch.no_grad():
        logits = {"gptq": gptq, "awq": awq}[method](folder, torch.tensor([[int(one) for one in ids]]))
    save_file({"logits": logits[0].float().contiguous()}, out)


if __name__ == "__main__":
    main()
