"""Losses that an engine and a plain model both compute, and plain training with them."""

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor
from transformers import AutoModelForCausalLM, PreTrainedModel

from lightning_rl_engines import Engine, Experience
from lightning_rl_engines.algorithms.outputs import LossOutput
from tests.strategies.reference import Documents
from tests.support.engine import share
from tests.support.models import reference_log_probs


def score_loss(outputs: Any, micro_batch: Any) -> LossOutput:
    """Minus the advantage-weighted log-probability, over response tokens."""
    mask = micro_batch["response_mask"]
    return LossOutput(total=-(outputs.log_probs * micro_batch["advantages"])[mask].sum(), denominator="tokens")


def value_loss(outputs: Any, micro_batch: Any) -> LossOutput:
    """Squared distance of values to the advantages, over response tokens."""
    mask = micro_batch["response_mask"]
    gap = outputs.values[mask] - micro_batch["advantages"][mask]
    return LossOutput(total=gap.square().sum(), denominator="tokens")


def plain_score_loss(model: PreTrainedModel, documents: Documents) -> Tensor:
    log_probs, _ = reference_log_probs(model, documents.input_ids)
    terms = [
        -(item * advantage)[mask]
        for item, advantage, mask in zip(log_probs, documents.advantages, documents.response_mask, strict=True)
    ]
    return torch.cat(terms).mean()


def plain_values(model: PreTrainedModel, ids: Tensor) -> Tensor:
    """Value of the state before each token; the first one has none and holds 0."""
    scores = model(input_ids=ids[None], use_cache=False).logits[0, :-1, 0]
    return torch.cat([scores.new_zeros(1), scores])


def plain_value_loss(model: PreTrainedModel, documents: Documents) -> Tensor:
    terms = [
        (plain_values(model, ids) - advantage)[mask].square()
        for ids, advantage, mask in zip(documents.input_ids, documents.advantages, documents.response_mask, strict=True)
    ]
    return torch.cat(terms).mean()


def plain_model(folder: Any) -> PreTrainedModel:
    return AutoModelForCausalLM.from_pretrained(folder, attn_implementation="eager", dtype=torch.float32)


def gradients_of(model: PreTrainedModel) -> dict[str, Tensor]:
    """Gradients by name of the parameters that have one."""
    return {name: item.grad.clone() for name, item in model.named_parameters() if item.grad is not None}


def weights_of(model: PreTrainedModel) -> dict[str, Tensor]:
    return {name: item.detach().clone() for name, item in model.named_parameters()}


def train_plain(
    model: PreTrainedModel,
    documents: Documents,
    *,
    steps: int = 1,
    lr: float | Callable[[str], float] = 0.1,
    max_norm: float | None = None,
    loss: Callable[[Any, Documents], Tensor] = plain_score_loss,
) -> list[float]:
    """SGD by hand on the parameters that are trainable; the norms before clipping."""
    norms = []
    for _ in range(steps):
        model.zero_grad()
        loss(model, documents).backward()
        gradients = gradients_of(model)
        norm = torch.cat([item.flatten() for item in gradients.values()]).double().norm()
        norms.append(float(norm))
        scale = 1.0 if max_norm is None else min(1.0, max_norm / float(norm))
        with torch.no_grad():
            for name, parameter in model.named_parameters():
                if name in gradients:
                    rate = lr(name) if callable(lr) else lr
                    parameter -= rate * scale * gradients[name]
    return norms


def mine(engine: Engine, documents: Documents) -> Experience:
    """This data rank's documents."""
    return documents.experience(share(range(documents.size), engine.data_parallel_rank, engine.data_parallel_size))


def copies(pairs: Iterable[tuple[str, Tensor]]) -> dict[str, Tensor]:
    return dict(pairs)


def assert_near(found: dict[str, Tensor], expected: dict[str, Tensor], tolerance: float = 1e-5) -> None:
    """The same names, and a small relative error in each tensor."""
    assert found.keys() == expected.keys()
    for name, value in expected.items():
        error = (found[name] - value).norm() / value.norm()
        assert error < tolerance, f"{name}: relative error {error:.2e}"


def assert_same(left: dict[str, Tensor], right: dict[str, Tensor]) -> None:
    """Bit for bit."""
    assert left.keys() == right.keys()
    for name, value in left.items():
        assert torch.equal(value, right[name]), name
