"""Lightning's own throughput callback around an update of ours."""

import warnings
from pathlib import Path
from typing import Any

from lightning.pytorch.callbacks import ThroughputMonitor
from lightning.pytorch.loggers import CSVLogger

from tests.modules.cases import experience_loader, fit, recorded, spy_module


def run_with_monitor(folder: str) -> tuple[list[str], str, list[float]]:
    """Batches of different sizes; the warnings, the log, and our own tokens per second."""
    monitor = ThroughputMonitor(batch_size_fn=len, length_fn=lambda batch: batch.num_tokens, window_size=3)
    logger: Any = CSVLogger(folder)
    batches = [recorded(range(size)) for size in (8, 4, 6, 2, 8)]
    module = spy_module()
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        fit(
            module,
            train=lambda: experience_loader(*batches),
            use_distributed_sampler=False,
            callbacks=[monitor],
            logger=logger,
            log_every_n_steps=1,
        )
    logger.finalize("success")
    texts = [str(item.message) for item in caught if "throughput" in str(item.message).lower()]
    log = next(Path(folder).rglob("metrics.csv")).read_text()
    return texts, log, module.history["train/tokens_per_second"].tolist()
