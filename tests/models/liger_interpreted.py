"""Compares Liger's kernels with transformers' modules in Triton's interpreter; run as a program of its own.

The interpreter is chosen by the environment when kernels are defined, so it cannot be turned on inside a test session.
"""

import importlib
from typing import Any

import numpy as np
import torch
from transformers import AutoConfig, AutoModelForCausalLM
from triton import language as tl

from lightning_rl_engines.models import liger

KERNELS = importlib.import_module("liger_kernel.transformers")
SIZES = {
    "vocab_size": 16,
    "hidden_size": 32,
    "intermediate_size": 40,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "pad_token_id": None,
}


# Each reads `tl` when it is called: the interpreter replaces what is in there while a kernel runs.
def rsqrt(x: Any) -> Any:
    return tl.rsqrt(x)


def tanh(x: Any) -> Any:
    return 2 * tl.sigmoid(2 * x) - 1


def complete_the_interpreter() -> None:
    """Functions of the device's library return nothing there, and floats are not made scalars of the device."""
    importlib.import_module("liger_kernel.ops.rms_norm").rsqrt = rsqrt
    importlib.import_module("liger_kernel.ops.geglu").tanh = tanh
    interpreter: Any = importlib.import_module("triton.runtime.interpreter")
    convert = interpreter._implicit_cvt

    def convert_floats(argument: Any) -> Any:
        if not isinstance(argument, float):
            return convert(argument)
        return tl.tensor(interpreter.TensorHandle(np.array([argument], dtype=np.float32), tl.float32), tl.float32)

    interpreter._implicit_cvt = convert_floats


def gradients(model: torch.nn.Module) -> dict[str, torch.Tensor]:
    model.zero_grad()
    ids = torch.arange(9)[None] % 16
    model(input_ids=ids, use_cache=False).logits.log_softmax(-1)[0, :, 3].sum().backward()
    return {name: item.grad.clone() for name, item in model.named_parameters() if item.grad is not None}


def compare(model_type: str, dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    config = AutoConfig.for_model(model_type, **SIZES)
    model = AutoModelForCausalLM.from_config(config, dtype=dtype, attn_implementation="eager")
    with torch.no_grad():
        for item in model.parameters():
            item.add_(torch.randn_like(item), alpha=0.3)
    expected = gradients(model)
    liger.use_liger_kernels(model, torch.device("cuda"))
    replaced = [module for module in model.modules() if type(module).__module__.startswith("liger_kernel")]
    norms = [module for module in replaced if isinstance(module, KERNELS.LigerRMSNorm)]
    assert len(norms) >= 3
    assert len(replaced) == len(norms) + 1
    found = gradients(model)
    assert found.keys() == expected.keys()
    # In half precision (fp16: the interpreter has no bf16) a kernel rounds at other places than the formula.
    limit = 1e-5 if dtype == torch.float32 else 1e-2
    for name, value in expected.items():
        error = float((found[name].double() - value.double()).norm() / value.double().norm())
        assert error < limit, f"{model_type} {dtype} {name}: {error:.1e}"
    print(model_type, dtype, "equal")


if __name__ == "__main__":
    complete_the_interpreter()
    liger.load_kernels = lambda device: KERNELS
    for name in liger._FAMILIES:
        compare(name, torch.float32)
    compare("llama", torch.float16)
    compare("gemma", torch.float16)
