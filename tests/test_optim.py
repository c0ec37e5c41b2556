"""Learning-rate schedules against their formulas."""

import math

import pytest
import torch

from lightning_rl_engines.optim import WarmupConstant, WarmupCosine, WarmupLinear, WarmupSchedule


def make_optimizer() -> torch.optim.SGD:
    first, second = torch.nn.Parameter(torch.zeros(1)), torch.nn.Parameter(torch.zeros(1))
    return torch.optim.SGD([{"params": [first], "lr": 1.0}, {"params": [second], "lr": 0.5}])


def rates(scheduler: WarmupSchedule, steps: int) -> list[float]:
    seen = []
    for _ in range(steps):
        seen.append(scheduler.optimizer.param_groups[0]["lr"])
        scheduler.optimizer.step()
        scheduler.step()
    return seen


def test_warm_up_then_constant():
    assert rates(WarmupConstant(make_optimizer(), warmup_steps=3), 6) == [0.25, 0.5, 0.75, 1.0, 1.0, 1.0]


def test_linear_reaches_its_floor_and_stays():
    scheduler = WarmupLinear(make_optimizer(), warmup_steps=1, total_steps=5, min_ratio=0.2)
    assert rates(scheduler, 7) == pytest.approx([0.5, 1.0, 0.8, 0.6, 0.4, 0.2, 0.2])


def test_cosine_is_half_a_cosine():
    scheduler = WarmupCosine(make_optimizer(), total_steps=10)
    expected = [0.5 * (1 + math.cos(math.pi * step / 10)) for step in range(11)]
    assert rates(scheduler, 11) == pytest.approx(expected)


def test_groups_keep_their_own_rate():
    scheduler = WarmupLinear(make_optimizer(), total_steps=4)
    rates(scheduler, 1)
    assert [group["lr"] for group in scheduler.optimizer.param_groups] == [0.75, 0.375]


def test_total_steps_may_be_filled_before_the_first_step():
    scheduler = WarmupCosine(make_optimizer(), warmup_steps=2)
    scheduler.total_steps = 10
    reference = WarmupCosine(make_optimizer(), warmup_steps=2, total_steps=10)
    assert rates(scheduler, 10) == rates(reference, 10)


def test_a_run_shorter_than_the_warm_up_just_warms_up():
    scheduler = WarmupCosine(make_optimizer(), warmup_steps=3)
    scheduler.total_steps = 2
    assert rates(scheduler, 2) == [0.25, 0.5]


def test_missing_total_steps_is_named():
    scheduler = WarmupCosine(make_optimizer())
    scheduler.optimizer.step()
    with pytest.raises(ValueError, match=r"WarmupCosine\(total_steps=None\).*trainer.max_steps"):
        scheduler.step()


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"warmup_steps": -1}, "use 0 for no warm-up"),
        ({"min_ratio": 2.0}, "between 0 and 1"),
        ({"warmup_steps": 10, "total_steps": 10}, "use warmup_steps below 10"),
    ],
)
def test_impossible_arguments(arguments, message):
    with pytest.raises(ValueError, match=message):
        WarmupCosine(make_optimizer(), **arguments)


def test_a_checkpoint_keeps_the_place_and_not_the_shape():
    short = WarmupLinear(make_optimizer(), total_steps=4)
    rates(short, 2)
    longer = WarmupLinear(make_optimizer(), total_steps=8)
    longer.load_state_dict(short.state_dict())
    longer.optimizer.step()
    longer.step()
    assert longer.last_epoch == 3
    assert longer.optimizer.param_groups[0]["lr"] == pytest.approx(1 - 3 / 8)
