"""What the policy says: sample responses of each validation, on the screen and in a file."""

import json
import os
from pathlib import Path
from typing import Any

from lightning.pytorch import Callback, LightningModule, Trainer
from rich.table import Table
from rich.text import Text
from typing_extensions import override

from lightning_rl_engines.callbacks.console import show
from lightning_rl_engines.modules.generation import GenerationModule
from lightning_rl_engines.strategies.engine import Engine

FILE_NAME = "samples.jsonl"


class SampleTable(Callback):
    """Prints ``pl_module.last_samples`` after each validation or test and appends them to a JSON-lines file.

    Args:
        rows: Samples on the screen; the file gets all that the module keeps.
        path: The file; by default ``samples.jsonl`` beside the logs.
        width: Characters of a prompt or response on the screen.

    Raises:
        ValueError: ``rows`` is negative or ``width`` below 8.
    """

    def __init__(self, *, rows: int = 4, path: str | None = None, width: int = 60) -> None:
        if rows < 0:
            raise ValueError(f"SampleTable(rows={rows}) must not be negative; use 0 to write the file only.")
        if width < 8:
            raise ValueError(f"SampleTable(width={width}) is too narrow; use 60.")
        self.rows = rows
        self.path = path
        self.width = width

    @override
    def on_validation_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        if not trainer.sanity_checking:
            self._report(trainer, pl_module)

    @override
    def on_test_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._report(trainer, pl_module)

    def _report(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Gather the samples of all data ranks and show them on rank 0. Collective over the world."""
        if not isinstance(pl_module, GenerationModule) or not isinstance(trainer.strategy, Engine):
            return
        samples = [row for rank in trainer.strategy.all_gather_objects(pl_module.last_samples, "data") for row in rank]
        directory = trainer.log_dir or trainer.default_root_dir
        if not samples or not trainer.is_global_zero:
            return
        path = Path(self.path or os.path.join(directory, FILE_NAME))
        path.parent.mkdir(parents=True, exist_ok=True)
        with path.open("a", encoding="utf-8") as file:
            for sample in samples:
                file.write(json.dumps({"update": pl_module.updates, **sample}, ensure_ascii=False) + "\n")
        if self.rows:
            show(trainer, render(samples[: self.rows], update=pl_module.updates, width=self.width))


def render(samples: list[dict[str, Any]], *, update: int, width: int) -> Table:
    """Lay out the table."""
    table = Table(title=f"Samples after update {update}", title_justify="left")
    for name in ("prompt", "response", "reward"):
        table.add_column(name, justify="right" if name == "reward" else "left")
    for sample in samples:
        reward = sample.get("reward")
        table.add_row(
            Text(_cut(sample["prompt"], width, keep_end=True)),
            Text(_cut(sample["response"], width)),
            Text("" if reward is None else f"{reward:.3f}"),
        )
    return table


def _cut(text: str, width: int, *, keep_end: bool = False) -> str:
    """Show white space and keep one line: the end of a prompt and the start of a response tell most."""
    line = text.replace("\n", "\\n")
    if len(line) <= width:
        return line
    return f"...{line[3 - width :]}" if keep_end else f"{line[: width - 3]}..."
