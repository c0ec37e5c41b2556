"""Which model to build: plain data that LightningCLI reads and checkpoints can hold."""

import copy
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, TypeAlias, cast

import torch
from lightning.pytorch.utilities import rank_zero_warn
from peft import LoraConfig

from lightning_rl_engines.models.lora_config import lora_from_dict, lora_to_dict, require_exact_lora

if TYPE_CHECKING:
    from transformers import PretrainedConfig

DTypeName: TypeAlias = Literal["float32", "bfloat16", "float16"]
"""Floating-point types by the names that configurations use."""


def torch_dtype(name: DTypeName) -> torch.dtype:
    """Return the torch type of this name.

    Raises:
        ValueError: The name is none of ``float32``, ``bfloat16``, ``float16``.
    """
    if name not in ("float32", "bfloat16", "float16"):
        raise ValueError(f"dtype={name!r} is not supported; use 'float32', 'bfloat16' or 'float16'.")
    dtype: torch.dtype = getattr(torch, name)
    return dtype


@dataclass(frozen=True, kw_only=True)
class ModelConfig:
    """A causal language model (or a critic with the same backbone) to be built by an engine.

    Exactly one of ``path`` and ``from_config`` is given.

    Args:
        path: A Hugging Face folder or hub name; configuration and weights are read from it.
        from_config: A folder or ``config.json`` file, or the configuration as a dictionary with its ``model_type``;
            the weights are random.
        head: ``"lm"`` gives log-probabilities and entropies, ``"value"`` one value per token. A value head is
            Hugging Face's token-classification head with one label: read from a saved critic, fresh on a causal
            language model.
        dtype: Storage type of the weights; ``None`` lets the Trainer's ``precision`` decide. Under LoRA that of the
            frozen base, such as ``"bfloat16"``; adapters are stored in fp32.
        lora: Options of an adapter that is trained instead of the weights, a ``peft.LoraConfig`` or its fields;
            ``None`` and ``False`` train the weights. Options that change the base weights, or that cannot be trained
            and exported exactly, are refused.
        adapter: Folder of a saved adapter (peft's, or of ``WeightExport(weights="adapter")``) to train further; its
            options come with it, so ``lora`` is left out.
        attn_implementation: The kernel for packed rows: ``"sdpa"`` (one call per document, every device),
            ``"varlen"`` (torch's own, CUDA), ``"flash"`` (the flash-attn package), ``"flex"``, or ``"auto"``.
        freeze: Patterns of Hugging Face parameter names that are not trained, such as ``["lm_head.*"]``; each must
            match a parameter.
        gradient_checkpointing: Recompute the activations of each decoder layer in the backward pass.
        use_liger: Compute RMS norms and gated MLPs with Liger's Triton kernels in engines; needs a GPU and the extra
            ``liger``. Rollouts keep the model's own.
        compile: Compile each decoder layer with ``torch.compile``; attention stays outside. Results are those of the
            plain layer up to rounding. Under tensor parallelism a graph holds for one length of rows, and rows are
            padded to quarters of ``max_tokens_per_micro_batch``.
        compile_backend: Backend of ``torch.compile``.
        check_forward: Compare the built model with transformers' own forward pass on two short documents, which rank 0
            runs on the host, and refuse it if they differ. ``None`` does so for architectures that the test suite does
            not cover. Not with ``strategy="torchtitan"``, whose models are specified field by field.
        trust_remote_code: Allow model code from the folder or the hub.
        revision: Hub revision.
        tokenizer: Folder or hub name of the tokenizer; by default the model's own.
        seed: Seed of random weights, of a fresh value head and of a fresh adapter, the same on every rank.

    Raises:
        ValueError: Neither or both of ``path`` and ``from_config``, a value outside the ones listed, or a LoRA option
            that is not exact here.
    """

    path: str | None = None
    from_config: str | dict[str, Any] | None = None
    head: Literal["lm", "value"] = "lm"
    dtype: DTypeName | None = None
    lora: dict[str, Any] | LoraConfig | Literal[False] | None = None
    adapter: str | None = None
    attn_implementation: Literal["auto", "sdpa", "varlen", "flash", "flex"] = "auto"
    freeze: tuple[str, ...] | list[str] = ()
    gradient_checkpointing: bool = False
    use_liger: bool = False
    compile: bool = False
    compile_backend: str = "inductor"
    check_forward: bool | None = None
    trust_remote_code: bool = False
    revision: str | None = None
    tokenizer: str | None = None
    seed: int = 0

    def __post_init__(self) -> None:
        if (self.path is None) == (self.from_config is None):
            raise ValueError(
                f"ModelConfig needs exactly one of path={self.path!r} and from_config={self.from_config!r}; give path "
                "for pretrained weights, from_config for random ones."
            )
        if isinstance(self.from_config, dict) and "model_type" not in self.from_config:
            raise ValueError(
                f"ModelConfig(from_config={self.from_config!r}) has no 'model_type'; add one, such as 'llama'."
            )
        if self.head not in ("lm", "value"):
            raise ValueError(f"ModelConfig(head={self.head!r}) is unknown; use 'lm' or 'value'.")
        if self.dtype is not None:
            torch_dtype(self.dtype)
        kernels = ("auto", "sdpa", "varlen", "flash", "flex")
        if self.attn_implementation not in kernels:
            raise ValueError(
                f"ModelConfig(attn_implementation={self.attn_implementation!r}) is unknown; use one of {kernels}."
            )
        self._check_speed_options()
        self._check_lora()

    def _check_speed_options(self) -> None:
        if self.compile_backend != "inductor" and not self.compile:
            raise ValueError(
                f"ModelConfig(compile_backend={self.compile_backend!r}) has no effect with compile=False; use "
                "compile=True, or leave compile_backend out."
            )
        if self.compile and self.use_liger:
            raise ValueError(
                "ModelConfig(compile=True, use_liger=True) would replace what the compiler fuses; use one of the two."
            )

    def _check_lora(self) -> None:
        if isinstance(self.lora, dict):  # the form of `to_dict`
            object.__setattr__(self, "lora", lora_from_dict(self.lora))
        if self.lora is True or not isinstance(self.lora, LoraConfig | bool | None):
            raise ValueError(f"ModelConfig(lora={self.lora!r}) is no LoraConfig; use peft.LoraConfig(r=16, ...).")
        if self.lora:
            require_exact_lora(self.lora)
        if self.lora and self.adapter is not None:
            raise ValueError(
                f"ModelConfig(adapter={self.adapter!r}) brings its own LoRA options; leave lora out, or adapter for a "
                "fresh adapter."
            )
        if self.has_adapter and self.compile:
            raise ValueError(
                "ModelConfig(compile=True) would compile decoder layers that hold the sharded units of an adapter; use "
                "compile=False."
            )
        if self.has_adapter and self.freeze:
            raise ValueError(
                f"ModelConfig(freeze={list(self.freeze)}) has no effect under LoRA, which freezes the whole base; "
                "choose what is trained with target_modules, exclude_modules and modules_to_save."
            )

    @property
    def lora_config(self) -> LoraConfig | None:
        """The options of a fresh adapter; ``None`` without one, also where it comes from a folder."""
        return cast("LoraConfig | None", self.lora or None)

    @property
    def has_adapter(self) -> bool:
        """Whether an adapter is trained instead of the weights."""
        return bool(self.lora) or self.adapter is not None

    @property
    def source(self) -> str:
        """What the model is built from, in words for messages."""
        if self.path is not None:
            return self.path
        if isinstance(self.from_config, dict):
            return f"a {self.from_config['model_type']} configuration"
        return str(self.from_config)

    @property
    def tokenizer_path(self) -> str:
        """Folder or hub name of the tokenizer.

        Raises:
            ValueError: The model comes from a dictionary and no ``tokenizer`` is named.
        """
        name = self.tokenizer or self.path or self.from_config
        if not isinstance(name, str):
            raise ValueError(
                "ModelConfig(tokenizer=None) with a dictionary as from_config has no tokenizer; name its folder, as "
                "in tokenizer='examples/tokenizer'."
            )
        return name

    def to_dict(self) -> dict[str, Any]:
        """Return the arguments that differ from their defaults, as plain data; those of LoRA likewise."""
        values = asdict(self)
        if self.lora_config is not None:
            values["lora"] = lora_to_dict(self.lora_config)
        return {item.name: values[item.name] for item in fields(self) if values[item.name] != item.default}

    def _require_folder(self) -> None:
        # transformers takes for a name on the hub whatever is no folder.
        name = self.path or str(self.from_config)
        if name.startswith(("/", "./", "../", "~")) and not Path(name).exists():
            raise ValueError(f"the model folder {name!r} does not exist (working directory {str(Path.cwd())!r}).")

    def load_hf_config(self) -> "PretrainedConfig":
        """Read the Hugging Face configuration; dropouts are set to 0 with a warning.

        A policy with dropout would give a token another log-probability in each pass, and the importance ratio of a
        first step would not be 1. Every call returns a new object: transformers keeps the attention implementation in
        it, so two models must not share one.
        """
        from transformers import AutoConfig

        if isinstance(self.from_config, dict):
            config = AutoConfig.for_model(**copy.deepcopy(self.from_config))
        else:
            self._require_folder()
            config = AutoConfig.from_pretrained(
                self.path or str(self.from_config), trust_remote_code=self.trust_remote_code, revision=self.revision
            )
        for part in {id(item): item for item in (config, config.get_text_config())}.values():
            # Families have dozens of names for it: attention_dropout, resid_pdrop, layerdrop, ...
            for name, value in list(vars(part).items()):
                if "drop" in name and isinstance(value, int | float) and not isinstance(value, bool) and value > 0:
                    rank_zero_warn(f"{name}={value} of {self.source} is set to 0: RL needs exact ratios.")
                    setattr(part, name, 0.0)
        if getattr(config, "output_router_logits", False):
            rank_zero_warn(
                f"output_router_logits=True of {self.source} asks for an auxiliary loss of the routers, which is not "
                "added: the loss that is chosen trains the model alone."
            )
        if self.head == "value":
            config.num_labels = 1
            config.classifier_dropout = 0.0
        return config
