"""LoRA configurations: what the engines train exactly, and their plain form."""

from collections.abc import Callable, Mapping
from dataclasses import MISSING, Field, asdict, fields
from enum import Enum
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from peft import LoraConfig

CONFIG_FILE = "adapter_config.json"
WEIGHTS_FILE = "adapter_model.safetensors"

_INITS = (True, False, "gaussian")

# Fields whose every value keeps the forward pass `W x + s B A x`, or that only describe.
_EXACT_FIELDS = frozenset(
    {
        "alpha_pattern",
        "auto_mapping",
        "base_model_name_or_path",
        "exclude_modules",
        "inference_mode",
        "init_lora_weights",
        "layers_pattern",
        "layers_to_transform",
        "lora_alpha",
        "modules_to_save",
        "peft_type",
        "peft_version",
        "r",
        "rank_pattern",
        "revision",
        "runtime_config",
        "target_modules",
        "task_type",
        "use_rslora",
    }
)

_REASONS = {
    "lora_dropout": "a policy with dropout gives a token another log-probability in each pass, so the importance ratio "
    "of a first step would not be 1; use 0.0",
    "use_dora": "its weight norms need whole base weights in each forward pass; leave it out, or use use_rslora=True",
    "bias": "trained biases live in the frozen units of the base; use 'none'",
    "lora_bias": "the merged model would need biases that the base lacks; leave it out",
    "fan_in_fan_out": "only nn.Linear modules can be targeted; leave it out",
    "target_parameters": "stacked expert weights have no agreed orientation of their adapters; target the linear "
    "modules by target_modules",
    "trainable_token_indices": "use modules_to_save=['embed_tokens'], which trains the whole embedding",
    "ensure_weight_tying": "adapters of tied weights are refused; leave it out",
    "loftq_config": "it changes the base weights",
}


def require_exact_lora(lora: "LoraConfig") -> None:
    """Refuse options under which the engines would not train or export what peft means.

    Raises:
        ValueError: The option, its value, the reason and what works.
    """
    if lora.init_lora_weights not in _INITS:
        raise ValueError(
            f"LoraConfig(init_lora_weights={lora.init_lora_weights!r}) is not supported: such inits (PiSSA, OLoRA, "
            "EVA, CorDA, LoftQ and kin) change the base weights or need data, so the frozen base would no longer be "
            "the checkpoint that adapters are saved for; use True, False or 'gaussian'."
        )
    if lora.inference_mode:
        raise ValueError("LoraConfig(inference_mode=True) trains nothing; leave it out.")
    if not lora.target_modules:
        raise ValueError(
            f"LoraConfig(target_modules={lora.target_modules!r}) adapts nothing; use 'all-linear', or names such as "
            "['q_proj', 'v_proj']."
        )
    for item in fields(lora):
        value = getattr(lora, item.name)
        if item.name in _EXACT_FIELDS or not value or value == _default(item):
            continue
        reason = _REASONS.get(item.name, "it changes the forward pass or the base weights; leave it out")
        raise ValueError(f"LoraConfig({item.name}={value!r}) is not supported: {reason}.")


def lora_to_dict(lora: "LoraConfig") -> dict[str, Any]:
    """Return the fields that differ from their defaults as plain data: what another version of peft reads too."""
    values = asdict(lora)
    return {
        item.name: _plain(values[item.name])
        for item in fields(lora)
        if item.name not in ("peft_type", "peft_version", "runtime_config") and values[item.name] != _default(item)
    }


def lora_from_dict(values: Mapping[str, Any]) -> "LoraConfig":
    """Build a configuration from plain data, as a YAML file, a checkpoint or ``adapter_config.json`` holds it.

    Raises:
        ValueError: It is of another method than LoRA, or has a field that the installed peft does not know.
    """
    from peft import LoraConfig

    given = dict(values)
    # The form of LightningCLI for classes.
    if str(given.pop("class_path", "LoraConfig")).rpartition(".")[2] != "LoraConfig":
        raise ValueError(f"lora={dict(values)!r} is another class; use peft.LoraConfig.")
    given = {**given.pop("init_args", {}), **given}
    kind = _plain(given.pop("peft_type", None) or "LORA")
    if kind != "LORA":
        raise ValueError(f"lora={{'peft_type': {kind!r}}} is another method; only 'LORA' is supported.")
    # Written by peft for people, or about how to run and not what.
    for name in ("runtime_config", "peft_version"):
        given.pop(name, None)
    known = {item.name for item in fields(LoraConfig)}
    # Fields of a newer peft do not matter while they are off.
    unknown = [name for name, value in given.items() if name not in known and value]
    if unknown:
        raise ValueError(f"lora has the fields {unknown}, which peft's LoraConfig does not know; remove them.")
    return LoraConfig(**{name: value for name, value in given.items() if name in known})


def adapter_config_dict(lora: "LoraConfig") -> dict[str, Any]:
    """Return the content of ``adapter_config.json``: every field, sets sorted, so that it is the same on each run."""
    return {name: _plain(value) for name, value in {**lora.to_dict(), "inference_mode": True}.items()}


def read_adapter_config(folder: str) -> dict[str, Any]:
    """Return the LoRA options of an adapter folder as plain data.

    Raises:
        ValueError: The folder holds no adapter, or one that the engines do not train exactly.
    """
    import json

    path = Path(folder) / CONFIG_FILE
    if not path.is_file() or not (Path(folder) / WEIGHTS_FILE).is_file():
        raise ValueError(
            f"adapter={folder!r} holds no {CONFIG_FILE} with {WEIGHTS_FILE}; name a folder that "
            "peft's save_pretrained or WeightExport(weights='adapter') wrote."
        )
    values = {**json.loads(path.read_text(encoding="utf-8")), "inference_mode": False}
    lora = lora_from_dict(values)
    try:
        require_exact_lora(lora)
    except ValueError as error:
        raise ValueError(f"adapter={folder!r}: {error}") from error
    return lora_to_dict(lora)


def _default(item: "Field[Any]") -> Any:
    if item.default_factory is not MISSING:
        factory: Callable[[], Any] = item.default_factory
        return factory()
    return None if item.default is MISSING else item.default


def _plain(value: Any) -> Any:
    if isinstance(value, Enum):
        return value.value
    if isinstance(value, Mapping):
        return {str(key): _plain(item) for key, item in value.items()}
    if isinstance(value, set | frozenset):
        return sorted(value)
    if isinstance(value, list | tuple):
        return [_plain(item) for item in value]
    return value
