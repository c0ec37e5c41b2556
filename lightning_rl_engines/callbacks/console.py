"""Printing beside a progress bar, and paths as a reader wants them."""

import os

from lightning.pytorch import Trainer
from lightning.pytorch.callbacks import TQDMProgressBar
from rich.console import Console, RenderableType


def show(trainer: Trainer, item: RenderableType) -> None:
    """Print on rank 0, above the progress bar where there is one; no communication."""
    if not trainer.is_global_zero:
        return
    console = Console(highlight=False)
    bar = trainer.progress_bar_callback
    if not isinstance(bar, TQDMProgressBar) or not bar.is_enabled:
        console.print(item)
        return
    with console.capture() as captured:
        console.print(item)
    bar.print(captured.get().rstrip("\n"))


def readable(path: str | os.PathLike[str]) -> str:
    """Return a path relative to the working directory if it is below it, and as it is otherwise."""
    relative = os.path.relpath(path)
    return os.fspath(path) if relative.startswith(os.pardir) else relative
