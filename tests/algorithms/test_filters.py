import pytest
import torch

from lightning_rl_engines.algorithms import overlong_penalty, zero_variance_groups


def test_keeps_groups_with_different_rewards() -> None:
    rewards = torch.tensor([1.0, 0.0, 0.1, 1.0, 0.1, 5.0, 0.1, 1.0])
    group_ids = torch.tensor([4, 4, 9, 4, 9, 0, 9, 2])
    keep = zero_variance_groups(rewards, group_ids)
    assert keep.dtype == torch.bool
    assert keep.tolist() == [True, True, False, True, False, False, False, False]


def test_no_documents() -> None:
    assert zero_variance_groups(torch.zeros(0), torch.zeros(0, dtype=torch.int64)).shape == (0,)


@pytest.mark.parametrize("dtype", [torch.int64, torch.float32])
def test_overlong_penalty(dtype: torch.dtype) -> None:
    # Yu et al. 2025, equation 13 with L_max = 100 and L_cache = 20.
    lengths = torch.tensor([0, 80, 81, 90, 100, 101, 1000], dtype=dtype)
    penalty = overlong_penalty(lengths, max_length=100, buffer=20, penalty_factor=2.0)
    assert penalty.dtype == torch.float32
    assert penalty.tolist() == pytest.approx([0.0, 0.0, -0.1, -1.0, -2.0, -2.0, -2.0])
    assert not torch.signbit(penalty[:2]).any()


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"max_length": 0, "buffer": 1}, "max_length=0"),
        ({"max_length": 10, "buffer": 0}, "buffer=0"),
        ({"max_length": 10, "buffer": 11}, "buffer=11.*max_length=10"),
        ({"max_length": 10, "buffer": 5, "penalty_factor": -1.0}, "penalty_factor=-1.0"),
    ],
)
def test_penalty_out_of_range_is_refused(arguments: dict, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        overlong_penalty(torch.tensor([1]), **arguments)
