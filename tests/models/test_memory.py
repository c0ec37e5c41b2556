"""No tensor of tokens times vocabulary lives or is saved in a whole pass of an engine's model."""

from typing import Any

import pytest
import torch
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from lightning_rl_engines import Experience, LossOutput, ModelConfig
from lightning_rl_engines.heads.linear_logprob import DEFAULT_TOKEN_TILE, DEFAULT_VOCABULARY_TILE
from tests.support import run_workers
from tests.support.engine import EngineModule, with_engine
from tests.support.models import random_documents, tiny_config, tiny_model

VOCABULARY, WIDTH = 9000, 16
LENGTHS = [150] * 18  # 2700 tokens: more than one tile of tokens and of the vocabulary
TILE_BYTES = DEFAULT_TOKEN_TILE * DEFAULT_VOCABULARY_TILE * 4
SIZES: dict[str, Any] = {
    "vocab_size": VOCABULARY,
    "hidden_size": WIDTH,
    "intermediate_size": 24,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
    "head_dim": 8,
}


class WideBytes(TorchDispatchMode):
    """Peak of live bytes, and the largest one, of tensors with a dimension of the vocabulary or of a tile of it.

    Weights and their gradients are ``[rows, WIDTH]`` or flat and do not count.
    """

    def __init__(self) -> None:
        super().__init__()
        self.live: dict[int, tuple[StorageWeakRef, int]] = {}
        self.peak = self.largest = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        for tensor in tree_leaves(result):
            tensor = tensor.to_local() if isinstance(tensor, DTensor) else tensor
            if isinstance(tensor, Tensor) and is_wide(tensor):
                storage = tensor.untyped_storage()
                self.live[storage._cdata] = (StorageWeakRef(storage), storage.nbytes())
                self.largest = max(self.largest, storage.nbytes())
        self.live = {key: entry for key, entry in self.live.items() if not entry[0].expired()}
        self.peak = max(self.peak, sum(size for _, size in self.live.values()))
        return result


def is_wide(tensor: Tensor) -> bool:
    """Many tokens by many words: not ids of one row, nor the weight or its transpose."""
    least = min(DEFAULT_VOCABULARY_TILE, VOCABULARY % DEFAULT_VOCABULARY_TILE)
    return tensor.ndim >= 2 and min(tensor.shape[-2:]) > WIDTH and tensor.shape[-1] >= least


class Measure:
    """Counts wide tensors that are alive, and those that are kept for the backward pass."""

    def __init__(self) -> None:
        self.mode, self.saved = WideBytes(), 0
        self.hooks = torch.autograd.graph.saved_tensors_hooks(self._pack, lambda tensor: tensor)

    def _pack(self, tensor: Tensor) -> Tensor:
        self.saved += tensor.nbytes if is_wide(tensor) else 0
        return tensor

    def __enter__(self) -> "Measure":
        self.mode.__enter__()
        self.hooks.__enter__()
        return self

    def __exit__(self, *exception: Any) -> None:
        self.hooks.__exit__(*exception)
        self.mode.__exit__(*exception)

    @property
    def numbers(self) -> dict[str, int]:
        return {"peak": self.mode.peak, "largest": self.mode.largest, "saved": self.saved}


def loss(outputs: Any, micro_batch: Any) -> LossOutput:
    total = (outputs.log_probs + 0.1 * outputs.entropy)[micro_batch["response_mask"]].sum()
    return LossOutput(total=total, denominator="tokens")


def measure_engine(config: ModelConfig, ids: list[Tensor], **strategy: Any) -> dict[str, int]:
    def body(module: EngineModule) -> dict[str, int]:
        masks = [torch.ones(len(item), dtype=torch.bool) for item in ids]
        experience = Experience.from_documents(input_ids=ids, response_mask=masks)
        with Measure() as found:
            module.engine.infer_batch(module.policy, experience, calculate_entropy=True)
            module.engine.forward_backward_batch(module.policy, experience, loss, calculate_entropy=True)
        assert all(parameter.grad is not None for parameter in module.policy.parameters() if parameter.numel())
        return found.numbers

    return with_engine(body, config, **strategy)


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize(("world", "checkpointing"), [(1, False), (1, True), (2, False)])
def test_a_pass_of_the_engine_holds_tiles_and_saves_none(world: int, checkpointing: bool, tied: bool) -> None:
    architecture = tiny_config("llama", **SIZES, tie_word_embeddings=tied).to_dict()
    config = ModelConfig(from_config=architecture, gradient_checkpointing=checkpointing)
    ids = random_documents(LENGTHS, vocabulary=VOCABULARY)
    for found in run_workers(world, measure_engine, config, ids):
        # A tile of logits and what is computed from it, whatever the number of tokens and of words.
        assert found["largest"] <= TILE_BYTES
        assert TILE_BYTES <= found["peak"] <= 2 * TILE_BYTES
        assert found["saved"] == 0


@pytest.mark.parametrize(
    ("world", "options"), [(1, {}), (2, {"tensor_parallel_degree": 2}), (2, {"context_parallel_degree": 2})]
)
def test_a_torchtitan_model_holds_tiles_of_its_shard_and_gathers_no_vocabulary(
    world: int, options: dict[str, Any]
) -> None:
    architecture = tiny_config("llama", **SIZES).to_dict()
    ids = random_documents(LENGTHS, vocabulary=VOCABULARY)
    config = ModelConfig(from_config=architecture)
    for found in run_workers(world, measure_engine, config, ids, engine="torchtitan", **options):
        assert 0 < found["largest"] <= TILE_BYTES
        assert found["peak"] <= 2 * TILE_BYTES
        assert found["saved"] == 0


def test_the_counter_sees_whole_logits_of_the_plain_model() -> None:
    model = tiny_model("llama", **SIZES)
    ids = random_documents([sum(LENGTHS)], vocabulary=VOCABULARY)[0]
    with Measure() as found:
        model(input_ids=ids[None, :2700].view(18, 150), use_cache=False).logits.log_softmax(-1)[..., 0].sum().backward()
    whole = 2700 * VOCABULARY * 4
    assert found.numbers["largest"] >= whole > 2 * TILE_BYTES
    assert found.numbers["saved"] >= whole
    assert found.numbers["peak"] >= 2 * whole
