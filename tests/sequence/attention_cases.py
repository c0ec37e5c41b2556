"""Packed forwards of tiny models and the per-document forwards they are compared with; workers import this file."""

from collections.abc import Sequence
from itertools import accumulate
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup
from transformers import PreTrainedModel

from lightning_rl_engines.sequence.attention import bind_sequence_parallel
from lightning_rl_engines.sequence.packing import PackedRow
from tests.support.models import random_documents, tiny_model

LENGTHS = (9, 1, 17, 5)
"""Longer and shorter than the window of ``mistral_window``, with a document of one token; 32 tokens in all."""


def row_of(lengths: Sequence[int]) -> PackedRow:
    bounds = (0, *accumulate(lengths))
    return PackedRow(
        cu_seqlens=torch.tensor(bounds, dtype=torch.int32), cu_seqlens_host=bounds, max_seqlen=max(lengths)
    )


def weights_of(shape: Sequence[int], seed: int = 7) -> Tensor:
    """Random weights of a scalar loss, so that no two outputs count alike."""
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def assert_exact(actual: Tensor, expected: Tensor, name: str = "logits") -> None:
    """Largest difference, relative to the largest element: elements that cancel to near zero keep absolute rounding."""
    assert actual.shape == expected.shape, name
    error = float((actual - expected).detach().abs().max() / expected.detach().abs().max())
    assert error < 2e-6, f"{name}: relative error {error:.1e}"


def packed_logits(model: PreTrainedModel, documents: Sequence[Tensor], group: ProcessGroup | None = None) -> Tensor:
    """Logits ``[local, V]`` of this rank's slice of the packed row."""
    ids = torch.cat(list(documents))
    positions = torch.cat([torch.arange(len(document)) for document in documents])
    if group is not None:
        size, rank = dist.get_world_size(group), dist.get_rank(group)
        ids, positions = ids.chunk(size)[rank], positions.chunk(size)[rank]
    row = row_of([len(document) for document in documents])
    return model(input_ids=ids[None], position_ids=positions[None], packed_row=row, use_cache=False).logits[0]


def gradients_of(model: PreTrainedModel) -> dict[str, Tensor]:
    gradients = {name: parameter.grad.clone() for name, parameter in model.named_parameters()}
    model.zero_grad(set_to_none=True)
    return gradients


def reference(
    name: str, seed: int = 0, lengths: Sequence[int] = LENGTHS, **changes: Any
) -> tuple[Tensor, dict[str, Tensor]]:
    """Logits of the whole row and gradients, each document on its own through plain eager attention."""
    model = tiny_model(name, seed=seed, **changes)
    documents = random_documents(lengths, vocabulary=model.config.vocab_size)
    logits = torch.cat([model(input_ids=document[None], use_cache=False).logits[0] for document in documents])
    (logits * weights_of(logits.shape)).sum().backward()
    return logits.detach(), gradients_of(model)


def packed(
    name: str,
    seed: int = 0,
    *,
    sequence_size: int = 1,
    kernel: str = "packed_sdpa",
    checkpointing: bool = False,
    **changes: Any,
) -> tuple[Tensor, dict[str, Tensor]]:
    """The same through one packed row: this rank's logits, and the gradients summed over its sequence group."""
    model = tiny_model(name, seed=seed, **changes)
    group = sequence_group(sequence_size)
    bind_sequence_parallel(model, group, kernel=kernel)
    if checkpointing:
        model.activation_checkpointing_enable()
        model.train()
    return step(model, group)


def step(model: PreTrainedModel, group: ProcessGroup | None) -> tuple[Tensor, dict[str, Tensor]]:
    documents = random_documents(LENGTHS, vocabulary=model.config.vocab_size)
    logits = packed_logits(model, documents, group)
    weights = weights_of((sum(LENGTHS), logits.shape[-1]))
    if group is not None:
        weights = weights.chunk(dist.get_world_size(group))[dist.get_rank(group)]
    (logits * weights).sum().backward()
    gradients = gradients_of(model)
    if group is not None:
        for gradient in gradients.values():
            dist.all_reduce(gradient, group=group)
    return logits.detach(), gradients


def sequence_group(size: int) -> ProcessGroup | None:
    """The group of this rank when the world is cut into runs of ``size`` ranks; collective over the world."""
    if size == 1:
        return None
    group, _ = dist.new_subgroups(size)
    return group


def alternate(first: dict[str, Any], second: dict[str, Any]) -> list[tuple[Tensor, dict[str, Tensor]]]:
    """Two models at sequence size 2 in one process: forwards alternate, and each backward comes after both."""
    group = sequence_group(2)
    models = [tiny_model("llama", seed=i, **changes) for i, changes in enumerate((first, second))]
    for model in models:
        bind_sequence_parallel(model, group, kernel="packed_sdpa")
    documents = random_documents(LENGTHS)
    assert group is not None
    size, rank = dist.get_world_size(group), dist.get_rank(group)
    for model in models:
        with torch.no_grad():
            packed_logits(model, documents, group)
    logits = [packed_logits(model, documents, group) for model in models]
    results = []
    for model, output in zip(models, logits, strict=True):
        weights = weights_of((sum(LENGTHS), output.shape[-1])).chunk(size)[rank]
        (output * weights).sum().backward()
        gradients = gradients_of(model)
        for gradient in gradients.values():
            dist.all_reduce(gradient, group=group)
        results.append((output.detach(), gradients))
    return results
