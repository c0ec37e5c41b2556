"""The value head: one number per token."""

import torch
from torch import Tensor, nn
from torch.nn import functional
from typing_extensions import override


class ValueHead(nn.Module):
    """Linear map from hidden states to state values.

    Args:
        hidden_size: Width of the hidden states.
        bias: Whether to add a learned constant.
        dtype: Dtype of the parameters; ``None`` means PyTorch's default.
        device: Device of the parameters; ``None`` means PyTorch's default.
    """

    def __init__(
        self,
        hidden_size: int,
        *,
        bias: bool = False,
        dtype: torch.dtype | None = None,
        device: torch.device | str | None = None,
    ) -> None:
        super().__init__()
        if hidden_size < 1:
            raise ValueError(f"hidden_size={hidden_size} must be at least 1, such as the model's config.hidden_size.")
        self.weight = nn.Parameter(torch.empty(1, hidden_size, dtype=dtype, device=device))
        self.bias = nn.Parameter(torch.empty(1, dtype=dtype, device=device)) if bias else None
        self.reset_parameters()

    def reset_parameters(self, generator: torch.Generator | None = None) -> None:
        """Draw the weight from a normal distribution of deviation ``1 / (hidden_size + 1)``; the bias is 0.

        Values start near 0, so that early advantages are close to the returns, yet the backbone has a gradient from
        the first step on, which it would not have under a zero weight.

        Args:
            generator: Source of randomness; ``None`` means the global one of the device.
        """
        nn.init.normal_(self.weight, std=1.0 / (self.weight.shape[1] + 1), generator=generator)
        if self.bias is not None:
            nn.init.zeros_(self.bias)

    @override
    def forward(self, hidden: Tensor) -> Tensor:
        """Compute values in the dtype of the weight.

        Args:
            hidden: ``[..., H]``, usually ``[T, H]``, any floating-point dtype.

        Returns:
            ``[...]`` fp32 (fp64 for an fp64 weight).
        """
        values = functional.linear(hidden.to(self.weight.dtype), self.weight, self.bias).squeeze(-1)
        return values.to(torch.promote_types(values.dtype, torch.float32))
