"""Where a checkpoint stands within an epoch."""

import copy
from typing import Any


def reopen_cut_epoch(checkpoint: dict[str, Any]) -> None:
    """Let a checkpoint stand inside its epoch if training stopped there, in place.

    Lightning counts an epoch as done also when ``max_steps``, a time limit or an early stop cuts it; a run that goes on
    from there would never see the rest. A loader that keeps no position is left to Lightning.

    Args:
        checkpoint: What Lightning hands to ``on_save_checkpoint``.
    """
    loop = checkpoint.get("loops", {}).get("fit_loop", {})
    positions = loop.get("state_dict", {}).get("combined_loader", [])
    if not positions or not all(isinstance(item, dict) and "trainer_epoch" in item for item in positions):
        return
    progress = copy.deepcopy(loop["epoch_progress"])
    current, total = progress["current"], progress["total"]
    if current["processed"] < current["ready"] or loop["epoch_loop.batch_progress"]["is_last_batch"]:
        return
    for name in ("processed", "completed"):
        surplus = max(0, current[name] - (current["ready"] - 1))
        current[name] -= surplus
        total[name] -= surplus
    checkpoint["loops"] = {**checkpoint["loops"], "fit_loop": {**loop, "epoch_progress": progress}}
    checkpoint["epoch"] = current["processed"]
