"""Under tensor parallelism no rank ever holds the vocabulary, neither logits nor the rows of a weight."""

from pathlib import Path
from typing import Any

import pytest
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from lightning_rl_engines import ModelConfig, PolicyLoss
from tests.strategies.layouts import titan
from tests.strategies.reference import Documents, make_documents
from tests.support import run_workers
from tests.support.engine import EngineModule, share, with_engine
from tests.support.models import tiny_model

VOCABULARY, WIDTH = 4096, 64


class Largest(TorchDispatchMode):
    """Looks at what operators return on this rank: the most elements, and whether a side is the whole vocabulary."""

    def __init__(self) -> None:
        super().__init__()
        self.elements, self.whole = 0, 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if any(issubclass(kind, DTensor) for kind in types):
            return NotImplemented  # its operators on the local tensors come by next
        result = func(*args, **(kwargs or {}))
        for tensor in tree_leaves(result):
            if isinstance(tensor, Tensor) and not tensor.is_meta:
                self.elements = max(self.elements, tensor.numel())
                self.whole += VOCABULARY in tensor.shape
        return result


def measure(folder: str, documents: Documents, layout: dict[str, Any]) -> tuple[int, int]:
    def body(module: EngineModule) -> tuple[int, int]:
        engine = module.engine
        experience = documents.experience(
            share(range(documents.size), engine.data_parallel_rank, engine.data_parallel_size)
        )
        with engine.eval_mode(module.policy), Largest() as seen:
            engine.infer_batch(module.policy, experience, calculate_entropy=True)
        with engine.train_mode(module.policy), seen:
            engine.forward_backward_batch(
                module.policy, experience, PolicyLoss(entropy_coef=0.01), calculate_entropy=True
            )
        return seen.elements, seen.whole

    return with_engine(body, ModelConfig(path=folder), **layout)


@pytest.mark.parametrize(
    ("layout", "model"),
    [("tp2", "llama"), ("tp2", "llama_tied"), pytest.param("cp2-tp2", "llama", marks=pytest.mark.exhaustive)],
)
def test_no_rank_holds_the_vocabulary(tmp_path: Path, layout: str, model: str) -> None:
    tiny_model(model, vocab_size=VOCABULARY, hidden_size=WIDTH).save_pretrained(tmp_path)
    documents = make_documents(str(tmp_path), vocabulary=VOCABULARY)
    world, options = titan(layout)
    for elements, whole in run_workers(world, measure, str(tmp_path), documents, options):
        assert elements <= VOCABULARY // 2 * max(WIDTH, sum(map(len, documents.input_ids)))
        assert whole == 0
    # The counter counts: without tensor parallelism a weight is gathered.
    for elements, whole in run_workers(2, measure, str(tmp_path), documents, titan("dp2")[1]):
        assert elements >= VOCABULARY * WIDTH
        assert whole > 0
