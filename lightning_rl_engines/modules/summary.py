"""Lightning's table of a module's parts, with the sizes of whole models instead of a rank's shards."""

from collections.abc import Iterable, Iterator
from typing import Any

from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.callbacks import ModelSummary, RichModelSummary
from lightning.pytorch.utilities.model_summary import get_human_readable_count
from torch import nn
from torch.distributed.fsdp import FullyShardedDataParallel
from typing_extensions import override

from lightning_rl_engines import _compat
from lightning_rl_engines.models.sizes import whole_sizes
from lightning_rl_engines.models.token_model import TokenModel


class ShardedModelSummary(ModelSummary):
    """Lightning's model summary for models that an engine has sharded.

    Parameters are counted as if nothing were sharded, tied ones once; what this rank holds of them is a column of its
    own. Trainable ones are those of an adapter where a model has one. The size is that of the stored types.

    Args:
        max_depth: How many levels of modules are shown, without FSDP's own; -1 for all, 0 for no table.
        **summarize_kwargs: Options of the table.
    """

    def __init__(self, max_depth: int = 1, **summarize_kwargs: Any) -> None:
        super().__init__(max_depth, **summarize_kwargs)
        self.max_depth = max_depth
        self.table_options = summarize_kwargs

    @override
    def on_fit_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        if not any(isinstance(module, TokenModel) for module in pl_module.modules()):
            super().on_fit_start(trainer, pl_module)
            return
        if not self.max_depth or not trainer.is_global_zero:
            return
        sizes, parameters = whole_sizes(pl_module), list(pl_module.parameters())
        parts = list(_parts(pl_module, self.max_depth))
        modes = [module.training for module in list(pl_module.modules())[1:]]
        rows = [(name, module, list(module.parameters())) for name, module in parts]
        self.summarize(
            [
                (" ", [str(index) for index in range(len(rows))]),
                ("Name", [name for name, _, _ in rows]),
                ("Type", [type(module).__name__ for _, module, _ in rows]),
                ("Params", [get_human_readable_count(_total(own, sizes)) for _, _, own in rows]),
                ("Params per Device", [get_human_readable_count(sum(p.numel() for p in own)) for _, _, own in rows]),
                ("Mode", ["train" if module.training else "eval" for _, module, _ in rows]),
                ("FLOPs", [get_human_readable_count(0)] * len(rows)),
            ],
            total_parameters=_total(parameters, sizes),
            trainable_parameters=_total((p for p in parameters if p.requires_grad), sizes),
            model_size=sum(sizes[id(p)] * p.element_size() for p in parameters) / 1e6,
            total_training_modes={"train": modes.count(True), "eval": modes.count(False)},
            total_flops=0,
            **self.table_options,
        )


class RichShardedModelSummary(ShardedModelSummary, RichModelSummary):
    """The same in the colours of :class:`~lightning.pytorch.callbacks.RichModelSummary`."""

    summarize = staticmethod(RichModelSummary.summarize)


def sharded_summaries(callbacks: Iterable[Any]) -> list[ModelSummary]:
    """Return, for each of Lightning's own model summaries among the callbacks, one that takes its place."""
    kinds = {ModelSummary: ShardedModelSummary, RichModelSummary: RichShardedModelSummary}
    found = [item for item in callbacks if type(item) in kinds]
    return [
        kinds[type(item)](depth, **options) for item in found for depth, options in [_compat.depth_and_options(item)]
    ]


def _total(parameters: Iterable[nn.Parameter], sizes: dict[int, int]) -> int:
    return sum(sizes[id(parameter)] for parameter in parameters)


def _parts(module: nn.Module, depth: int, prefix: str = "") -> Iterator[tuple[str, nn.Module]]:
    """Yield modules below one in order, with their names, down to a depth; wrappers of FSDP are looked through."""
    for name, child in module.named_children():
        inner = child.module if isinstance(child, FullyShardedDataParallel) else child
        yield f"{prefix}{name}", inner
        if depth != 1:
            yield from _parts(inner, depth - 1, f"{prefix}{name}.")
