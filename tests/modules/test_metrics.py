import math

import torch

from lightning_rl_engines.modules.metrics import Tally, combine_steps


def test_means_are_those_of_all_values_whatever_their_split():
    values = [0.1 * index for index in range(11)]
    whole = Tally()
    whole.add("x", values)
    parts = [Tally(), Tally(), Tally()]
    parts[0].add("x", values[:2])
    parts[2].add("x", values[2:7])
    parts[2].add("x", values[7:])
    assert Tally.means([whole])["x"] == math.fsum(values) / 11
    assert math.isclose(Tally.means(parts)["x"], math.fsum(values) / 11, rel_tol=1e-15)


def test_names_without_values_are_left_out():
    tally = Tally()
    tally.add("reward_none", [])
    assert Tally.means([tally]) == {}


def test_tokens_outside_the_mask_do_not_count():
    tally = Tally()
    tally.add_tokens("gap", torch.tensor([1.0, float("nan"), 4.0]), torch.tensor([True, False, True]))
    assert Tally.means([tally]) == {"gap": 2.5}


def test_steps_combine_by_mean_and_extremum_and_skipped_ones_count_only_as_skipped():
    step = {"loss": 1.0, "ratio_mean": 1.0, "ratio_max": 1.0, "ratio_min": 0.9, "kl_to_reference": 0.5, "lr": 0.1}
    other = {"loss": 3.0, "ratio_mean": 1.1, "ratio_max": 2.0, "ratio_min": 0.7, "kl_to_reference": 0.7, "lr": 0.3}
    bad = {name: float("nan") for name in step} | {"lr": 0.2}
    row = combine_steps(
        [{**step, "skipped_steps": 0.0}, {**bad, "skipped_steps": 1.0}, {**other, "skipped_steps": 0.0}]
    )
    assert row == {
        "skipped_steps": 1.0,
        "loss": 2.0,
        "ratio": 1.05,
        "ratio_max": 2.0,
        "ratio_min": 0.7,
        "kl": 0.6,
        "lr": 0.2,
    }


def test_an_update_without_any_step_taken_reports_no_loss():
    assert combine_steps([{"loss": math.nan, "lr": 0.1, "skipped_steps": 1.0}]) == {"skipped_steps": 1.0, "lr": 0.1}
