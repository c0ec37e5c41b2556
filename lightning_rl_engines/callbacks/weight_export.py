"""Sends the weights of the policy, or of another model, to a sink every few updates."""

import os
import time
from collections.abc import Iterator
from dataclasses import replace
from typing import TYPE_CHECKING, Any, Literal, cast, get_args

from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.utilities import rank_zero_info
from lightning.pytorch.utilities.exceptions import MisconfigurationException
from torch import Tensor
from typing_extensions import override

from lightning_rl_engines.export.sinks import Communicator, ExportContext, WeightSink, drain, receiver_wants_base
from lightning_rl_engines.models.config import DTypeName
from lightning_rl_engines.models.huggingface import load_generation_config
from lightning_rl_engines.models.lora_config import adapter_config_dict
from lightning_rl_engines.models.token_model import TokenModel
from lightning_rl_engines.modules.tokenizer import load_tokenizer
from lightning_rl_engines.strategies.engine import Engine

if TYPE_CHECKING:
    from transformers import GenerationConfig, PreTrainedTokenizerBase

Weights = Literal["full", "merged", "adapter"]


class WeightExport(Callback):
    """Exports a model of the module after every ``every_n_updates`` updates, and at the end of training.

    Updates are those of the module (``pl_module.updates``), not optimizer steps. The module feeds its own rollout; this
    is for further receivers. The base model's tokenizer and generation configuration go along.

    Args:
        sink: Receives the weights; :class:`~lightning_rl_engines.HFFolderSink` writes a folder, with all ranks that see
            it. Other sinks work on rank 0.
        every_n_updates: Updates from one export to the next.
        weights: ``"full"``, or under LoRA ``"merged"`` (base plus adapter) or ``"adapter"`` (a PEFT folder). With
            ``"adapter"`` an inference server gets the base where it lacks it, else adapters alone; its client is a
            :class:`~lightning_rl_engines.export.LoRAInferenceClient`.
        dtype: Type to cast floating-point tensors to; ``None`` keeps the storage type, so fp32 masters are exported
            as fp32, and merged weights too.
        model: Attribute of the module that holds the model: ``"policy"``, ``"critic"`` or ``"reward_model"``. A model
            with a value head becomes a token-classification folder with one label, which ``ModelConfig(path=...,
            head="value")`` reads.
        at_end: Export also when training ends, unless the last update was exported already.

    Attributes:
        last_path: Where the last export went, on every rank; ``None`` before the first and for sinks without a place.
        last_update: The update that was exported last; ``None`` before the first.

    Raises:
        ValueError: An argument is out of range.
    """

    def __init__(
        self,
        *,
        sink: WeightSink,
        every_n_updates: int = 1,
        weights: Weights = "full",
        dtype: DTypeName | None = None,
        model: str = "policy",
        at_end: bool = True,
    ) -> None:
        if every_n_updates < 1:
            raise ValueError(f"every_n_updates={every_n_updates} must be at least 1.")
        if weights not in get_args(Weights):
            raise ValueError(f"weights={weights!r} is unknown; use one of {list(get_args(Weights))}.")
        if dtype is not None and dtype not in get_args(DTypeName):
            raise ValueError(f"dtype={dtype!r} is unknown; use one of {list(get_args(DTypeName))}, or None.")
        self.sink = sink
        self.every_n_updates = every_n_updates
        self.weights: Weights = weights
        self.dtype = dtype
        self.model = model
        self.at_end = at_end
        self.last_path: str | None = None
        self.last_update: int | None = None
        # Updates already seen: a batch that finished none, and a resumed run, must not export again.
        self._seen_updates = 0
        self._tokenizer: PreTrainedTokenizerBase | None = None
        self._generation_config: GenerationConfig | None = None

    @override
    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        if stage == "fit" and not isinstance(trainer.strategy, Engine):
            raise MisconfigurationException(
                f"WeightExport reads weights through an engine, and strategy is {type(trainer.strategy).__name__}; use "
                "Trainer(strategy='fsdp_ulysses') or Trainer(strategy='torchtitan')."
            )

    @override
    def on_fit_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        model = self._find(pl_module)
        if self.weights == "adapter" and not self.sink.takes_adapters:
            raise MisconfigurationException(
                f"WeightExport(weights='adapter') sends adapters, and the client of sink={type(self.sink).__name__} "
                "cannot load them; derive it from LoRAInferenceClient, or use weights='merged'."
            )
        self._refuse_source(model)
        # The engine refuses a mode that the model has not; the weights are read when the stream is walked, so not here.
        self._stream(trainer, model)
        # On all ranks and before training, so a broken file stops all of them together.
        self._tokenizer = load_tokenizer(model.model_config)
        self._generation_config = load_generation_config(model.model_config, model.config)

    def _refuse_source(self, model: TokenModel) -> None:
        """An export must not replace what the model was read from: a resumed run reads it again."""
        target = getattr(self.sink, "path", None)
        for source in (model.model_config.path, model.model_config.adapter):
            if target is not None and source is not None and os.path.realpath(target) == os.path.realpath(source):
                raise MisconfigurationException(
                    f"WeightExport would replace {source!r}, which the model is read from and a resumed run reads "
                    "again; export to another folder."
                )

    @override
    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._seen_updates = _updates(pl_module)

    @override
    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        updates = _updates(pl_module)
        if updates != self._seen_updates and updates % self.every_n_updates == 0:
            self.export(trainer, pl_module)
        self._seen_updates = updates

    @override
    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        if self.at_end and self.last_update != _updates(pl_module):
            self.export(trainer, pl_module)

    def export(self, trainer: Trainer, pl_module: LightningModule) -> str | None:
        """Export now; collective over the world.

        Args:
            trainer: A trainer whose strategy is an engine, while it is fitting.
            pl_module: The module whose model is exported.

        Returns:
            Where the export went, on every rank; ``None`` for sinks without a place.

        Raises:
            Exception: The sink's error, on every rank.
        """
        started = time.monotonic()
        engine, strategy = cast(Engine, trainer.strategy), cast(Communicator, trainer.strategy)
        model, updates = self._find(pl_module), _updates(pl_module)
        adapter = model.adapter if self.weights == "adapter" else None
        context = ExportContext(
            step=trainer.global_step,
            update=updates,
            config=model.config,
            generation_config=self._generation_config,
            tokenizer=self._tokenizer,
            adapter_config=None if adapter is None else adapter_config_dict(adapter.config),
        )
        # Before the base goes out: a server waits, paused, for what follows.
        stream, plan = self._stream(trainer, model), model.export_plan if adapter is None else adapter.plan
        if adapter is not None and receiver_wants_base(self.sink, strategy):
            base_context = replace(context, adapter_config=None)
            with engine.disable_adapter(model):
                base = engine.get_per_tensor_param(model, mode="full", dtype=self.dtype)
                drain(base, self.sink, strategy, plan=adapter.base_plan, context=base_context)
        self.last_path = drain(stream, self.sink, strategy, plan=plan, context=context)
        self.last_update = updates
        place = self.last_path or type(self.sink).__name__
        rank_zero_info(f"Exported the weights of update {updates} to {place} in {time.monotonic() - started:.1f} s.")
        return self.last_path

    def _find(self, pl_module: LightningModule) -> TokenModel:
        if not hasattr(pl_module, self.model):
            raise MisconfigurationException(
                f"WeightExport(model={self.model!r}) exports the attribute {self.model!r}, which "
                f"{type(pl_module).__name__} lacks; use PolicyModule, ActorCriticModule or SFTModule, or name the "
                "attribute that holds the model."
            )
        # Not an isinstance check: an FSDP root stands in for the model it wraps.
        return cast(TokenModel, getattr(pl_module, self.model))

    def _stream(self, trainer: Trainer, model: TokenModel) -> Iterator[tuple[str, Tensor]]:
        engine = cast(Engine, trainer.strategy)
        return engine.get_per_tensor_param(model, mode=cast(Any, self.weights), dtype=self.dtype)


def _updates(pl_module: LightningModule) -> int:
    return cast(int, pl_module.updates)
