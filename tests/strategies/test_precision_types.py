"""Types seen through a whole Lightning run: every layer, the reduction by its values, buffers, columns of a batch."""

from typing import Any

import pytest
import torch
from lightning.pytorch import LightningModule
from lightning.pytorch.plugins.precision import DoublePrecision, FSDPPrecision
from lightning.pytorch.utilities.exceptions import MisconfigurationException
from torch.utils.data import DataLoader
from typing_extensions import override

from lightning_rl_engines import Experience, FSDPUlyssesStrategy, ModelConfig
from tests.strategies.reference import Documents, make_documents
from tests.strategies.steps import mine, plain_model, plain_score_loss, score_loss
from tests.support import run_workers
from tests.support.lightning_env import make_trainer
from tests.support.models import reference_log_probs, tiny_model_folder


class Witness(LightningModule):
    """Trains one step with AdamW and writes down the types it meets."""

    def __init__(self, config: ModelConfig, documents: Documents) -> None:
        super().__init__()
        self.automatic_optimization = False
        self.config, self.documents = config, documents
        self.seen: dict[str, Any] = {}

    @property
    def engine(self) -> Any:
        return self.trainer.strategy

    @override
    def configure_model(self) -> None:
        if not hasattr(self, "policy"):
            self.policy = self.engine.build_model(self.config)

    @override
    def configure_optimizers(self) -> Any:
        return torch.optim.AdamW(self.policy.parameters(), 1e-3)

    @override
    def training_step(self, batch: Experience, batch_idx: int) -> None:
        seen = self.seen
        seen["columns"] = {name: str(batch[name].dtype) for name in batch.column_names}
        parameters = list(self.policy.parameters())
        seen["stored"] = {str(item.dtype) for item in parameters}
        hf = self.policy.hf

        def compute(module: Any, inputs: Any, output: Any) -> None:
            kinds = [output.dtype, *(item.dtype for item in module.parameters(recurse=False))]
            seen.setdefault("compute", set()).update(str(kind) for kind in kinds)

        watched = [module for module in hf.modules() if isinstance(module, (torch.nn.Linear, torch.nn.Embedding))]
        handles = [module.register_forward_hook(compute) for module in watched]
        mine_ = mine(self.engine, self.documents)
        seen["log_probs"] = self.engine.infer_batch(self.policy, mine_).columns["log_probs"]
        self.engine.forward_backward_batch(self.policy, mine_, score_loss)
        for handle in handles:
            handle.remove()
        seen["gradients"] = {str(item.grad.dtype) for item in parameters if item.grad is not None}
        seen["reduced"] = dict(self.engine.get_per_tensor_grad(self.policy))
        optimizer = self.optimizers()
        optimizer.step()
        states = [value for state in optimizer.optimizer.state.values() for value in state.values() if value.ndim]
        seen["state"] = {str(value.dtype) for value in states}
        seen["weights"] = dict(self.engine.get_per_tensor_param(self.policy))
        seen["buffers"] = {name: item.clone() for name, item in hf.named_buffers()}


def witness(folder: str, documents: Documents, precision: str, **strategy: Any) -> dict[str, Any]:
    module = Witness(ModelConfig(path=folder), documents)
    batch = Experience.from_documents(
        input_ids=[[1, 2, 3]],
        response_mask=[[0, 1, 1]],
        half=[torch.tensor([1, 2, 3], dtype=torch.float16)],
        single=[[0.1, 0.2, 0.3]],
        double=[torch.tensor([0.1, 0.2, 0.3], dtype=torch.float64)],
        small=torch.tensor([7], dtype=torch.int32),
        flag=[True],
    )
    trainer = make_trainer(FSDPUlyssesStrategy(**strategy), precision=precision, max_epochs=1)
    trainer.fit(module, DataLoader([batch] * trainer.world_size, batch_size=None))
    return module.seen


def _rounded_by_bfloat16(tensors: dict[str, torch.Tensor]) -> float:
    """Share of elements that bf16 would have rounded."""
    flat = torch.cat([item.flatten() for item in tensors.values()])
    return float((flat.bfloat16().float() != flat).float().mean())


@pytest.mark.parametrize(("precision", "compute"), [("32-true", "torch.float32"), ("bf16-mixed", "torch.bfloat16")])
def test_types_of_weights_compute_gradients_state_buffers_and_columns(precision: str, compute: str) -> None:
    folder = str(tiny_model_folder("llama"))
    documents = make_documents(folder, vocabulary=64)
    model = plain_model(folder)
    with torch.no_grad():
        expected = reference_log_probs(model, documents.input_ids)[0]
    response = torch.cat(documents.response_mask)
    ranks = run_workers(2, witness, folder, documents, precision)
    for seen in ranks:
        assert seen["stored"] == {"torch.float32"}
        assert seen["compute"] == {compute}
        assert seen["gradients"] == {"torch.float32"}
        assert seen["state"] == {"torch.float32"}
        assert seen["log_probs"].dtype == torch.float32
        assert _rounded_by_bfloat16(seen["reduced"]) > 0.5
        assert _rounded_by_bfloat16(seen["weights"]) > 0.5
        assert seen["columns"] == {
            "input_ids": "torch.int64",
            "response_mask": "torch.bool",
            "half": "torch.float16",
            "single": "torch.float32",
            "double": "torch.float64",
            "small": "torch.int32",
            "flag": "torch.bool",
        }
        assert seen["buffers"].keys() == dict(model.named_buffers()).keys()
        for name, buffer in model.named_buffers():
            assert torch.equal(seen["buffers"][name], buffer), name
    found = torch.cat([seen["log_probs"] for seen in ranks])[response]
    gap = (found - torch.cat(expected)[response]).abs().max()
    assert gap < (1e-4 if precision == "32-true" else 0.2)
    assert (gap > 1e-3) == (precision == "bf16-mixed")


def test_the_reduction_has_its_own_type() -> None:
    folder = str(tiny_model_folder("llama"))
    documents = make_documents(folder, vocabulary=64)
    model = plain_model(folder)
    plain_score_loss(model, documents).backward()
    expected = torch.cat([item.grad.flatten() for item in model.parameters()])
    errors = {}
    for reduce_dtype in ("float32", "bfloat16"):
        seen = run_workers(2, witness, folder, documents, "bf16-mixed", reduce_dtype=reduce_dtype)[0]
        found = torch.cat([seen["reduced"][name].flatten() for name, _ in model.named_parameters()])
        errors[reduce_dtype] = float((found - expected).norm() / expected.norm())
        # A sum in bf16 can hold no value that bf16 would round; a sum in fp32 of two bf16 values does.
        assert (_rounded_by_bfloat16(seen["reduced"]) == 0) == (reduce_dtype == "bfloat16")
    assert errors["float32"] < 0.05


def test_an_unsupported_precision_is_refused_at_construction() -> None:
    for strategy in ("fsdp_ulysses", FSDPUlyssesStrategy()):
        with pytest.raises(MisconfigurationException, match=r"precision='16-true'.*'32-true', 'bf16-mixed'"):
            make_trainer(strategy, precision="16-true")


@pytest.mark.parametrize("precision", ["64-true", "transformer-engine"])
def test_precisions_that_lightning_denies_to_fsdp_are_refused_at_construction(precision: Any) -> None:
    with pytest.raises(ValueError, match=f"precision='{precision}'"):
        make_trainer("fsdp_ulysses", precision=precision)


def test_a_foreign_precision_plugin_is_refused() -> None:
    with pytest.raises(TypeError, match=r"DoublePrecision.*set Trainer\(precision=\.\.\.\)"):
        FSDPUlyssesStrategy(precision_plugin=DoublePrecision())
    assert FSDPUlyssesStrategy(precision_plugin=FSDPPrecision("bf16-mixed")).precision_plugin.precision == "bf16-mixed"
