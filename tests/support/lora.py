"""Stock peft on plain models: what adapters are compared with."""

import warnings
from pathlib import Path
from typing import Any

import torch
from peft import LoraConfig, PeftModel, get_peft_model
from torch import Tensor
from transformers import AutoModelForCausalLM, PreTrainedModel


def lora(**options: Any) -> LoraConfig:
    """A small adapter on every linear layer, unless said otherwise."""
    return LoraConfig(**{"r": 4, "lora_alpha": 8, "target_modules": "all-linear", **options})


def saved_name(name: str) -> str:
    """Name in a PEFT folder of a parameter of a ``PeftModel``."""
    return name.replace(".modules_to_save.default", "").replace(".default", "")


def adapter_state(model: PeftModel) -> dict[str, Tensor]:
    """Trained tensors under the names of a PEFT folder."""
    return {saved_name(name): item.detach().clone() for name, item in model.named_parameters() if item.requires_grad}


def plain_adapter(base: PreTrainedModel, options: LoraConfig, start: dict[str, Tensor]) -> PeftModel:
    """Put an adapter with these tensors on a plain model, by peft's own means."""
    with warnings.catch_warnings():
        # peft asks transformers 5.24 for a property that it renamed.
        warnings.filterwarnings("ignore", message=".is_gradient_checkpointing. is deprecated", category=FutureWarning)
        model = get_peft_model(base, options)
    named = {saved_name(name): item for name, item in model.named_parameters() if item.requires_grad}
    assert named.keys() == start.keys()
    with torch.no_grad():
        for name, tensor in start.items():
            named[name].copy_(tensor)
    return model


def load_adapter_folder(base: Path | str, folder: Path | str, model_class: Any = AutoModelForCausalLM) -> PeftModel:
    """Load a PEFT folder onto a fresh base with stock peft."""
    model = model_class.from_pretrained(base, attn_implementation="eager", dtype=torch.float32)
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message=".is_gradient_checkpointing. is deprecated", category=FutureWarning)
        return PeftModel.from_pretrained(model, folder)


def noise(start: dict[str, Tensor], scale: float = 0.05, seed: int = 0) -> dict[str, Tensor]:
    """The tensors with noise, so that no B is zero."""
    generator = torch.Generator().manual_seed(seed)
    return {name: item + scale * torch.randn(item.shape, generator=generator) for name, item in start.items()}
