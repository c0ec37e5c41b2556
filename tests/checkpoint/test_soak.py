"""Five hundred steps with saves in both ways and exports: memory, tensors, threads and files stay where they were."""

import gc
import threading
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch

from lightning_rl_engines import ModelConfig
from tests.strategies.reference import Documents, make_documents
from tests.strategies.steps import score_loss
from tests.support import run_workers
from tests.support.engine import EngineModule, with_engine
from tests.support.models import tiny_model_folder

STEPS, EVERY = 500, 20


def soak(folder: str, documents: Documents, path: str, **strategy: Any) -> list[dict[str, int]]:
    """On a rank, every twenty steps after a save and an export."""
    seen: list[dict[str, int]] = []

    def body(module: EngineModule) -> list[dict[str, int]]:
        engine: Any = module.engine
        process = psutil.Process()
        experience = documents.experience([1, 8])
        for step in range(1, STEPS + 1):
            engine.train_batch(module.policy, module.optimizers(), experience, score_loss, max_grad_norm=1.0)
            if step % 5 == 0:
                module.trainer.save_checkpoint(path)
            if step % EVERY == 0:
                assert sum(tensor.numel() for _, tensor in engine.get_per_tensor_param(module.policy)) > 0
                engine.finish_checkpoints()
                gc.collect()
                seen.append({
                    "step": step,
                    "rss": process.memory_info().rss,
                    "tensors": sum(1 for item in gc.get_objects() if issubclass(type(item), torch.Tensor)),
                    "files": process.num_fds(),
                    "threads": threading.active_count(),
                })  # fmt: skip
        return seen

    return with_engine(body, ModelConfig(path=folder), lr=1e-3, **strategy)


@pytest.mark.exhaustive
@pytest.mark.timeout(900)
@pytest.mark.parametrize("strategy", [{}, {"async_checkpoint": True}], ids=["sync", "async"])
def test_everything_is_flat_over_many_steps_with_saves_and_exports(tmp_path: Path, strategy: dict[str, Any]) -> None:
    folder = str(tiny_model_folder("llama_tied"))
    documents = make_documents(folder, vocabulary=64)
    for rank, seen in enumerate(
        run_workers(2, soak, folder, documents, str(tmp_path / "last.ckpt"), timeout=800, **strategy)
    ):
        assert [item["step"] for item in seen] == list(range(EVERY, STEPS + 1, EVERY))
        settled = [item for item in seen if item["step"] >= 100]
        print(rank, settled[0], settled[-1])
        for name, bound in (("tensors", 10), ("files", 2), ("threads", 1)):
            values = [item[name] for item in settled]
            assert max(values) - min(values) <= bound, (name, values)
        growth = settled[-1]["rss"] - settled[0]["rss"]
        assert growth < 8 * 2**20, f"{growth / 2**20:.1f} MiB"
    assert [item.name for item in tmp_path.iterdir()] == ["last.ckpt"]
