"""LoRA adapters of a Hugging Face model: injected by peft, trained in fp32, entered in a way that sharding allows.

The adapter's linear layers and the trained copies of ``modules_to_save`` become FSDP units of their own, so each is
gathered only inside its own forward pass. Everything here therefore enters them through their modules.
"""

import copy
import warnings
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol, cast

import torch
from lightning.pytorch.utilities import rank_zero_info
from torch import Tensor, nn
from typing_extensions import override

from lightning_rl_engines import _compat
from lightning_rl_engines.export.plan import ExportEntry, ExportPlan, plan_from_hf_model
from lightning_rl_engines.models.fingerprint import fingerprint, sample_bits, sampled
from lightning_rl_engines.models.lora_config import WEIGHTS_FILE

if TYPE_CHECKING:
    from peft import LoraConfig
    from transformers import PreTrainedModel

    from lightning_rl_engines.models.config import ModelConfig

ADAPTER = "default"
"""Name of the one adapter inside peft's modules; files do not show it."""

_PEFT_PREFIX = "base_model.model."


class HeadScore(Protocol):
    """The fused head with everything but its inputs and weight filled in."""

    def __call__(self, hidden: Tensor, weight: Tensor, *, bias: Tensor | None) -> tuple[Tensor, Tensor | None]:
        """Return log-probabilities and entropies of ``hidden @ weight.T + bias``."""


@dataclass(frozen=True)
class Adapter:
    """What is known of a model's adapter beside its weights; the same on every rank.

    Names of tensors inside the model are those without wrappers of FSDP.

    Attributes:
        config: The configuration, targets resolved by peft.
        plan: The adapter's tensors, under the names of a PEFT folder.
        base_plan: The base model's tensors, under the names of its own save.
        base_names: Name of each frozen tensor inside the adapted model to its name in the plain one.
        merged_names: The same, with trained copies of ``modules_to_save`` in the place of what they replace.
        fingerprint: Of the base weights; tells whether a saved adapter belongs to this base. Empty where they were not
            read.
        peft_names: Name of each of the adapter's tensors inside the model to its name inside peft's, which checkpoints
            use; empty where the model is peft's.
    """

    config: "LoraConfig"
    plan: ExportPlan
    base_plan: ExportPlan
    base_names: Mapping[str, str]
    merged_names: Mapping[str, str]
    fingerprint: str
    peft_names: Mapping[str, str] = field(default_factory=dict)

    def peft_name(self, source: str) -> str:
        """Return the name inside peft's model of one of the adapter's tensors, by its name inside the model."""
        return self.peft_names.get(source, source)


def inject_adapter(hf: "PreTrainedModel", config: "ModelConfig", lora: "LoraConfig") -> Adapter:
    """Put an fp32 adapter into a plain model and freeze everything else, in place; local.

    Weights are initialised from ``config.seed``, or read from ``config.adapter``, unless the model is on meta.

    Args:
        hf: The base model; on the meta device where another rank holds the weights.
        config: What the model was built from.
        lora: The adapter's options; left as they are.

    Raises:
        ValueError: A target that cannot be trained, merged or saved exactly, or an adapter folder that does not fit.
    """
    from peft import inject_adapter_in_model

    base_plan = plan_from_hf_model(hf)
    base = _fingerprint(hf, base_plan)
    places = {(module, name): path for path, module, name in _tensors(hf)}
    resolved = _resolve(lora, config)
    # peft draws weights that are not kept, on ranks with meta tensors fewer: the process's generator is not for that.
    with warnings.catch_warnings(), torch.random.fork_rng(devices=[]):
        # Of tied and of transposed layers, which are refused below by name.
        warnings.simplefilter("ignore")
        try:
            inject_adapter_in_model(resolved, hf, ADAPTER)
        except (TypeError, ValueError) as error:
            raise ValueError(f"ModelConfig(lora=...) does not fit {config.source}: {error}") from error
    _check_targets(hf, resolved)
    _enter_head_through_module(hf)
    base_names = {path: places[module, name] for path, module, name in _tensors(hf) if (module, name) in places}
    merged_names, entries = dict(base_names), []
    for path, layer in lora_layers(hf):
        layer.lora_A.float()
        layer.lora_B.float()
        # Inputs and adapter weights have the type of the unit's computation; the stored one is no guide under FSDP.
        layer.cast_input_dtype_enabled = False
        for part in ("lora_A", "lora_B"):
            weight = getattr(layer, part)[ADAPTER].weight
            entries.append(_entry(f"{path}.{part}.weight", f"{path}.{part}.{ADAPTER}.weight", weight))
    for path, wrapper in trained_wrappers(hf):
        trained = wrapper.modules_to_save[ADAPTER].float()
        inside = f"{path}.modules_to_save.{ADAPTER}"
        for name, tensor in trained.state_dict().items():
            original = f"{path}.original_module.{name}"
            merged_names[f"{inside}.{name}"] = merged_names.pop(original)
            entries.append(_entry(f"{path}.{name}", f"{inside}.{name}", tensor))
    plan = ExportPlan(tuple(entries), num_parameters=sum(torch.Size(entry.shape).numel() for entry in entries))
    adapter = Adapter(resolved, plan, base_plan, base_names, merged_names, base)
    if not any(parameter.is_meta for parameter in hf.parameters()):
        for _ in fresh_weights(hf, resolved, config.seed):
            pass  # they are drawn in place
        if config.adapter is not None:
            load_adapter(hf, plan, read_adapter_weights(config.adapter), f"adapter={config.adapter!r}")
    return adapter


def load_adapter(hf: nn.Module, plan: ExportPlan, tensors: Mapping[str, Tensor], source: str) -> None:
    """Copy an adapter's tensors, under their names in a PEFT folder, into an unsharded model.

    Raises:
        ValueError: Names or shapes differ from those of the model's adapter.
    """
    require_fit(plan, {name: tuple(tensor.shape) for name, tensor in tensors.items()}, source)
    state = hf.state_dict()
    with torch.no_grad():
        for entry in plan.entries:
            state[entry.source].copy_(tensors[entry.name])


def require_fit(plan: ExportPlan, shapes: Mapping[str, tuple[int, ...]], source: str) -> None:
    """Refuse an adapter whose tensors are not those of the plan.

    Raises:
        ValueError: Names or shapes differ.
    """
    expected = {entry.name: entry.shape for entry in plan.entries}
    missing, unknown = sorted(expected.keys() - shapes.keys()), sorted(shapes.keys() - expected.keys())
    other = sorted(name for name in expected.keys() & shapes.keys() if shapes[name] != expected[name])
    if missing or unknown or other:
        raise ValueError(
            f"{source} does not fit the model: missing {missing[:3]}, unknown {unknown[:3]}, of another shape "
            f"{other[:3]}; use the base model that it was trained on."
        )


def lora_layers(model: nn.Module) -> list[tuple[str, Any]]:
    """Return the adapted linear layers with their names."""
    from peft.tuners.lora import LoraLayer

    return [(name, module) for name, module in model.named_modules() if isinstance(module, LoraLayer)]


def fresh_weights(hf: nn.Module, lora: "LoraConfig", seed: int) -> Iterator[tuple[str, Tensor]]:
    """Draw the weights of adapted layers anew, layer by layer and in place, and yield them under their names.

    peft drew them from the process's generator and rounded them to the base. Layers on meta get theirs on the host,
    for as long as they are looked at: every engine starts from the same numbers.
    """
    state: Tensor | None = None
    for path, layer in lora_layers(hf):
        parts = {name: getattr(layer, name)[ADAPTER] for name in ("lora_A", "lora_B")}
        is_meta = parts["lora_A"].weight.is_meta
        # The generator is borrowed for one layer at a time: it is the caller's in between.
        with torch.random.fork_rng(devices=[]), torch.no_grad():
            if state is None:
                torch.manual_seed(seed)
            else:
                torch.set_rng_state(state)
            for part in parts.values():
                if is_meta:
                    part.to_empty(device="cpu")
                part.reset_parameters()
            layer.reset_lora_parameters(ADAPTER, lora.init_lora_weights)
            state = torch.get_rng_state()
        for name, part in parts.items():
            yield f"{path}.{name}.{ADAPTER}.weight", part.weight.detach()
            if is_meta:
                part.to("meta")


def read_adapter_weights(folder: str) -> dict[str, Tensor]:
    """Return the tensors of an adapter folder by name."""
    from safetensors.torch import load_file

    tensors = load_file(Path(folder) / WEIGHTS_FILE)
    rank_zero_info(f"The adapter starts from {folder}.")
    return tensors


def trained_wrappers(model: nn.Module) -> list[tuple[str, Any]]:
    """Return peft's wrappers of ``modules_to_save`` with their names."""
    from peft.utils.other import ModulesToSaveWrapper

    return [(name, module) for name, module in model.named_modules() if isinstance(module, ModulesToSaveWrapper)]


def adapter_units(model: nn.Module) -> list[nn.Module]:
    """Return the modules that hold the trained weights of a model, each to be sharded by itself."""
    parts = [part[ADAPTER] for _, layer in lora_layers(model) for part in (layer.lora_A, layer.lora_B)]
    return [*parts, *(wrapper.modules_to_save[ADAPTER] for _, wrapper in trained_wrappers(model))]


@contextmanager
def adapters_disabled(model: nn.Module) -> Iterator[None]:
    """Run the base model alone; at exit, also after an exception, the adapters are as they were. Local.

    Raises:
        ValueError: The model has no adapter.
    """
    modules: list[Any] = [*(layer for _, layer in lora_layers(model)), *(item for _, item in trained_wrappers(model))]
    if not modules:
        raise ValueError("disable_adapter(model) needs a model with an adapter; build it with ModelConfig(lora=...).")
    before = [module.disable_adapters for module in modules]
    try:
        for module in modules:
            _compat.set_adapter_disabled(module, True)
        yield
    finally:
        for module, disabled in zip(modules, before, strict=True):
            _compat.set_adapter_disabled(module, disabled)


def adapters_are_disabled(model: nn.Module) -> bool:
    """Whether the model runs inside :func:`adapters_disabled`."""
    return any(layer.disable_adapters for _, layer in lora_layers(model))


def score_through_head(head: nn.Module, hidden: Tensor, score: HeadScore) -> tuple[Tensor, Tensor | None]:
    """Apply the fused head of a model whose output layer may be adapted or trained.

    An adapted head is ``[hidden, s A hidden] @ [W, B].T``, the same sum as peft's; nothing of the size of the logits
    exists.

    Args:
        head: The output layer, as peft left it.
        hidden: ``[T, H]``.
        score: The fused head.
    """
    from peft.tuners.lora import LoraLayer
    from peft.utils.other import ModulesToSaveWrapper

    if isinstance(head, ModulesToSaveWrapper):
        if not head.disable_adapters:
            return cast("tuple[Tensor, Tensor | None]", head.modules_to_save[ADAPTER](hidden, score))
        head = head.original_module
    elif isinstance(head, LoraLayer):
        base = cast(nn.Linear, head.get_base_layer())
        if not head.disable_adapters:
            low = head.lora_A[ADAPTER](hidden) * head.scaling[ADAPTER]
            inputs = torch.cat([hidden, low], dim=-1)
            return cast("tuple[Tensor, Tensor | None]", head.lora_B[ADAPTER](inputs, score, base))
        head = base
    return score(hidden, cast(Tensor, head.weight), bias=cast("Tensor | None", head.bias))


class HeadLinear(nn.Linear):
    """A linear layer whose weight the fused head reads while the layer itself is entered, so it is gathered."""

    @classmethod
    def of(cls, linear: nn.Linear) -> "HeadLinear":
        """Return a layer with the parameters of ``linear``."""
        layer = cls(linear.in_features, linear.out_features, bias=linear.bias is not None, device="meta")
        layer.weight = linear.weight
        layer.bias = linear.bias
        return layer

    @override
    def forward(self, input: Tensor, score: HeadScore | None = None, base: nn.Linear | None = None) -> Any:
        """Run the fused head on this weight, beside that of ``base`` where given; without ``score``, a plain layer."""
        if score is None:
            return super().forward(input)
        if base is None:
            return score(input, self.weight, bias=self.bias)
        return score(input, torch.cat([base.weight, self.weight], dim=1), bias=base.bias)


def _resolve(lora: "LoraConfig", config: "ModelConfig") -> "LoraConfig":
    """Return a copy of the options, completed for the model."""
    resolved = copy.deepcopy(lora)
    task = "CAUSAL_LM" if config.head == "lm" else "TOKEN_CLS"
    if resolved.task_type not in (None, task):
        raise ValueError(
            f"LoraConfig(task_type={resolved.task_type!r}) contradicts head={config.head!r}; leave it out."
        )
    resolved.task_type = task
    resolved.base_model_name_or_path = config.path
    resolved.revision = config.revision
    if config.head == "value":
        # A fresh value head cannot stay frozen; peft does the same for its own task type.
        resolved.modules_to_save = sorted({*(resolved.modules_to_save or ()), "score"})
        if isinstance(resolved.target_modules, str) and resolved.target_modules.lower() == "all-linear":
            excluded = resolved.exclude_modules
            if isinstance(excluded, str):
                resolved.exclude_modules = rf"(?:{excluded})|score"
            else:
                resolved.exclude_modules = sorted({*(excluded or ()), "score"})
    return resolved


def _check_targets(hf: "PreTrainedModel", lora: "LoraConfig") -> None:
    from peft.tuners.lora import LoraLayer
    from peft.tuners.lora.layer import ParamWrapper

    owners: dict[int, list[str]] = {}
    for path, module, name in _tensors(hf):
        owners.setdefault(id(getattr(module, name)), []).append(path)
    for path, layer in lora_layers(hf):
        base = layer.get_base_layer()
        if isinstance(layer, ParamWrapper):
            raise ValueError(
                f"LoraConfig(target_modules={lora.target_modules!r}) targets {path!r}: adapters of stacked experts "
                "have no agreed layout; name the linear layers of the attention, such as ['q_proj', 'v_proj']."
            )
        if not isinstance(base, nn.Linear):
            raise ValueError(
                f"LoraConfig(target_modules={lora.target_modules!r}) targets {path!r}, a {type(base).__name__}; only "
                "nn.Linear layers can be adapted, use modules_to_save for others."
            )
        _refuse_tied(path, base, owners, "target_modules")
    blocks = set(hf._no_split_modules or ())
    for path, wrapper in trained_wrappers(hf):
        _refuse_tied(path, wrapper.original_module, owners, "modules_to_save")
        for inner in wrapper.original_module.modules():
            if isinstance(inner, LoraLayer) or type(inner).__name__ in blocks:
                raise ValueError(
                    f"LoraConfig(modules_to_save={lora.modules_to_save!r}) trains {path!r}, which holds a whole layer "
                    "or adapters; name smaller modules, or take them out of target_modules."
                )
    for wanted in lora.modules_to_save or ():
        if not any(path.split(".")[-1] == wanted or path.endswith(wanted) for path, _ in trained_wrappers(hf)):
            raise ValueError(
                f"LoraConfig(modules_to_save={lora.modules_to_save!r}): no module is called {wanted!r}; names are like "
                "'lm_head' or 'embed_tokens'."
            )


def _refuse_tied(path: str, module: nn.Module, owners: Mapping[int, list[str]], option: str) -> None:
    for parameter in module.parameters():
        shared = owners[id(parameter)]
        if len(shared) > 1:
            raise ValueError(
                f"LoraConfig({option}=...) names {path!r}, whose weight is tied ({' and '.join(shared)}): trained "
                "apart, the two could not be saved as this model; leave it out, or use a base whose weights are not "
                "tied (tie_word_embeddings=False)."
            )


def _enter_head_through_module(hf: "PreTrainedModel") -> None:
    from peft.tuners.lora import LoraLayer
    from peft.utils.other import ModulesToSaveWrapper

    head = hf.get_output_embeddings()
    if isinstance(head, ModulesToSaveWrapper):
        head.modules_to_save[ADAPTER] = HeadLinear.of(cast(nn.Linear, head.modules_to_save[ADAPTER]))
    elif isinstance(head, LoraLayer):
        head.lora_B[ADAPTER] = HeadLinear.of(cast(nn.Linear, head.lora_B[ADAPTER]))


def _entry(name: str, source: str, tensor: Tensor) -> ExportEntry:
    return ExportEntry(f"{_PEFT_PREFIX}{name}", tuple(tensor.shape), tensor.dtype, source)


def _tensors(model: nn.Module) -> Iterator[tuple[str, nn.Module, str]]:
    """Yield path, owner and attribute of each parameter and buffer; tied ones once per place."""
    for path, module in model.named_modules():
        for name, _ in (*module.named_parameters(recurse=False), *module.named_buffers(recurse=False)):
            yield f"{path}.{name}" if path else name, module, name


def _fingerprint(hf: nn.Module, plan: ExportPlan) -> str:
    """Fingerprint of a plain model; empty on meta."""
    state = hf.state_dict()
    if any(parameter.is_meta for parameter in hf.parameters()):
        return ""
    pieces = (piece for source in plan.by_source for piece in plan.pieces(source, state[source]))
    bits = {name: sample_bits(piece.reshape(-1)[:: sampled(tuple(piece.shape)).step]) for name, piece in pieces}
    return fingerprint((entry.name, entry.shape, bits[entry.name]) for entry in plan.entries)
