"""Checkpoints of models with an adapter: the adapter alone, and how to know its base again."""

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

from torch import nn
from torch.distributed.checkpoint.state_dict import get_model_state_dict, set_model_state_dict

from lightning_rl_engines.checkpoint.names import saved_names
from lightning_rl_engines.checkpoint.quiet import without_shard_warnings
from lightning_rl_engines.models.lora_config import lora_from_dict, lora_to_dict
from lightning_rl_engines.models.token_model import TokenModel

if TYPE_CHECKING:
    from lightning_rl_engines.models.config import ModelConfig
    from lightning_rl_engines.models.huggingface import HFTokenModel

METADATA_KEY = "adapters"
"""Where a checkpoint keeps, for each model with an adapter, its options and the fingerprint of its base."""


def trained_state(root: nn.Module) -> dict[str, Any]:
    """Return a model's sharded state by its own names, its adapter alone where it has one.

    Collective over the world.
    """
    with without_shard_warnings():
        state = get_model_state_dict(root)
    adapter = cast(TokenModel, root).adapter
    if adapter is None:
        return state
    # By name, not by `requires_grad`: frozen tied weights would come along.
    trained = {f"hf.{adapter.peft_name(entry.source)}" for entry in adapter.plan.entries}
    names = saved_names(root)
    return {name: tensor for name, tensor in state.items() if names[name] in trained}


def load_trained_state(root: nn.Module, state: dict[str, Any]) -> None:
    """Load what :func:`trained_state` returned; a base stays as it is. Collective over the world."""
    with without_shard_warnings():
        if cast(TokenModel, root).adapter is not None:
            # FSDP1 logs a warning for each name it does not find, so the base is written onto itself.
            state = {**get_model_state_dict(root), **state}
        set_model_state_dict(root, state)


def describe_adapter(root: nn.Module) -> dict[str, Any] | None:
    """Return what a checkpoint says of a model's adapter, as plain data; ``None`` without one."""
    adapter = cast(TokenModel, root).adapter
    return None if adapter is None else {"lora": lora_to_dict(adapter.config), "base": adapter.fingerprint}


def require_same_adapter(name: str, root: nn.Module, saved: Mapping[str, Any] | None, path: Path) -> None:
    """Refuse a checkpoint whose weights are not those that a model trains.

    Raises:
        ValueError: One has an adapter and the other has not, their options differ, or their bases do.
    """
    own = describe_adapter(root)
    if own is None and saved is None:
        return
    if own is None or saved is None:
        holds, has = ("an adapter", "none") if own is None else ("whole weights", "one")
        raise ValueError(
            f"ckpt_path={str(path)!r} holds {holds} of {name!r} and the model has {has}; use the lora of the run that "
            "saved it, or start from lightning-rl export's folder."
        )
    different = [
        key
        for key in sorted({*own["lora"], *saved["lora"]})
        # Where the base lies may change; that it is the same one is checked by its weights.
        if key not in ("base_model_name_or_path", "revision") and own["lora"].get(key) != saved["lora"].get(key)
    ]
    if different:
        key = different[0]
        raise ValueError(
            f"ckpt_path={str(path)!r} holds an adapter with {key}={saved['lora'].get(key)!r}, and {name!r} has "
            f"{key}={own['lora'].get(key)!r}; use the lora of the run that saved it."
        )
    if own["base"] != saved["base"]:
        raise ValueError(
            f"ckpt_path={str(path)!r} holds an adapter of another base than {name!r} is built from; use the base model "
            "of the run that saved it."
        )


def rebuild_model(config: "ModelConfig", saved: Mapping[str, Any], path: Path, *, with_base: bool) -> "HFTokenModel":
    """Build the plain model of a saved adapter on the host, the adapter's weights still to be loaded.

    Args:
        config: What the model was built from.
        saved: What the checkpoint says of its adapter.
        path: The checkpoint, for messages.
        with_base: Read the base, too; otherwise everything is on meta.

    Raises:
        ValueError: The base is another one now.
    """
    from lightning_rl_engines.models.config import torch_dtype
    from lightning_rl_engines.models.huggingface import HFTokenModel, load_hf_model
    from lightning_rl_engines.models.lora import inject_adapter

    lora = lora_from_dict(saved["lora"])
    config = replace(config, lora=lora, adapter=None)
    dtype = torch_dtype(config.dtype or "float32")
    # It never runs, and not every family has another kernel.
    device = "cpu" if with_base else "meta"
    hf = load_hf_model(config, dtype=dtype, device=device, attn_implementation="eager", empty=not with_base)
    adapter = inject_adapter(hf, config, lora)
    if with_base and adapter.fingerprint != saved["base"]:
        raise ValueError(
            f"checkpoint={str(path)!r} holds an adapter of another base than {config.source} is now; put the base back "
            "that it was trained on."
        )
    return HFTokenModel(hf, config, adapter)
