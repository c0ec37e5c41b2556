"""A card at the start of a run: layout, sizes, where things are written, what it resumes from."""

from collections.abc import Mapping
from typing import Any

from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.callbacks import ModelCheckpoint
from rich.panel import Panel
from rich.table import Table
from rich.text import Text
from typing_extensions import override

from lightning_rl_engines.callbacks.console import readable, show
from lightning_rl_engines.callbacks.weight_export import WeightExport
from lightning_rl_engines.data.prompts import PromptDataModule
from lightning_rl_engines.export.folder import HFFolderSink
from lightning_rl_engines.models.sizes import whole_sizes
from lightning_rl_engines.modules.base import RLModule
from lightning_rl_engines.modules.generation import GenerationModule
from lightning_rl_engines.strategies.engine import Engine

Row = tuple[str, str]


class StartCard(Callback):
    """Prints the card once, on rank 0, before the first validation or training batch of `fit`.

    A resumed run also lists the module's arguments that differ from those in the checkpoint.
    """

    def __init__(self) -> None:
        self._shown = False
        self._changes: list[str] = []

    @override
    def on_load_checkpoint(self, trainer: Trainer, pl_module: LightningModule, checkpoint: dict[str, Any]) -> None:
        self._changes = hyper_parameter_changes(checkpoint.get("hyper_parameters", {}), dict(pl_module.hparams))

    @override
    def on_sanity_check_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._show(trainer, pl_module)

    @override
    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._show(trainer, pl_module)

    @override
    def on_fit_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._shown = False

    def _show(self, trainer: Trainer, pl_module: LightningModule) -> None:
        if self._shown:
            return
        self._shown = True
        rows = [*layout_rows(trainer), *work_rows(trainer, pl_module), *place_rows(trainer)]
        if trainer.ckpt_path is not None:
            rows.append(("resumes from", f"{trainer.ckpt_path} (optimizer step {trainer.global_step})"))
            rows += [("changed" if index == 0 else "", line) for index, line in enumerate(self._changes)]
        show(trainer, Panel(render(rows), title="lightning-rl", expand=False))


def render(rows: list[Row]) -> Table:
    """Lay out names and values in two columns."""
    table = Table.grid(padding=(0, 2))
    for name, value in rows:
        table.add_row(Text(name, style="bold"), Text(value, overflow="fold"))
    return table


def layout_rows(trainer: Trainer) -> list[Row]:
    """Engine, ranks and precision."""
    strategy = trainer.strategy
    name = type(strategy).__name__
    device = strategy.root_device.type
    if isinstance(strategy, Engine):
        name += f", {strategy.layout}"
    return [("engine", f"{name}, {device}, precision {trainer.precision}")]


def work_rows(trainer: Trainer, pl_module: LightningModule) -> list[Row]:
    """What is trained, and how much of it makes an update. Reads the module and the data; no communication."""
    rows: list[Row] = [("module", type(pl_module).__name__)]
    if not isinstance(pl_module, RLModule):
        return rows
    if isinstance(pl_module, GenerationModule):
        sizes = whole_sizes(pl_module.policy)
        text = f"{rows[0][1]}: {pl_module.policy_config.source}, {sum(sizes.values()):,} parameters"
        trained = sum(sizes[id(item)] for item in pl_module.policy.parameters() if item.requires_grad)
        rows[0] = ("module", text if trained == sum(sizes.values()) else f"{text}, {trained:,} of them trained")
    documents = documents_per_update(trainer, pl_module)
    if documents:
        rows.append(("documents per update", documents))
    budget = pl_module.max_tokens_per_micro_batch
    rows.append(("tokens per row", "all documents of a data rank" if budget is None else f"at most {budget:,}"))
    steps = pl_module.optimizer_steps_per_batch
    rows.append(("optimizer steps per update", str(steps)))
    rows.append(("length", run_length(trainer.max_steps, trainer.max_epochs, steps)))
    return rows


def documents_per_update(trainer: Trainer, pl_module: RLModule) -> str:
    """Prompts x responses of one update over all data ranks, or an empty string if the data does not say."""
    data, strategy = trainer.datamodule, trainer.strategy  # type: ignore[attr-defined]
    if not isinstance(data, PromptDataModule) or not isinstance(strategy, Engine):
        return ""
    prompts = data.batch_size * strategy.data_parallel_size
    if not isinstance(pl_module, GenerationModule) or pl_module.rollout is None:
        return str(prompts)
    responses = pl_module.rollout.num_generations
    return f"{prompts * responses:,} ({prompts:,} prompts x {responses} responses)"


def run_length(max_steps: int, max_epochs: int | None, steps_per_update: int) -> str:
    """Say when the run ends, in updates where that is known."""
    parts = []
    if max_steps != -1:
        parts.append(f"{-(-max_steps // steps_per_update):,} updates ({max_steps:,} optimizer steps)")
    if max_epochs not in (None, -1):
        parts.append(f"{max_epochs:,} passes over the prompts")
    return ", or ".join(parts) if parts else "until it is stopped"


def place_rows(trainer: Trainer) -> list[Row]:
    """Where the run writes. Collective over the world: ``log_dir`` is broadcast."""
    rows: list[Row] = []
    for callback in trainer.checkpoint_callbacks:
        if isinstance(callback, ModelCheckpoint) and callback.dirpath:
            rows.append(("checkpoints", readable(str(callback.dirpath))))
    log_dir = trainer.log_dir
    if log_dir is not None and trainer.loggers:
        rows.append(("logs", readable(log_dir)))
    for item in trainer.callbacks:  # type: ignore[attr-defined]
        if isinstance(item, WeightExport):
            rows.append(("export", item.sink.path if isinstance(item.sink, HFFolderSink) else type(item.sink).__name__))
    return rows


def hyper_parameter_changes(saved: Mapping[str, Any], current: Mapping[str, Any]) -> list[str]:
    """List the arguments that differ, one line each; an argument that only one side has is a difference."""
    before, now = _flatten(saved), _flatten(current)
    lines = []
    for name in sorted({*before, *now}):
        if name.startswith("_") or before.get(name) == now.get(name):
            continue
        line = f"{name}: {before.get(name)!r} in the checkpoint, now {now.get(name)!r}"
        if name.split(".")[0].endswith("optimizer"):
            line += " (the restored optimizer keeps the former"
            line += "; --learning_rate_on_resume config takes the new one)" if name.endswith(".lr") else ")"
        lines.append(line)
    return lines


def _flatten(values: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    flat: dict[str, Any] = {}
    for key, value in values.items():
        if isinstance(value, Mapping) and value:
            flat |= _flatten(value, f"{prefix}{key}.")
        else:
            flat[f"{prefix}{key}"] = value
    return flat
