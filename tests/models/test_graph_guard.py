"""Orders of forward and backward passes that FSDP1 gets wrong are refused on every layout; the others are exact."""

from collections.abc import Callable
from functools import cache
from typing import Any

import pytest
import torch
from torch import Tensor

from lightning_rl_engines import Experience, ModelConfig
from lightning_rl_engines.sequence import MicroBatch, pack_row
from tests.strategies.checks import assert_gradients
from tests.strategies.reference import reference_gradients
from tests.support import run_workers
from tests.support.engine import EngineModule, with_engine
from tests.support.models import random_documents, reference_log_probs, tiny_model_folder

DOCUMENTS = random_documents([7, 5, 9], seed=4)
LEFT = "left 1 earlier forward pass"
BEHIND = "a forward pass that was left behind is refused"
SECOND = "second backward pass through the same forward pass is refused"


def _row(module: EngineModule, index: int) -> MicroBatch:
    document, engine = DOCUMENTS[index], module.engine
    return pack_row(
        Experience.from_documents(input_ids=[document], response_mask=[[1] * len(document)]),
        (0,),
        sequence_size=engine.sequence_parallel_size,
        sequence_rank=engine.sequence_parallel_rank,
        group=engine.sequence_parallel_group,
    )


def _forward(module: EngineModule, index: int = 0, weight: float = 1.0) -> Tensor:
    """``weight`` times the sum of log-probabilities, the same on every rank, so that FSDP's average is that of one."""
    total = module.policy(_row(module, index)).log_probs.sum()
    # A product saves its factor, and torch itself would refuse to run it backward twice.
    return total if weight == 1.0 else total * weight


def _refusal(action: Callable[[], Any]) -> str:
    try:
        action()
    except RuntimeError as error:
        return str(error)
    return "accepted"


def _gradients(module: EngineModule) -> dict[str, Tensor]:
    gradients = dict(module.engine.get_per_tensor_grad(module.policy))
    module.policy.zero_grad()
    return gradients


def _clean_pass(module: EngineModule) -> dict[str, Tensor]:
    """One plain step, to see whether the model still works."""
    module.policy.zero_grad()
    _forward(module, 2).backward()
    return _gradients(module)


@cache
def _expected(*weights: float) -> dict[str, Tensor]:
    def loss(model: Any) -> Tensor:
        log_probs, _ = reference_log_probs(model, DOCUMENTS)
        return torch.stack([weight * item.sum() for weight, item in zip(weights, log_probs, strict=True)]).sum()

    return reference_gradients(str(tiny_model_folder("llama")), loss)[1]


def run_orders(folder: str, checkpointing: bool, fsdp_size: int | None) -> Any:
    """On a rank: what each order of passes gave, in one process and one model."""

    def body(module: EngineModule) -> Any:
        found: dict[str, Any] = {}

        first, second = _forward(module, 0), _forward(module, 1)
        found["f f b"] = _refusal(first.backward)
        found["then b"] = _refusal(second.backward)
        found["then b again"] = _refusal(first.backward)
        found["clean after f f b"] = _clean_pass(module)

        first, second = _forward(module, 0), _forward(module, 1)
        found["f f b of the last"] = _refusal(second.backward)
        found["clean after the last"] = _clean_pass(module)

        (_forward(module, 0) + _forward(module, 1, 2.0)).backward()
        found["sum"] = _gradients(module)

        loss = _forward(module, 0)
        with torch.no_grad():
            _forward(module, 1)
            _forward(module, 2)
        loss.backward()
        found["no grad between"] = _gradients(module)

        _forward(module, 1)  # dropped at once
        loss = _forward(module, 0)
        dropped = _forward(module, 2)
        del dropped
        loss.backward()
        found["dropped"] = _gradients(module)

        with module.engine.train_mode(module.policy):
            abandoned = _forward(module, 1)  # kept alive, as the traceback of an exception would
        _forward(module, 0).backward()
        found["abandoned"] = _gradients(module)
        found["b of the abandoned"] = _refusal(abandoned.backward)

        for index in (0, 1):
            _forward(module, index).backward()
        found["f b f b"] = _gradients(module)

        return found

    return with_engine(body, ModelConfig(path=folder, gradient_checkpointing=checkpointing), fsdp_size=fsdp_size)


LAYOUTS = [(1, False, None), (2, False, None), (2, True, None), (2, False, 1)]


@pytest.mark.parametrize(("world", "checkpointing", "fsdp_size"), LAYOUTS)
def test_orders_of_passes(world: int, checkpointing: bool, fsdp_size: int | None) -> None:
    for found in run_workers(world, run_orders, str(tiny_model_folder("llama")), checkpointing, fsdp_size):
        for name in ("f f b", "f f b of the last"):
            assert LEFT in found[name], name
        assert BEHIND in found["then b"] and BEHIND in found["b of the abandoned"]
        assert SECOND in found["then b again"]
        for name in ("clean after f f b", "clean after the last"):
            assert_gradients(found[name], _expected(0.0, 0.0, 1.0), name)
        assert_gradients(found["sum"], _expected(1.0, 2.0, 0.0))
        assert_gradients(found["no grad between"], _expected(1.0, 0.0, 0.0))
        assert_gradients(found["dropped"], _expected(1.0, 0.0, 0.0))
        assert_gradients(found["abandoned"], _expected(1.0, 0.0, 0.0))
        assert_gradients(found["f b f b"], _expected(1.0, 1.0, 0.0))


def run_second(folder: str, retain: bool, fsdp_size: int | None) -> Any:
    def body(module: EngineModule) -> Any:
        loss = _forward(module, 0)
        loss.backward(retain_graph=retain)
        module.policy.zero_grad()
        refusal = _refusal(loss.backward)
        del loss
        return refusal, _clean_pass(module)

    return with_engine(body, ModelConfig(path=folder), fsdp_size=fsdp_size)


@pytest.mark.parametrize("retain", [False, True])
@pytest.mark.parametrize(("world", "fsdp_size"), [(1, None), (2, None), (2, 1)])
def test_a_second_backward_is_refused(world: int, fsdp_size: int | None, retain: bool) -> None:
    for refusal, gradients in run_workers(world, run_second, str(tiny_model_folder("llama")), retain, fsdp_size):
        assert SECOND in refusal
        assert_gradients(gradients, _expected(0.0, 0.0, 1.0))


class _Boom(torch.autograd.Function):
    """Raises in the backward pass."""

    @staticmethod
    def forward(ctx: Any, tensor: Tensor) -> Tensor:
        return tensor.clone()

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Tensor:
        raise ArithmeticError("boom")


def run_exception(folder: str, inside: bool) -> Any:
    """On a rank: a backward pass raises before or inside the model; then f f b must still be refused."""

    def body(module: EngineModule) -> Any:
        loss = _forward(module, 0)
        if inside:
            embeddings = [m for m in module.policy.modules() if isinstance(m, torch.nn.RMSNorm | torch.nn.Embedding)]
            handle = embeddings[0].register_forward_hook(lambda *args: _Boom.apply(args[2]))
            loss = _forward(module, 0)
            handle.remove()
        else:
            loss = _Boom.apply(loss)
        try:
            loss.backward()
        except ArithmeticError as error:
            raised = str(error)
        del loss
        module.policy.zero_grad()
        clean = _clean_pass(module)
        first, second = _forward(module, 0), _forward(module, 1)
        return raised, clean, _refusal(first.backward), second is not None

    return with_engine(body, ModelConfig(path=folder))


@pytest.mark.parametrize("world", [1, 2])
@pytest.mark.parametrize("inside", [False, True])
def test_exceptions(world: int, inside: bool) -> None:
    for raised, clean, refusal, _ in run_workers(world, run_exception, str(tiny_model_folder("llama")), inside):
        assert raised == "boom"
        assert_gradients(clean, _expected(0.0, 0.0, 1.0))
        assert LEFT in refusal
