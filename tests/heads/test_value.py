import pytest
import torch

from lightning_rl_engines.heads import ValueHead


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
@pytest.mark.parametrize("bias", [False, True])
def test_value_is_a_dot_product(dtype: torch.dtype, bias: bool) -> None:
    head = ValueHead(8, bias=bias, dtype=dtype)
    assert [name for name, _ in head.named_parameters()] == (["weight", "bias"] if bias else ["weight"])
    hidden = torch.randn(5, 8).to(dtype).requires_grad_()
    values = head(hidden)
    assert values.dtype == (torch.float64 if dtype == torch.float64 else torch.float32)
    exact = hidden.detach().double() @ head.weight[0].detach().double()
    torch.testing.assert_close(values.double(), exact, atol=1e-2 if dtype == torch.bfloat16 else 1e-6, rtol=1e-2)
    values.sum().backward()
    torch.testing.assert_close(hidden.grad, head.weight.detach().expand(5, -1))
    assert head(hidden[:0]).shape == (0,)


def test_hidden_of_another_dtype_is_cast_to_the_weight() -> None:
    head = ValueHead(8)
    hidden = torch.randn(3, 8).bfloat16()
    assert torch.equal(head(hidden), head(hidden.float()))


def test_initial_values_are_small_but_pass_a_gradient() -> None:
    torch.manual_seed(0)
    head = ValueHead(1024, bias=True)
    assert 0.8 / 1025 < head.weight.std() < 1.2 / 1025
    assert torch.count_nonzero(head.bias) == 0
    assert head(torch.randn(100, 1024)).abs().max() < 0.2
    meta = ValueHead(4, device="meta").to_empty(device="cpu")
    meta.reset_parameters(torch.Generator().manual_seed(3))
    again = ValueHead(4)
    again.reset_parameters(torch.Generator().manual_seed(3))
    assert torch.equal(meta.weight, again.weight)


def test_errors() -> None:
    with pytest.raises(ValueError, match="hidden_size=0"):
        ValueHead(0)
