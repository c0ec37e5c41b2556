"""Printing beside a progress bar, and paths as a reader wants them."""

import os

from lightning.pytorch import Trainer
from rich.console import Console, RenderableType
from tqdm import tqdm


def show(trainer: Trainer, item: RenderableType) -> None:
    """Print on rank 0, above the progress bar where there is one; no communication."""
    if not trainer.is_global_zero:
        return
    console = Console(highlight=False)
    with console.capture() as captured:
        console.print(item)
    # Not the bar's own print: it drops the text once the bar is closed, which it is when a run ends.
    tqdm.write(captured.get().rstrip("\n"))


def readable(path: str | os.PathLike[str]) -> str:
    """Return a path relative to the working directory if it is below it, and as it is otherwise."""
    relative = os.path.relpath(path)
    return os.fspath(path) if relative.startswith(os.pardir) else relative
