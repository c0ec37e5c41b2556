"""Lightning's loops without gradients leave models as they can be trained, by its defaults."""

from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor
from torch.utils.data import DataLoader
from typing_extensions import override

from lightning_rl_engines import ModelConfig
from tests.strategies.reference import Documents, make_documents
from tests.strategies.steps import assert_same, copies, mine, score_loss
from tests.support import run_workers
from tests.support.engine import EngineModule, sharing_strategy
from tests.support.lightning_env import make_trainer
from tests.support.models import tiny_model_folder


class Watcher(EngineModule):
    """Notes in which modes each kind of evaluation runs, and keeps the weights of the end of training."""

    def __init__(self, folder: str, documents: Documents) -> None:
        super().__init__({"policy": ModelConfig(path=folder)}, self.train_once, 0.1)
        self.documents = documents
        self.modes: dict[str, tuple[bool, bool]] = {}
        self.weights: dict[str, Tensor] = {}

    @staticmethod
    def train_once(module: Any) -> None:
        module.engine.train_batch(module.policy, module.optimizers(), mine(module.engine, module.documents), score_loss)

    def look(self, batch: Any, batch_idx: int) -> None:
        self.engine.infer_batch(self.policy, mine(self.engine, self.documents))
        stage = self.trainer.state.stage
        assert stage is not None
        self.modes[stage.value] = torch.is_grad_enabled(), torch.is_inference_mode_enabled()

    validation_step = test_step = predict_step = look

    @override
    def on_train_end(self) -> None:
        self.weights = copies(self.engine.get_per_tensor_param(self.policy))


def fit(folder: str, documents: Documents, split: str, evaluate: bool) -> tuple[dict[str, Any], dict[str, Tensor]]:
    """On a rank: modes, and weights after training with evaluation before, within and after it."""
    module, data = Watcher(folder, documents), DataLoader(range(4))
    trainer = make_trainer(sharing_strategy(1, split), max_epochs=2, limit_val_batches=1)
    # Over gloo Lightning never enters inference mode; as if it were another backend.
    with mock.patch("lightning.pytorch.loops.utilities._distributed_is_initialized", return_value=False):
        if evaluate:
            trainer.validate(module, data, verbose=False)
        trainer.fit(module, data, data if evaluate else None)
        if evaluate:
            trainer.test(module, data, verbose=False)
            trainer.predict(module, data)
    return module.modes, module.weights


@pytest.mark.parametrize("split", ["sp", "tp"])
def test_evaluation_is_without_gradients_outside_of_inference_mode_and_changes_nothing(split: str) -> None:
    folder = str(tiny_model_folder("llama"))
    documents = make_documents(folder, vocabulary=64)
    plain = run_workers(2, fit, folder, documents, split, False)
    for (_, expected), (modes, weights) in zip(plain, run_workers(2, fit, folder, documents, split, True), strict=True):
        assert modes == dict.fromkeys(("validate", "sanity_check", "test", "predict"), (False, False))
        assert_same(weights, expected)
