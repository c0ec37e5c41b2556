"""The plain single-process truth: each document by itself through a Hugging Face model, losses by their formulas."""

from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch
from torch import Tensor
from transformers import AutoModelForCausalLM

from lightning_rl_engines import Experience
from lightning_rl_engines.export.plan import plan_from_hf_model
from tests.support.models import random_documents, reference_log_probs


@dataclass(frozen=True)
class Documents:
    """A ragged batch with every column that policy losses read."""

    input_ids: list[Tensor]
    response_mask: list[Tensor]
    old_log_probs: list[Tensor]
    ref_log_probs: list[Tensor]
    advantages: list[Tensor]
    temperature: list[float]
    group_ids: list[int]

    @property
    def size(self) -> int:
        return len(self.input_ids)

    def experience(self, indices: list[int]) -> Experience:
        """The documents of these indices as an engine takes them."""
        columns = {name: [getattr(self, name)[index] for index in indices] for name in self.__dataclass_fields__}
        if indices:
            return Experience.from_documents(**columns)
        return self.experience([0]).select([])


@cache
def make_documents(folder: Any, *, vocabulary: int, seed: int = 0) -> Documents:
    """Nine documents: a 1-token response, one without any, a long one, responses that end before the document does."""
    generator = torch.Generator().manual_seed(seed)
    shapes = [(3, 5), (9, 1), (2, 26), (4, 0), (12, 3), (1, 7), (5, 2), (6, 9), (2, 4)]
    ids = random_documents([prompt + response + 1 for prompt, response in shapes], vocabulary=vocabulary, seed=seed)
    masks = [torch.tensor([False] * prompt + [True] * response + [False]) for prompt, response in shapes]
    temperature = [1.0, 0.7, 1.3, 1.0, 0.9, 1.0, 0.7, 1.1, 1.0]
    model = AutoModelForCausalLM.from_pretrained(folder, attn_implementation="eager", dtype=torch.float32)
    with torch.no_grad():
        log_probs, _ = reference_log_probs(model, ids, temperature)

    def noisy(scale: float) -> list[Tensor]:
        return [item + scale * torch.randn(item.shape, generator=generator) for item in log_probs]

    return Documents(
        input_ids=ids,
        response_mask=masks,
        old_log_probs=noisy(0.4),
        ref_log_probs=noisy(0.2),
        advantages=[torch.randn(len(item), generator=generator) for item in ids],
        temperature=temperature,
        group_ids=[0, 0, 1, 1, 2, 2, 3, 3, 3],
    )


def reference_gradients(folder: Any, loss: Callable[[Any], Tensor]) -> tuple[float, dict[str, Tensor]]:
    """Loss and the gradient of every parameter, by Hugging Face name, of a fresh model."""
    model = AutoModelForCausalLM.from_pretrained(folder, attn_implementation="eager", dtype=torch.float32)
    total = loss(model)
    total.backward()
    return float(total.detach()), gradients_of(model)


def gradients_of(model: Any) -> dict[str, Tensor]:
    """The gradient of every parameter of a plain model by its name in a save: transformers keeps experts in stacks."""
    gradients = {
        name: torch.zeros_like(item) if item.grad is None else item.grad for name, item in model.named_parameters()
    }
    plan = plan_from_hf_model(model)
    trained = [source for source in plan.by_source if source in gradients]  # a save has buffers, too
    return {name: piece for source in trained for name, piece in plan.pieces(source, gradients[source])}


def ppo_reference(
    model: Any, documents: Documents, aggregation: str, *, entropy_coef: float, kl_coef: float
) -> tuple[Tensor, dict[str, float]]:
    """PPO with clip 0.2 / 0.28, entropy bonus and k3, token by token."""
    log_probs, entropies = reference_log_probs(model, documents.input_ids, documents.temperature)
    weights = _weights(documents, aggregation)
    terms: dict[str, list[Tensor]] = {
        name: [] for name in ("loss", "policy", "entropy", "kl", "approx_kl", "ratio", "clipped")
    }
    for index in range(documents.size):
        for token in documents.response_mask[index].nonzero()[:, 0].tolist():
            log_prob, entropy = log_probs[index][token], entropies[index][token]
            advantage = documents.advantages[index][token]
            ratio = (log_prob - documents.old_log_probs[index][token]).exp()
            unclipped = -advantage * ratio
            clipped = -advantage * ratio.clamp(0.8, 1.28)
            gap = documents.ref_log_probs[index][token] - log_prob
            kl = gap.exp() - gap - 1
            policy = torch.maximum(unclipped, clipped)
            weight = weights[index]
            back = log_prob - documents.old_log_probs[index][token]
            terms["loss"].append(weight * (policy - entropy_coef * entropy + kl_coef * kl))
            terms["policy"].append(weight * policy)
            terms["entropy"].append(entropy)
            terms["kl"].append(kl)
            terms["approx_kl"].append(back.exp() - back - 1)
            terms["ratio"].append(ratio)
            terms["clipped"].append((clipped > unclipped).float())
    mean = {name: float(torch.stack(items).detach().mean()) for name, items in terms.items()}
    ratios = torch.stack(terms["ratio"]).detach()
    metrics = {
        "policy_loss": float(torch.stack(terms["policy"]).detach().sum()),
        "entropy": mean["entropy"],
        "kl_to_reference": mean["kl"],
        "approx_kl": mean["approx_kl"],
        "ratio_mean": mean["ratio"],
        "ratio_max": float(ratios.max()),
        "ratio_min": float(ratios.min()),
        "clip_fraction": mean["clipped"],
    }
    return torch.stack(terms["loss"]).sum(), metrics


def _weights(documents: Documents, aggregation: str) -> list[float]:
    """Weight of each response token of a document, denominators included."""
    lengths = [int(mask.sum()) for mask in documents.response_mask]
    tokens, sequences = sum(lengths), sum(1 for length in lengths if length)
    return {
        "token-mean": [1 / tokens] * documents.size,
        "seq-mean-token-mean": [1 / max(length, 1) / sequences for length in lengths],
        "seq-mean-token-sum": [1 / sequences] * documents.size,
        "seq-mean-token-sum-norm": [1 / 32 / sequences] * documents.size,
        "token-sum-over-constant": [1 / 50] * documents.size,
    }[aggregation]
