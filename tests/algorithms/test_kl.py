import math

import pytest
import torch

from lightning_rl_engines.algorithms.kl import LOG_RATIO_BOUND, kl_estimate

NAMES = ("k1", "k2", "k3", "abs", "k1+", "k3+")


def value(name: str, d: float) -> float:
    """The formulas on one number, d = log pi - log pi_ref."""
    if name in ("k1", "k1+"):
        return d
    if name == "k2":
        return d * d / 2
    if name in ("k3", "k3+"):
        return math.exp(-d) - 1 + d
    return abs(d)


def slope(name: str, d: float) -> float:
    if name == "k1":
        return 1.0
    if name == "k3":
        return 1 - math.exp(-d)
    if name == "abs":
        return math.copysign(1.0, d)
    return d


@pytest.mark.parametrize("name", NAMES)
def test_value_and_gradient(name: str) -> None:
    log_probs = torch.tensor([-1.0, -2.5, -0.3], dtype=torch.float64, requires_grad=True)
    reference = torch.tensor([-1.5, -0.5, -0.4], dtype=torch.float64)
    kl = kl_estimate(log_probs, reference, name)
    kl.sum().backward()
    ds = (log_probs.detach() - reference).tolist()
    torch.testing.assert_close(kl.detach(), torch.tensor([value(name, d) for d in ds], dtype=torch.float64))
    torch.testing.assert_close(log_probs.grad, torch.tensor([slope(name, d) for d in ds], dtype=torch.float64))


def expected_gradient(name: str) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Exact expectation over a small vocabulary of the estimator's gradient, and the gradients of both KLs."""
    generator = torch.Generator().manual_seed(1)
    logits = torch.randn(5, generator=generator, dtype=torch.float64, requires_grad=True)
    reference = torch.randn(5, generator=generator, dtype=torch.float64).log_softmax(0)
    policy = logits.log_softmax(0)
    estimate = (policy.detach().exp() * kl_estimate(policy, reference, name)).sum()
    forward = (policy.exp() * (policy - reference)).sum()
    backward = (reference.exp() * (reference - policy)).sum()
    return tuple(torch.autograd.grad(x, logits, retain_graph=True)[0] for x in (estimate, forward, backward))


@pytest.mark.parametrize("name", ["k2", "k1+", "k3+"])
def test_expected_gradient_is_that_of_the_kl(name: str) -> None:
    estimate, forward, _ = expected_gradient(name)
    torch.testing.assert_close(estimate, forward)


def test_expected_gradients_of_k1_and_k3() -> None:
    estimate, forward, _ = expected_gradient("k1")
    torch.testing.assert_close(estimate, torch.zeros_like(estimate))
    assert forward.abs().max() > 0.1
    estimate, _, backward = expected_gradient("k3")
    torch.testing.assert_close(estimate, backward)


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("d", [-1e4, -100.0, 100.0, 1e4])
def test_extreme_differences_stay_finite(name: str, d: float) -> None:
    log_probs = torch.tensor([d], requires_grad=True)
    kl = kl_estimate(log_probs, torch.zeros(1), name)
    kl.sum().backward()
    assert torch.isfinite(kl).all() and torch.isfinite(log_probs.grad).all()


def test_k3_beyond_the_bound() -> None:
    log_probs = torch.tensor([-LOG_RATIO_BOUND - 1, 30.0], dtype=torch.float64, requires_grad=True)
    kl = kl_estimate(log_probs, torch.zeros(2, dtype=torch.float64), "k3")
    kl.sum().backward()
    torch.testing.assert_close(kl.tolist(), [math.exp(20) - 1 - 20, math.exp(-30) - 1 + 30])
    assert log_probs.grad[0] == 0
    assert log_probs.grad[1] == pytest.approx(1.0)


def test_k3_of_close_models_keeps_its_digits_in_fp32() -> None:
    kl = kl_estimate(torch.tensor([-1.0 + 2**-12]), torch.tensor([-1.0]), "k3")
    assert kl.item() == pytest.approx(math.expm1(-(2**-12)) + 2**-12, rel=1e-3)


def test_unknown_estimator_lists_the_known() -> None:
    with pytest.raises(ValueError, match=r"'k4'.*k1, k2, k3, abs, k1\+, k3\+"):
        kl_estimate(torch.zeros(1), torch.zeros(1), "k4")
