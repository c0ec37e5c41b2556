"""Mixture-of-experts parts that compute in the precision that the model is given."""

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torchtitan.models.common.linear import Linear
from torchtitan.models.common.moe import GroupedExperts, RoutedExperts, TokenChoiceTopKRouter
from typing_extensions import override

# Shapes: R routed tokens sorted by expert, E experts of this rank, D model dimension, F hidden dimension of an expert,
# B rows, L tokens of a row, K experts of a token.


class ExactExperts(GroupedExperts):
    """Gated experts in the type of their input; torchtitan's cast to bf16 in every precision."""

    @dataclass(kw_only=True, slots=True)
    class Config(GroupedExperts.Config):
        """Args: dim, hidden_dim, num_experts: Sizes, as of torchtitan's ``GroupedExperts``."""

    @override
    def forward(self, x_RD: Tensor, num_tokens_per_expert_E: Tensor) -> Tensor:
        """Apply expert e to its tokens, which follow those of expert e - 1.

        Args:
            x_RD: Routed tokens.
            num_tokens_per_expert_E: int64 counts with sum R.

        Returns:
            ``[R, D]`` in the type of ``x_RD``.
        """
        w1_EFD, w2_EDF, w3_EFD = (
            weight.to_local() if isinstance(weight, DTensor) else weight
            for weight in (self.w1_EFD, self.w2_EDF, self.w3_EFD)
        )
        gate_RF = expert_matmul(x_RD, w1_EFD.mT, num_tokens_per_expert_E)
        up_RF = expert_matmul(x_RD, w3_EFD.mT, num_tokens_per_expert_E)
        return expert_matmul(F.silu(gate_RF) * up_RF, w2_EDF.mT, num_tokens_per_expert_E)


def expert_matmul(x: Tensor, weight: Tensor, counts: Tensor) -> Tensor:
    """Multiply consecutive blocks of rows with one matrix each, in the type of ``x``.

    Every matrix takes part: one without rows gets a gradient of zeros.

    Args:
        x: ``[rows, in]``; the first ``counts[0]`` rows belong to the first matrix, and so on.
        weight: ``[matrices, in, out]``, cast to the type of ``x``.
        counts: Rows of each matrix, integers on the device.

    Returns:
        ``[rows, out]``.
    """
    weight = weight.to(x.dtype)
    if _has_grouped_kernel(x, weight):
        return F.grouped_mm(x, weight, offs=counts.cumsum(0, dtype=torch.int32))
    # Unbinding keeps the backward pass to one stack of gradients; indexing would make one per matrix.
    blocks = zip(x.split(counts.tolist()), weight.unbind(0), strict=True)
    return torch.cat([block @ matrix for block, matrix in blocks])


def _has_grouped_kernel(x: Tensor, weight: Tensor) -> bool:
    aligned = all(size * x.element_size() % 16 == 0 for size in weight.shape[1:])
    return x.is_cuda and x.dtype == torch.bfloat16 and aligned


def give_experts_their_input(model: nn.Module) -> None:
    """Let the routed experts of a model read a copy of what the router reads; where each expert is cut over ranks.

    The gradient of the experts' input is then a partial sum on each rank, and that of the router's is whole. Where both
    belong to one tensor, autograd adds them wrongly, and nothing below the layer is right.
    """
    for module in model.modules():
        if isinstance(module, RoutedExperts):
            module.register_forward_pre_hook(_copy_input)


def _copy_input(module: nn.Module, args: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
    return args[0].clone(), *args[1:]


class Float32Linear(Linear):
    """A linear layer that computes in fp32, whatever the types of its input and weight."""

    @dataclass(kw_only=True, slots=True)
    class Config(Linear.Config):
        """Args: in_features, out_features, bias: As of torchtitan's ``Linear``."""

    @override
    def forward(self, input: Tensor) -> Tensor:
        """Return ``input @ weight.T + bias`` in fp32."""
        return F.linear(input.float(), self.weight.float(), None if self.bias is None else self.bias.float())


class ExactRouter(TokenChoiceTopKRouter):
    """torchtitan's router without autocast; scores are fp32 because the gate is a :class:`Float32Linear`.

    Among experts of equal score it takes those that transformers takes.
    """

    @dataclass(kw_only=True, slots=True)
    class Config(TokenChoiceTopKRouter.Config):
        """Args: gate: A ``Float32Linear.Config``; the others as of torchtitan's ``TokenChoiceTopKRouter``."""

        def __post_init__(self) -> None:
            if not isinstance(self.gate, Float32Linear.Config):
                raise ValueError(f"gate={type(self.gate).__qualname__} computes in bf16; use Float32Linear.Config.")

    @override
    def forward(self, x_BLD: Tensor, expert_bias_E: Tensor | None = None) -> tuple[Tensor, Tensor, Tensor]:
        """Choose experts.

        Args:
            x_BLD: Input.
            expert_bias_E: Added to scores for the choice, not for the weights.

        Returns:
            Weights ``[B, L, K]`` fp32, expert ids ``[B, L, K]`` int64, and all scores ``[B, L, E]`` fp32.
        """
        logits_BLE = self.gate(x_BLD)
        scores_BLE = logits_BLE.sigmoid() if self.score_func == "sigmoid" else logits_BLE.softmax(-1)
        choice_BLE = scores_BLE if expert_bias_E is None else scores_BLE + expert_bias_E
        if self.num_expert_groups is not None:
            limit = self.num_limited_groups or self.num_expert_groups
            choice_BLE = limit_to_groups(choice_BLE, groups=self.num_expert_groups, limit=limit)
        ids_BLK = choice_BLE.topk(self.top_k, dim=-1).indices
        weights_BLK = scores_BLE.gather(-1, ids_BLK)
        if self.route_norm:
            weights_BLK = weights_BLK / (weights_BLK.sum(-1, keepdim=True) + 1e-20)
        return weights_BLK * self.route_scale, ids_BLK, scores_BLE


def limit_to_groups(scores: Tensor, *, groups: int, limit: int) -> Tensor:
    """Leave experts of the best groups alone; a group is as good as its two best experts together.

    Args:
        scores: ``[..., experts]``.
        groups: Number of groups, which divides the number of experts.
        limit: Number of groups to choose from.

    Returns:
        The scores, minus infinity outside of the chosen groups.
    """
    grouped = scores.unflatten(-1, (groups, -1))
    best = grouped.topk(2, dim=-1).values.sum(-1).topk(limit, dim=-1).indices
    dropped = torch.ones_like(grouped[..., 0], dtype=torch.bool).scatter(-1, best, False)
    return grouped.masked_fill(dropped.unsqueeze(-1), float("-inf")).flatten(-2)
