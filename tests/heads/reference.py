"""The plain head: whole logits, autograd, fp64."""

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass
class Case:
    """Inputs of a head; the floating-point ones are leaves."""

    hidden: Tensor
    weight: Tensor
    labels: Tensor
    bias: Tensor | None
    inv_temperature: Tensor | float
    softcap: float | None
    scale: float

    @property
    def leaves(self) -> list[Tensor]:
        return [leaf for leaf in (self.hidden, self.weight, self.bias) if leaf is not None]

    @property
    def options(self) -> dict:
        return {
            "bias": self.bias,
            "inv_temperature": self.inv_temperature,
            "softcap": self.softcap,
            "scale": self.scale,
        }


def make_case(
    tokens: int = 13,
    vocabulary: int = 97,
    *,
    width: int = 6,
    bias: bool = False,
    temperature: str | float = 1.0,
    softcap: float | None = None,
    scale: float = 1.0,
    dtype: torch.dtype = torch.float64,
    seed: int = 0,
) -> Case:
    """Random inputs; ``temperature="tokens"`` draws one per token. Logits have a deviation of about 2."""
    generator = torch.Generator().manual_seed(seed)

    def draw(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator, dtype=torch.float64)

    return Case(
        hidden=draw(tokens, width).to(dtype).requires_grad_(),
        weight=(draw(vocabulary, width) * 2 * width**-0.5).to(dtype).requires_grad_(),
        labels=torch.randint(0, vocabulary, (tokens,), generator=generator),
        bias=draw(vocabulary).to(dtype).requires_grad_() if bias else None,
        inv_temperature=draw(tokens).exp() if temperature == "tokens" else 1.0 / float(temperature),
        softcap=softcap,
        scale=scale,
    )


def plain_logits(case: Case) -> Tensor:
    logits = case.hidden @ case.weight.t()
    if case.bias is not None:
        logits = logits + case.bias
    logits = logits * case.scale
    if case.softcap is not None:
        logits = case.softcap * torch.tanh(logits / case.softcap)
    heat = case.inv_temperature
    return logits * (heat[:, None] if isinstance(heat, Tensor) else heat)


def plain_head(case: Case) -> tuple[Tensor, Tensor]:
    log_p = plain_logits(case).log_softmax(-1)
    return log_p.gather(1, case.labels[:, None])[:, 0], -(log_p.exp() * log_p).sum(-1)


def token_weights(tokens: int, seed: int = 1) -> tuple[Tensor, Tensor]:
    """Upstream gradients of log-probability and entropy, different for each token."""
    generator = torch.Generator().manual_seed(seed)
    g, e = torch.randn(2, tokens, generator=generator, dtype=torch.float64)
    return g, e
