"""Precision without autocast: FSDP's own casts decide, buffers and experience columns stay as they are."""

from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager, nullcontext
from typing import Any, Literal, get_args

import torch
from lightning.pytorch.plugins.precision import FSDPPrecision
from lightning.pytorch.utilities.exceptions import MisconfigurationException
from torch import Tensor, nn
from torch.distributed.fsdp import MixedPrecision
from torch.optim import Optimizer
from typing_extensions import override

from lightning_rl_engines.strategies.loss_scale import LossScale

PrecisionName = Literal["32-true", "bf16-mixed", "bf16-true", "16-mixed"]


class EnginePrecision(FSDPPrecision):
    """Precision of an engine; a strategy makes it from ``Trainer(precision=...)``.

    ``Trainer(plugins=EnginePrecision("16-mixed"))`` asks for it by name where Lightning refuses the word: fp16 beside
    an instance of ``TorchTitanStrategy``, or, by a warning and bf16 instead, on CPU.

    Lightning's own plugin wraps steps in autocast, which would downcast the fused head's forward pass and not its
    backward pass, keeps buffers such as rotary frequencies in bf16, and reduces gradients in the compute type.

    Args:
        precision: ``"32-true"``: fp32 throughout. ``"bf16-mixed"``: weights, gradients and optimizer state in fp32,
            compute in bf16. ``"16-mixed"``: the same with fp16 and a dynamic loss scale. ``"bf16-true"``: weights,
            gradients, optimizer state and compute in bf16; gradients are reduced in the strategy's ``reduce_dtype``.

    Raises:
        MisconfigurationException: Another precision.
    """

    def __init__(self, precision: PrecisionName) -> None:
        if precision not in get_args(PrecisionName):
            raise MisconfigurationException(
                f"precision={precision!r} is not supported here; use one of {get_args(PrecisionName)}."
            )
        # torch's ShardedGradScaler knows CUDA only, and asks per rank what the global norm says for all.
        super().__init__("32-true" if precision == "16-mixed" else precision)
        self.precision = precision
        self.loss_scale = LossScale() if precision == "16-mixed" else None
        self._reduce_dtype = torch.float32
        self._clip: Callable[[Iterable[Tensor], float], Tensor] | None = None

    def attach(self, *, reduce_dtype: torch.dtype, clip: Callable[[Iterable[Tensor], float], Tensor]) -> None:
        """Take over what the strategy decides; called by the strategy.

        Args:
            reduce_dtype: Type that gradients are reduced in.
            clip: Scales the gradients of these parameters to this global norm; the strategy knows their shards.
        """
        self._reduce_dtype, self._clip = reduce_dtype, clip

    @property
    def storage_dtype(self) -> torch.dtype:
        """Type of the weights that the optimizer updates."""
        return torch.bfloat16 if self.precision == "bf16-true" else torch.float32

    @property
    def compute_dtype(self) -> torch.dtype:
        """Type of weights and activations in forward and backward passes."""
        names = {"bf16-mixed": torch.bfloat16, "bf16-true": torch.bfloat16, "16-mixed": torch.float16}
        return names.get(self.precision, torch.float32)

    @property
    @override
    def mixed_precision_config(self) -> MixedPrecision:
        # Lightning's throughput monitor reads it, and knows no plugin without one.
        return self.fsdp_mixed_precision or MixedPrecision()

    @property
    def fsdp_mixed_precision(self) -> MixedPrecision | None:
        """What FSDP casts; ``None`` where compute and reduction are in the type of the weights."""
        if self.precision == "32-true":
            return None
        # Inputs are token ids and rows: activations take the type of the weights, so FSDP has nothing to cast.
        return MixedPrecision(
            param_dtype=self.compute_dtype,
            reduce_dtype=self._reduce_dtype,
            cast_forward_inputs=False,
            cast_root_forward_inputs=False,
        )

    @override
    def convert_module(self, module: nn.Module) -> nn.Module:
        return module

    @override
    def convert_input(self, data: Any) -> Any:
        return data

    @override
    def convert_output(self, data: Any) -> Any:
        return data

    @override
    def tensor_init_context(self) -> AbstractContextManager[None]:
        return nullcontext()

    @override
    def module_init_context(self) -> AbstractContextManager[None]:
        return nullcontext()

    @override
    def forward_context(self) -> AbstractContextManager[None]:
        return nullcontext()

    @override
    def state_dict(self) -> dict[str, Any]:
        return {} if self.loss_scale is None else self.loss_scale.state_dict()

    @override
    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        if self.loss_scale is not None:
            self.loss_scale.load_state_dict(state_dict)

    @override
    def clip_grad_by_norm(self, optimizer: Optimizer, clip_val: int | float) -> None:
        if self._clip is None:
            raise MisconfigurationException("Gradients can be clipped once the strategy is set up.")
        self._clip(self.main_params(optimizer), float(clip_val))

    @override
    def clip_grad_by_value(self, optimizer: Optimizer, clip_val: int | float) -> None:
        torch.nn.utils.clip_grad_value_(list(self.main_params(optimizer)), clip_value=clip_val)
