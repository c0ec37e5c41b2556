"""Two hundred steps: memory and live tensors stay where they were after the first twenty."""

import pytest
from peft import LoraConfig

from lightning_rl_engines import ModelConfig
from tests.strategies.checks import require_flat_memory, soak_steps
from tests.strategies.reference import Documents, make_documents
from tests.strategies.steps import score_loss
from tests.support import run_workers
from tests.support.engine import EngineModule, with_engine
from tests.support.lora import lora
from tests.support.models import tiny_model_folder

STEPS = 200


def soak(config: ModelConfig, documents: Documents) -> list[tuple[int, int, int]]:
    def body(module: EngineModule) -> list[tuple[int, int, int]]:
        return soak_steps(module, module.optimizers(), documents.experience([1, 8]), score_loss, STEPS)

    return with_engine(body, config, lr=1e-3)


@pytest.mark.parametrize("world", [1, 2])
@pytest.mark.parametrize("adapter", [None, lora(target_modules=["q_proj"])], ids=["full", "lora"])
def test_memory_is_flat_over_many_steps_with_exports(world: int, adapter: LoraConfig | None) -> None:
    folder = str(tiny_model_folder("llama_tied"))
    documents = make_documents(folder, vocabulary=64)
    config = ModelConfig(path=folder, lora=adapter)
    for seen in run_workers(world, soak, config, documents, timeout=280):
        require_flat_memory(seen, STEPS)
