"""Random number generators of a rank: the process-wide ones of torch, Python and numpy, as plain data."""

import hashlib
import random
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch

RandomState = dict[str, Any]


def random_state() -> RandomState:
    """Return the state of torch's generators (host, and this rank's accelerator), of `random` and of `numpy.random`.

    Plain data and tensors, which load weights-only.
    """
    version, words, gauss = random.getstate()
    name, keys, position, has_gauss, cached = np.random.get_state(legacy=True)
    return {
        "torch": torch.get_rng_state(),
        "accelerator": _accelerator().get_rng_state() if torch.accelerator.is_available() else None,
        "python": [version, list(words), gauss],
        "numpy": [str(name), torch.from_numpy(np.asarray(keys).astype(np.int64)), position, has_gauss, cached],
    }


def set_random_state(state: RandomState) -> None:
    """Restore what :func:`random_state` returned; a state without an accelerator leaves that of this rank alone."""
    torch.set_rng_state(state["torch"])
    if state["accelerator"] is not None and torch.accelerator.is_available():
        _accelerator().set_rng_state(state["accelerator"])
    version, words, gauss = state["python"]
    random.setstate((version, tuple(words), gauss))
    name, keys, position, has_gauss, cached = state["numpy"]
    np.random.set_state((name, keys.numpy().astype(np.uint32), position, has_gauss, cached))


def restore_rank(saved: Sequence[Sequence[RandomState]], data_rank: int, sequence_rank: int) -> None:
    """Continue with the generators of a data rank, or with new ones where the checkpoint knows no such rank.

    Args:
        saved: States by data rank and sequence rank.
        data_rank: This rank's.
        sequence_rank: This rank's; one that is new continues as the first of its row, so that peers agree.
    """
    if data_rank < len(saved):
        row = saved[data_rank]
        set_random_state(row[sequence_rank] if sequence_rank < len(row) else row[0])
        return
    # The same for each resume of this checkpoint, and different for each rank and each checkpoint.
    text = hashlib.sha256(saved[0][0]["torch"].numpy().tobytes())
    text.update(str(data_rank).encode())
    seed = int.from_bytes(text.digest()[:8], "big")
    torch.manual_seed(seed % 2**63)
    random.seed(seed)
    np.random.seed(seed % 2**32)


def _accelerator() -> Any:
    accelerator = torch.accelerator.current_accelerator()
    assert accelerator is not None
    return torch.get_device_module(accelerator)
