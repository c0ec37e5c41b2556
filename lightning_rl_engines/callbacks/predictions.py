"""Predictions as a JSON-lines file, in the order of the data."""

import json
from pathlib import Path
from typing import Any

from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.utilities import rank_zero_info
from lightning.pytorch.utilities.exceptions import MisconfigurationException
from typing_extensions import override

from lightning_rl_engines.strategies.engine import Engine


class PredictionFile(Callback):
    """Collects what ``predict_step`` returns (a list of dictionaries with an ``index``) and writes it on rank 0.

    One line for each prompt, ordered by data loader and ``index``: prompt, response, token ids and log-probabilities.

    Args:
        path: The file; by default ``predictions.jsonl`` in the Trainer's ``default_root_dir``.
    """

    def __init__(self, *, path: str | None = None) -> None:
        self.path = path
        self._lines: list[tuple[int, int, dict[str, Any]]] = []

    @override
    def on_predict_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        if not isinstance(trainer.strategy, Engine):
            raise MisconfigurationException(
                f"PredictionFile gathers over the data ranks of an engine, and strategy is "
                f"{type(trainer.strategy).__name__}; use Trainer(strategy='fsdp_ulysses')."
            )
        self._lines = []

    @override
    def on_predict_batch_end(
        self,
        trainer: Trainer,
        pl_module: LightningModule,
        outputs: Any,
        batch: Any,
        batch_idx: int,
        dataloader_idx: int = 0,
    ) -> None:
        self._lines += [(dataloader_idx, item["index"], item) for item in outputs]

    @override
    def on_predict_epoch_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        strategy = trainer.strategy
        assert isinstance(strategy, Engine)
        gathered = [line for lines in strategy.all_gather_objects(self._lines, "data") for line in lines]
        self._lines = []
        if not trainer.is_global_zero:
            return
        path = Path(self.path or Path(trainer.default_root_dir, "predictions.jsonl"))
        path.parent.mkdir(parents=True, exist_ok=True)
        with path.open("w", encoding="utf-8") as file:
            for _, _, item in sorted(gathered, key=lambda line: line[:2]):
                file.write(json.dumps(item, ensure_ascii=False) + "\n")
        rank_zero_info(f"Wrote {len(gathered)} predictions to {path}.")
