"""What the fused head keeps alive: bytes of tensors with a vocabulary dimension."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from lightning_rl_engines.heads import linear_log_prob
from tests.heads.reference import make_case, plain_head

TOKENS, WIDTH, VOCABULARY = 96, 3, 1000
TOKEN_TILE, VOCABULARY_TILE = 16, 100
TILE_BYTES = TOKEN_TILE * VOCABULARY_TILE * 8


class VocabularyBytes(TorchDispatchMode):
    """Peak of the live bytes of storages that hold tokens times (a tile of) the vocabulary; names of all operators."""

    def __init__(self) -> None:
        super().__init__()
        self.live: dict[int, tuple[StorageWeakRef, int]] = {}
        self.peak = 0
        self.operators: set[str] = set()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        self.operators.add(str(func))
        for tensor in tree_leaves(result):
            # Weight-shaped tensors are [rows, WIDTH]; WIDTH is below every tile size.
            if isinstance(tensor, Tensor) and max(tensor.shape, default=0) >= VOCABULARY_TILE and tensor.ndim == 2:
                if WIDTH in tensor.shape:
                    continue
                storage = tensor.untyped_storage()
                self.live[storage._cdata] = (StorageWeakRef(storage), storage.nbytes())
        self.live = {key: entry for key, entry in self.live.items() if not entry[0].expired()}
        self.peak = max(self.peak, sum(size for _, size in self.live.values()))
        return result


def measure(head: Callable[[], tuple[Tensor, Tensor]]) -> tuple[VocabularyBytes, int, int]:
    saved: list[int] = []
    shapes: list[int] = []

    def pack(tensor: Tensor) -> Tensor:
        if VOCABULARY in tensor.shape:
            (shapes if tensor.shape == (VOCABULARY, WIDTH) else saved).append(tensor.nbytes)
        return tensor

    with VocabularyBytes() as mode:
        with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
            log_probs, entropy = head()
        (log_probs.sum() + 0.1 * entropy.sum()).backward()
    return mode, sum(saved), len(shapes)


@pytest.mark.parametrize(("softcap", "tiles"), [(None, 2), (5.0, 3)])
def test_live_and_saved_bytes_are_bounded_by_tiles(softcap: float | None, tiles: int) -> None:
    case = make_case(TOKENS, VOCABULARY, width=WIDTH, temperature="tokens", softcap=softcap)

    def fused() -> tuple[Tensor, Tensor]:
        return linear_log_prob(
            case.hidden,
            case.weight,
            case.labels,
            calculate_entropy=True,
            token_tile=TOKEN_TILE,
            vocabulary_tile=VOCABULARY_TILE,
            **case.options,
        )

    mode, saved, weights = measure(fused)
    assert TILE_BYTES < mode.peak <= tiles * TILE_BYTES
    assert saved == 0
    assert weights == 1
    # Nothing waits for the device.
    assert not {name for name in mode.operators if "_local_scalar_dense" in name or "nonzero" in name}
    # The counter counts: the plain head holds whole logits.
    mode, saved, _ = measure(lambda: plain_head(case))
    assert mode.peak >= 3 * TOKENS * VOCABULARY * 8
    assert saved >= TOKENS * VOCABULARY * 8


def test_the_forward_pass_without_entropy_needs_one_tile() -> None:
    case = make_case(TOKENS, VOCABULARY, width=WIDTH, softcap=5.0)
    with torch.no_grad(), VocabularyBytes() as mode:
        linear_log_prob(
            case.hidden, case.weight, case.labels, token_tile=TOKEN_TILE, vocabulary_tile=VOCABULARY_TILE, softcap=5.0
        )
    assert mode.peak == TILE_BYTES
