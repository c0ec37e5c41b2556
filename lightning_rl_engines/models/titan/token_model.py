"""A torchtitan decoder, whole or the stages of a pipeline that a rank holds, as a token model."""

from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any, cast

from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from typing_extensions import override

from lightning_rl_engines.algorithms.outputs import TokenOutputs
from lightning_rl_engines.models.cost import document_cost
from lightning_rl_engines.models.titan.attention import RowMask, row_mask
from lightning_rl_engines.models.titan.lora import TitanAdapter, adapters_disabled
from lightning_rl_engines.models.titan.names import HFNames, checkpoint_name
from lightning_rl_engines.models.token_model import TokenModel, inverse_temperature, scatter_predicted

if TYPE_CHECKING:
    from transformers import PretrainedConfig

    from lightning_rl_engines.export.plan import ExportPlan
    from lightning_rl_engines.models.config import ModelConfig
    from lightning_rl_engines.models.lora import Adapter
    from lightning_rl_engines.sequence.packing import MicroBatch


@dataclass(frozen=True)
class AttentionOptions:
    """How masks of rows are made.

    Attributes:
        kernel: A key of ``sequence.attention.KERNELS``.
        context_parallel: Whether rows are split over ranks.
        window: Sliding window of the layers that have one, where torchtitan takes two kinds of masks; else ``None``.
    """

    kernel: str
    context_parallel: bool
    window: int | None = None


class TitanTokenModel(TokenModel):
    """A torchtitan model whose head is the fused log-probability or a value per token.

    Args:
        parts: The model, or with pipeline parallelism this rank's stages, in their order.
        stages: Numbers of the stages that the parts are.
        model_config: What it was built from.
        config: The Hugging Face configuration.
        export_plan: What a Hugging Face save of the whole model holds; sources are torchtitan's names.
        names: Where each tensor of a save lies.
        attention: How masks of rows are made.
        adapter: What the parts were given to train, if anything.
    """

    def __init__(
        self,
        parts: Sequence[nn.Module],
        *,
        stages: Sequence[int] = (0,),
        model_config: "ModelConfig",
        config: "PretrainedConfig",
        export_plan: "ExportPlan",
        names: HFNames,
        attention: AttentionOptions,
        adapter: TitanAdapter | None = None,
    ) -> None:
        super().__init__()
        self.parts = nn.ModuleList(parts)
        self._at_rest = tuple(self.parts.parameters())
        self.stages = tuple(stages)
        self._ran: set[int] = set()
        self.model_config = model_config
        self.config = config
        self.export_plan = export_plan
        self.names = names
        self.attention = attention
        self.titan_adapter = adapter

    @property
    @override
    def adapter(self) -> "Adapter | None":
        return None if self.titan_adapter is None else self.titan_adapter.adapter

    @override
    def disable_adapter(self) -> AbstractContextManager[None]:
        return super().disable_adapter() if self.titan_adapter is None else adapters_disabled(self)

    @property
    @override
    def document_cost(self) -> tuple[float, float]:
        return document_cost(self.config, self.export_plan)

    @override
    def checkpoint_names(self) -> Mapping[str, str]:
        names: dict[str, str] = {}
        first: dict[int, str] = {}
        adapter = self.adapter
        for index, part in enumerate(self.parts):
            for fqn, tensor in part.state_dict(keep_vars=True).items():
                if adapter is not None and fqn in adapter.peft_names:
                    name = f"hf.{adapter.peft_name(fqn)}"
                else:
                    name = checkpoint_name(self.names, fqn, tuple(tensor.shape))
                names[f"parts.{index}.{fqn}"] = first.setdefault(id(tensor), name)
        return names

    @property
    @override
    def longest_document(self) -> int:
        return int(self.config.max_position_embeddings)

    def held_tensors(self) -> dict[str, Tensor]:
        """Parameters and persistent buffers that this rank holds parts of, by torchtitan's names."""
        return {name: tensor for part in self.parts for name, tensor in part.state_dict(keep_vars=True).items()}

    def stage_inputs(self, micro_batch: "MicroBatch") -> dict[str, Any]:
        """Arguments of a row that every layer reads: positions and masks."""
        options = self.attention

        def mask(window: int | None) -> RowMask:
            return row_mask(
                micro_batch, kernel=options.kernel, context_parallel=options.context_parallel, window=window
            )

        masks: RowMask | Mapping[str, RowMask] = mask(None)
        if options.window is not None:
            masks = {"basic_mask": mask(None), "sliding_window_mask": mask(options.window)}
        return {"positions": micro_batch.position_ids[None], "attention_masks": masks}

    def score(
        self,
        head: nn.Module,
        hidden: Tensor,
        micro_batch: "MicroBatch",
        *,
        calculate_entropy: bool,
        temperature: float | str,
    ) -> TokenOutputs:
        """Run the head on the last hidden states of a row.

        Args:
            head: The head's module, a child of the last stage.
            hidden: ``[1, local tokens, D]``.
            micro_batch: The row.
            calculate_entropy: Also return entropies.
            temperature: What logits are divided by.
        """
        if self.model_config.head == "value":
            return TokenOutputs(values=scatter_predicted(head(hidden, predicted=micro_batch.predicted), micro_batch))
        log_probs, entropy = head(
            hidden,
            predicted=micro_batch.predicted,
            labels=micro_batch.labels.index_select(0, micro_batch.predicted),
            inv_temperature=inverse_temperature(micro_batch, temperature),
            calculate_entropy=calculate_entropy,
        )
        return TokenOutputs(
            scatter_predicted(log_probs, micro_batch),
            None if entropy is None else scatter_predicted(entropy, micro_batch),
        )

    def run_stage(
        self,
        stage: int,
        entering: Tensor,
        micro_batch: "MicroBatch",
        *,
        calculate_entropy: bool = False,
        temperature: float | str = 1.0,
    ) -> Tensor | TokenOutputs:
        """Run a stage on a row, and after the last one the head.

        Args:
            stage: Number of a stage that this rank holds.
            entering: Token ids ``[1, local tokens]`` for the first stage, hidden states of the stage before for others.
            micro_batch: The row.
            calculate_entropy: Also return entropies.
            temperature: What logits are divided by.

        Returns:
            Hidden states, or what :meth:`forward` returns.
        """
        model = self.parts[self.stages.index(stage)]
        self._ran.add(stage)
        hidden: Tensor = model(entering, **self.stage_inputs(micro_batch))
        head = cast(Any, model).lm_head
        if head is None:
            return hidden
        return self.score(head, hidden, micro_batch, calculate_entropy=calculate_entropy, temperature=temperature)

    def come_to_rest(self) -> None:
        """Free gathered parameters after a pass, also one that broke off; gradients that are reduced stay.

        FSDP2 keeps the unit of the head whole, since the head runs after the rest of the model: a step would not reach
        the copy that the next pass uses, and ``parameters()`` would name it.
        """
        if not self._ran:
            return
        # torch 2.15 also clears the gradients; while a unit is whole, parameters() does not name all that have one.
        gradients = [(parameter, parameter.grad) for parameter in self._at_rest]
        for stage, part in zip(self.stages, self.parts, strict=True):
            if stage in self._ran and isinstance(part, FSDPModule):
                part.reset_iter_state()
        for parameter, gradient in gradients:
            parameter.grad = gradient
        self._at_rest = tuple(self.parts.parameters())
        self._ran.clear()

    @override
    def forward(
        self, micro_batch: "MicroBatch", *, calculate_entropy: bool = False, temperature: float | str = 1.0
    ) -> TokenOutputs:
        if len(self.parts) > 1 or cast(Any, self.parts[0]).lm_head is None:
            raise RuntimeError("a pipeline of stages runs in the strategy's passes only, such as infer_batch")
        outputs = self.run_stage(
            self.stages[0],
            micro_batch.input_ids[None],
            micro_batch,
            calculate_entropy=calculate_entropy,
            temperature=temperature,
        )
        head = cast(Any, self.parts[0]).lm_head
        for item in outputs:
            if isinstance(item, Tensor) and item.requires_grad and isinstance(head, FSDPModule):
                item.register_hook(partial(_gather_before_backward, head))
        return cast(TokenOutputs, outputs)


def _gather_before_backward(head: FSDPModule, gradient: Tensor) -> None:
    # FSDP2 does so by itself only for units that ran as a whole, and this one holds the norm before the head. Other
    # passes may have come between the two.
    head.unshard()
