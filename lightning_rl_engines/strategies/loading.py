"""Builds a plain model with its weights on rank 0 and on meta elsewhere; what fails on one rank fails on all."""

from collections.abc import Callable
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from peft import LoraConfig
from torch import Tensor
from torch.distributed import ProcessGroup

from lightning_rl_engines.models.agreement import raise_on_all_ranks
from lightning_rl_engines.models.compile import check_backend
from lightning_rl_engines.models.config import ModelConfig
from lightning_rl_engines.models.forward_check import is_checked, plain_outputs
from lightning_rl_engines.models.huggingface import load_hf_model
from lightning_rl_engines.models.liger import use_liger_kernels
from lightning_rl_engines.models.lora import Adapter, inject_adapter
from lightning_rl_engines.models.lora_config import lora_from_dict, read_adapter_config
from lightning_rl_engines.sequence.attention import bind_sequence_parallel

if TYPE_CHECKING:
    from transformers import PreTrainedModel


def load_on_rank_zero(
    config: ModelConfig,
    *,
    dtype: torch.dtype,
    kernel: str,
    device: torch.device,
    sequence_group: ProcessGroup | None,
    gather: Callable[[Any], list[Any]],
) -> "tuple[PreTrainedModel, Adapter | None, list[Tensor] | None]":
    """Load a model, adapter included: rank 0 alone reads files. Collective over the world.

    Args:
        config: What to build.
        dtype: Storage type of the weights; adapters are fp32.
        kernel: Name of the attention kernel to bind.
        device: Where the model will compute.
        sequence_group: Ranks that share a row.
        gather: Returns the host objects of all ranks, in rank order.

    Returns:
        The model, on the host of rank 0 and on meta elsewhere, its adapter, if it has one, and, if it is to be checked,
        what the plain model says of the probe.

    Raises:
        ValueError: On all ranks, with the first rank's reason.
    """
    reader = not dist.is_initialized() or dist.get_rank() == 0
    lora = _lora_options(config, reader, gather)
    hf, adapter, expected, error = None, None, None, None
    try:
        if config.compile:
            check_backend(config.compile_backend, device)
        # Every model has eager attention, and it leaves nothing out; none of it runs but for a check.
        hf = load_hf_model(
            config, dtype=dtype, device="cpu" if reader else "meta", attn_implementation="eager", empty=not reader
        )
        if reader and is_checked(config, hf.config.model_type):
            expected = plain_outputs(hf)
        if config.use_liger:
            use_liger_kernels(hf, device)
        adapter = None if lora is None else inject_adapter(hf, config, lora)
        bind_sequence_parallel(hf, sequence_group, kernel=kernel)
    except Exception as exception:  # of any type: the other ranks wait for the weights
        error = exception
    raise_on_all_ranks(config, error, gather)
    assert hf is not None
    # Buffers keep the type that reading gave them.
    types = gather({name: buffer.dtype for name, buffer in hf.named_buffers()} if reader else None)[0]
    for name, buffer in list(hf.named_buffers()):
        if buffer.dtype != types[name]:
            owner, _, key = name.rpartition(".")
            hf.get_submodule(owner)._buffers[key] = buffer.to(types[name])
    if adapter is not None:
        adapter = replace(adapter, fingerprint=gather(adapter.fingerprint)[0])
    return hf, adapter, gather(expected)[0]


def _lora_options(config: ModelConfig, reader: bool, gather: Callable[[Any], list[Any]]) -> LoraConfig | None:
    if config.adapter is None:
        return config.lora_config
    values, error = None, None
    try:
        values = read_adapter_config(config.adapter) if reader else None
    except Exception as exception:
        error = exception
    raise_on_all_ranks(config, error, gather)
    return lora_from_dict(gather(values)[0])
