"""Hugging Face models as token models: packed rows in, fused log-probabilities out."""

import fnmatch
from collections.abc import Iterable, Mapping
from contextlib import AbstractContextManager
from functools import partial
from typing import TYPE_CHECKING, Any, cast

import torch
from lightning.pytorch.utilities import rank_zero_info, rank_zero_warn
from torch import Tensor, nn
from typing_extensions import override

from lightning_rl_engines.algorithms.outputs import TokenOutputs
from lightning_rl_engines.export.plan import plan_from_hf_model
from lightning_rl_engines.heads import linear_log_prob
from lightning_rl_engines.models.compile import compile_layers
from lightning_rl_engines.models.config import ModelConfig
from lightning_rl_engines.models.cost import document_cost
from lightning_rl_engines.models.graph_guard import GraphGuard
from lightning_rl_engines.models.lora import Adapter, adapter_units, adapters_disabled, score_through_head
from lightning_rl_engines.models.token_model import TokenModel, inverse_temperature, scatter_predicted

if TYPE_CHECKING:
    from transformers import GenerationConfig, PretrainedConfig, PreTrainedModel

    from lightning_rl_engines.sequence.packing import MicroBatch


_COMPUTED = ("inv_freq", ".attn.bias", ".attn.masked_bias", ".attention.bias", ".attention.masked_bias")
"""Ends of the names of constants, frequencies and causal masks, that older checkpoints hold."""


def load_hf_model(
    config: ModelConfig,
    *,
    dtype: torch.dtype = torch.float32,
    device: torch.device | str = "cpu",
    attn_implementation: str = "sdpa",
    empty: bool = False,
) -> "PreTrainedModel":
    """Build the plain, unsharded Hugging Face model of a configuration, in evaluation mode.

    Args:
        config: What to build; a value head gives a token-classification model with one label.
        dtype: Storage type of parameters; buffers keep the type the model gives them.
        device: Where it lives; ``"meta"`` needs ``empty``.
        attn_implementation: A name that transformers knows, ours included.
        empty: Build the architecture and read no weights.

    Raises:
        ValueError: The weights do not fit the configuration, naming what is missing or left over; or the family has
            no value head.
    """
    from transformers import AutoModelForCausalLM, AutoModelForTokenClassification

    factory: Any = AutoModelForCausalLM if config.head == "lm" else AutoModelForTokenClassification
    hf_config = config.load_hf_config()
    if config.head == "value":
        _require_value_head(factory, hf_config, config)
    if empty or config.path is None:
        model = _from_config(factory, config, hf_config, dtype, device, attn_implementation)
    else:
        model = _from_pretrained(factory, config, hf_config, dtype, attn_implementation)
        nn.Module.to(model, device)
        # Some architectures keep a few weights in fp32 when they are read, and not when they are built empty: ranks
        # would disagree, and a flat parameter has one type.
        for parameter in model.parameters():
            if parameter.is_floating_point() and parameter.dtype != dtype:
                parameter.data = parameter.data.to(dtype)
    return cast("PreTrainedModel", model.eval())


def _require_value_head(factory: Any, hf_config: "PretrainedConfig", config: ModelConfig) -> None:
    """Refuse a family whose token classification model is missing, or other than a linear layer called ``score``."""
    from transformers import MODEL_FOR_TOKEN_CLASSIFICATION_MAPPING

    own_code = factory.__name__ in (getattr(hf_config, "auto_map", None) or {})
    known = own_code or type(hf_config) in MODEL_FOR_TOKEN_CLASSIFICATION_MAPPING
    if known:
        model = _from_config(factory, config, hf_config, torch.float32, "meta", "eager")
        if isinstance(getattr(model, "score", None), nn.Linear):
            return
    lack = "calls the head of its token classification otherwise than 'score'" if known else "has no such model"
    raise ValueError(
        f"ModelConfig(head='value') needs a token classification model, and {hf_config.model_type!r} {lack} in "
        "transformers; use a family such as llama, mistral, phi, qwen2 or qwen3."
    )


def load_causal_lm(config: ModelConfig, **kwargs: Any) -> "PreTrainedModel":
    """Build the plain causal language model of a configuration; arguments are those of :func:`load_hf_model`.

    Raises:
        ValueError: The configuration has a value head.
    """
    if config.head != "lm":
        raise ValueError(f"ModelConfig(head={config.head!r}) is no language model; use head='lm'.")
    return load_hf_model(config, **kwargs)


def _from_config(
    factory: Any,
    config: ModelConfig,
    hf_config: "PretrainedConfig",
    dtype: torch.dtype,
    device: torch.device | str,
    attn_implementation: str,
) -> "PreTrainedModel":
    with torch.random.fork_rng(devices=[]), torch.device(device):
        if torch.device(device).type != "meta":
            torch.manual_seed(config.seed)
        model: PreTrainedModel = factory.from_config(
            hf_config, dtype=dtype, attn_implementation=attn_implementation, trust_remote_code=config.trust_remote_code
        )
    model.tie_weights()
    return model


def _from_pretrained(
    factory: Any, config: ModelConfig, hf_config: "PretrainedConfig", dtype: torch.dtype, attn_implementation: str
) -> "PreTrainedModel":
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(config.seed)
        model, report = factory.from_pretrained(
            config.path,
            config=hf_config,
            dtype=dtype,
            attn_implementation=attn_implementation,
            trust_remote_code=config.trust_remote_code,
            revision=config.revision,
            output_loading_info=True,
            # What does not match is refused below, by name.
            ignore_mismatched_sizes=True,
        )
    missing, mismatched = set(report["missing_keys"]), sorted(map(str, report["mismatched_keys"]))
    head = {name for name in missing if config.head == "value" and name.startswith("score.")}
    left = _left_in_backbone(model, report["unexpected_keys"])
    if missing - head or mismatched or left:
        raise ValueError(
            f"The weights in path={config.path!r} do not fit its configuration: missing {sorted(missing - head)}, "
            f"of another shape {mismatched}, left over {left}; name a complete checkpoint"
            f"{' (a value head has one label, and is called score)' if config.head == 'value' else ''}."
        )
    _tie_as_configured(model, str(config.path))
    # Reading makes parameters anew, and forgets which of them are not trained; other ranks read none.
    twin = _from_config(factory, config, hf_config, dtype, "meta", attn_implementation)
    for name, parameter in twin.named_parameters():
        model.get_parameter(name).requires_grad_(parameter.requires_grad)
    if head:
        _check_fresh_head(config, hf_config, model, head, report["unexpected_keys"])
    return cast("PreTrainedModel", model)


def _left_in_backbone(model: "PreTrainedModel", unexpected: Iterable[str]) -> list[str]:
    """Weights of a backbone that its configuration has no place for; heads that nobody asked for are none."""
    inside = f"{model.base_model_prefix}."
    # A save of the backbone alone has no prefix.
    children = {name for name, _ in model.base_model.named_children()}
    left = (name for name in unexpected if name.startswith(inside) or name.partition(".")[0] in children)
    return sorted(name for name in left if not name.endswith(_COMPUTED))[:8]


def _check_fresh_head(
    config: ModelConfig, hf_config: "PretrainedConfig", model: "PreTrainedModel", fresh: set[str], left: Iterable[str]
) -> None:
    """Say that a value head is fresh; refuse it where the checkpoint holds a head under another name."""
    from transformers import AutoModelForCausalLM

    with torch.device("meta"):
        language_model = AutoModelForCausalLM.from_config(hf_config, trust_remote_code=config.trust_remote_code)
    known = {name for name, _ in language_model.named_parameters(remove_duplicate=False)}
    inside = f"{model.base_model_prefix}."
    foreign = sorted(name for name in left if name not in known and not name.startswith(inside))
    if fresh == {"score.bias"} and not foreign:
        rank_zero_info(f"The value head of {config.path} has no bias; it starts from 0.")
        return
    if foreign or fresh != {name for name, _ in model.named_parameters() if name.startswith("score.")}:
        raise ValueError(
            f"The weights in path={config.path!r} have no value head under the name of {type(model).__name__}: "
            f"missing {sorted(fresh)}, left over {foreign}. A trained head would be lost; rename it to 'score.weight' "
            "and 'score.bias', or start from a language model for a fresh one."
        )
    rank_zero_info(f"The value head of {config.path} is freshly initialised: the checkpoint holds none.")


def _tie_as_configured(model: "PreTrainedModel", path: str) -> None:
    """Tie what the configuration ties; transformers does not where a checkpoint holds two different tensors.

    Ranks that read no weights follow the configuration, so the one that reads them has to.
    """
    before = {name for name, _ in model.named_parameters()}
    model.tie_weights()
    dropped = sorted(before - {name for name, _ in model.named_parameters()})
    if dropped:
        rank_zero_warn(
            f"path={path!r} holds {dropped} with another value than the tensor that its configuration ties it to; the "
            "configuration is followed. Set tie_word_embeddings=false in config.json if both are meant."
        )


def _freeze(model: "PreTrainedModel", patterns: Iterable[str]) -> None:
    names = {parameter: name for name, parameter in model.named_parameters()}
    for pattern in patterns:
        chosen = set(fnmatch.filter(names.values(), pattern))
        if not chosen:
            every = dict(model.named_parameters(remove_duplicate=False))
            tied = [f"{name!r} is tied to {names[every[name]]!r}" for name in fnmatch.filter(every, pattern)]
            hint = tied[0] if tied else f"names are like {next(reversed(names.values()))!r}"
            raise ValueError(f"ModelConfig(freeze=[{pattern!r}]) matches no parameter; {hint}.")
        for name, parameter in model.named_parameters():
            if name in chosen:
                parameter.requires_grad_(False)


def _tabled_positions(model: "PreTrainedModel") -> int | None:
    """How many positions a model has that looks them up in a table; ``None`` for one that computes them."""
    limit = getattr(model.config.get_text_config(), "max_position_embeddings", None)
    names = [name for name, _ in (*model.named_parameters(), *model.named_buffers())]
    # So transformers calls them, learned or computed, in GPT-2, GPT-J, OPT and their kin.
    tabled = any(".wpe." in name or ".embed_positions" in name for name in names)
    return int(limit) if limit is not None and tabled else None


def load_generation_config(config: ModelConfig, hf_config: "PretrainedConfig") -> "GenerationConfig | None":
    """Return how a model is sampled by default: as its folder says, or else its configuration; ``None`` for critics."""
    from transformers import GenerationConfig

    if config.head != "lm":
        return None
    if config.path is not None:
        try:
            return GenerationConfig.from_pretrained(config.path, revision=config.revision or "main")
        except OSError:
            # The model comes without one; transformers derives it from the configuration then.
            pass
    return GenerationConfig.from_model_config(hf_config)


class HFTokenModel(TokenModel):
    """A Hugging Face model whose head is the fused log-probability or a value per token.

    The head's weight is read inside :meth:`forward`, so an FSDP root around this module has gathered it.

    Args:
        hf: The Hugging Face model, bound to a packed attention kernel.
        model_config: What it was built from.
        adapter: What :func:`~lightning_rl_engines.models.lora.inject_adapter` returned for it.
    """

    def __init__(self, hf: "PreTrainedModel", model_config: ModelConfig, adapter: Adapter | None = None) -> None:
        super().__init__()
        self.hf = hf
        self.model_config = model_config
        self.config = hf.config
        self.export_plan = plan_from_hf_model(hf) if adapter is None else adapter.base_plan
        self._adapter = adapter
        self._guard = GraphGuard()
        first: dict[int, str] = {}
        # Before sharding, which gives tied parameters tensors of their own.
        self._checkpoint_names = {
            name: first.setdefault(id(tensor), name) for name, tensor in self.state_dict(keep_vars=True).items()
        }
        text = hf.config.get_text_config()
        self._softcap: float | None = getattr(text, "final_logit_softcapping", None)
        # Cohere multiplies its logits, Granite divides them.
        self._scale = float(getattr(text, "logit_scale", None) or 1.0) / float(
            getattr(text, "logits_scaling", None) or 1.0
        )
        self._positions = _tabled_positions(hf)
        _freeze(hf, model_config.freeze)
        if model_config.gradient_checkpointing:
            # Re-entrant checkpointing drops our keyword arguments and needs inputs that require a gradient.
            hf.activation_checkpointing_enable(activation_checkpointing_kwargs={"use_reentrant": False})
        if model_config.compile:
            compile_layers(self.layers, backend=model_config.compile_backend)

    @property
    @override
    def longest_document(self) -> int | None:
        return self._positions

    @property
    def layers(self) -> list[nn.Module]:
        """The decoder layers, the units of sharding.

        Raises:
            ValueError: The architecture does not say which modules they are.
        """
        names = set(self.hf._no_split_modules or ())
        found = [module for module in self.hf.modules() if type(module).__name__ in names]
        if not found:
            raise ValueError(
                f"{type(self.hf).__name__} names no decoder layers (_no_split_modules); use a Hugging Face decoder "
                "such as Llama or Qwen3."
            )
        return found

    @override
    def checkpoint_names(self) -> Mapping[str, str]:
        return self._checkpoint_names

    @property
    @override
    def adapter(self) -> Adapter | None:
        return self._adapter

    @override
    def disable_adapter(self) -> AbstractContextManager[None]:
        return super().disable_adapter() if self._adapter is None else adapters_disabled(self)

    @property
    def units(self) -> list[nn.Module]:
        """The units of sharding: the decoder layers, and what an adapter trains."""
        return [*self.layers, *(adapter_units(self) if self._adapter else ())]

    @property
    @override
    def document_cost(self) -> tuple[float, float]:
        return document_cost(self.config, self.export_plan)

    @override
    def forget_graphs(self) -> None:
        self._guard.forget()

    @override
    def forward(
        self, micro_batch: "MicroBatch", *, calculate_entropy: bool = False, temperature: float | str = 1.0
    ) -> TokenOutputs:
        row = micro_batch.row
        hidden: Tensor = self.hf.base_model(
            input_ids=micro_batch.input_ids[None],
            position_ids=micro_batch.position_ids[None],
            use_cache=False,
            packed_row=row,
        ).last_hidden_state[0]
        hidden = hidden.index_select(0, micro_batch.predicted)
        if self.model_config.head == "value":
            results: tuple[Tensor | None, ...] = (None, None, self._values(hidden))
        else:
            results = (*self._log_probs(hidden, micro_batch, calculate_entropy, temperature), None)
        present = [scatter_predicted(item, micro_batch) for item in results if item is not None]
        tracked = iter(self._guard.track(tuple(present)))
        return TokenOutputs(*(None if item is None else next(tracked) for item in results))

    def _log_probs(
        self, hidden: Tensor, micro_batch: "MicroBatch", calculate_entropy: bool, temperature: float | str
    ) -> tuple[Tensor, Tensor | None]:
        score = partial(
            linear_log_prob,
            labels=micro_batch.labels.index_select(0, micro_batch.predicted),
            inv_temperature=inverse_temperature(micro_batch, temperature),
            softcap=self._softcap,
            scale=self._scale,
            calculate_entropy=calculate_entropy,
        )
        head = self.hf.get_output_embeddings()
        if self._adapter is not None:
            return score_through_head(head, hidden, score)
        return score(hidden, head.weight, bias=head.bias)

    def _values(self, hidden: Tensor) -> Tensor:
        values: Tensor = cast(nn.Module, self.hf.score)(hidden)
        return values[:, 0].float()
