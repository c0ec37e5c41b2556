"""Liger's Triton kernels for RMS norms and gated MLPs, as modules of one model.

Liger's own ``apply_liger_kernel_to_*`` also replaces classes inside transformers when it is given an instance, so every
model built later, a rollout's or a reference's, would get them. Here its public modules take the place of a model's
own, around the same parameters under the same names. Rotary embeddings (replaced in transformers only) and the
cross-entropies (our head computes log-probabilities) are left alone.
"""

import importlib
import importlib.util
from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, Final

import torch
from torch import nn

if TYPE_CHECKING:
    from transformers import PreTrainedModel


@dataclass(frozen=True)
class _Family:
    """Classes of a model type that a kernel replaces exactly.

    Attributes:
        norm: Class of its RMS norms.
        mlp: Class of its gated MLPs.
        kernel: Liger's module for them.
        offset: What is added to a norm's weight.
        casting_mode: What a norm computes in fp32 of a half-precision input: its statistics, or everything.
    """

    norm: str
    mlp: str
    kernel: str = "LigerSwiGLUMLP"
    offset: float = 0.0
    casting_mode: str = "llama"


_FAMILIES: Final[Mapping[str, _Family]] = MappingProxyType(
    {
        "llama": _Family("LlamaRMSNorm", "LlamaMLP"),
        "mistral": _Family("MistralRMSNorm", "MistralMLP"),
        "qwen2": _Family("Qwen2RMSNorm", "Qwen2MLP"),
        "qwen3": _Family("Qwen3RMSNorm", "Qwen3MLP"),
        "smollm3": _Family("SmolLM3RMSNorm", "SmolLM3MLP"),
        "phi3": _Family("Phi3RMSNorm", "Phi3MLP", "LigerPhi3SwiGLUMLP"),
        "gemma": _Family("GemmaRMSNorm", "GemmaMLP", "LigerGEGLUMLP", 1.0, "gemma"),
        "gemma3_text": _Family("Gemma3RMSNorm", "Gemma3MLP", "LigerGEGLUMLP", 1.0, "gemma"),
    }
)

_ACTIVATIONS: Final = MappingProxyType(
    {
        "LigerSwiGLUMLP": ("silu", "swish"),
        "LigerPhi3SwiGLUMLP": ("silu", "swish"),
        "LigerGEGLUMLP": ("gelu_pytorch_tanh",),
    }
)


def load_kernels(device: torch.device) -> Any:
    """Return the module that holds Liger's public classes.

    Raises:
        ValueError: Triton does not run on this device, or a package is missing.
    """
    if device.type not in ("cuda", "xpu"):
        raise ValueError(
            f"ModelConfig(use_liger=True) needs a GPU: Liger's kernels are Triton's, which does not run on "
            f"{device.type!r}; use use_liger=False."
        )
    for package in ("triton", "liger_kernel"):
        if importlib.util.find_spec(package) is None:
            raise ValueError(
                f"ModelConfig(use_liger=True) needs the package {package.replace('_', '-')}; install it with: "
                'pip install "lightning-rl-engines[liger]"'
            )
    return importlib.import_module("liger_kernel.transformers")


def use_liger_kernels(model: "PreTrainedModel", device: torch.device) -> None:
    """Put Liger's modules in the place of the model's RMS norms and gated MLPs; no class or function is changed.

    To be called before adapters, attention groups, checkpointing and sharding, which find the modules that are there.

    Args:
        model: A plain model; its parameters stay the same objects under the same names.
        device: Where the model will compute; it may be elsewhere now.

    Raises:
        ValueError: The model's type or activation is not one that the kernels compute, or :func:`load_kernels` refuses.
    """
    kernels = load_kernels(device)
    config = model.config
    family = _FAMILIES.get(config.model_type)
    if family is None:
        raise ValueError(
            f"ModelConfig(use_liger=True) does not know model_type={config.model_type!r}; it serves "
            f"{sorted(_FAMILIES)}. Use use_liger=False."
        )
    activation = getattr(config, "hidden_activation", None) or config.hidden_act
    if activation not in _ACTIVATIONS[family.kernel]:
        raise ValueError(
            f"ModelConfig(use_liger=True) computes MLPs of {config.model_type!r} with "
            f"{_ACTIVATIONS[family.kernel][0]!r}, but the model has {activation!r}; use use_liger=False."
        )
    for parent in list(model.modules()):
        for name, child in list(parent.named_children()):
            if type(child).__name__ == family.norm:
                setattr(parent, name, _norm(child, family, kernels))
            elif type(child).__name__ == family.mlp:
                setattr(parent, name, _mlp(child, family, kernels, config))


def _norm(old: Any, family: _Family, kernels: Any) -> nn.Module:
    eps = old.variance_epsilon if hasattr(old, "variance_epsilon") else old.eps
    with torch.device("meta"):
        # In place, the backward pass would write into a gradient that a residual branch may share.
        new: nn.Module = kernels.LigerRMSNorm(
            old.weight.shape[0], eps=eps, offset=family.offset, casting_mode=family.casting_mode, in_place=False
        )
    new.weight = old.weight
    return new.train(old.training)


def _mlp(old: nn.Module, family: _Family, kernels: Any, config: Any) -> nn.Module:
    with torch.device("meta"):
        new: nn.Module = getattr(kernels, family.kernel)(config)
    for name, child in old.named_children():
        if name in dict(new.named_children()):
            setattr(new, name, child)
    return new.train(old.training)
