import math

import pytest
import torch

from lightning_rl_engines.algorithms import GRPOAdvantage, PolicyLoss
from lightning_rl_engines.modules import PolicyModule
from lightning_rl_engines.rollout import HFRollout
from tests.modules import cases
from tests.support import WorkerError, run_workers
from tests.support.models import tiny_config

SPLITS = {1: [[0, 1, 2, 3, 4, 5, 6, 7]], 2: [[0, 1, 2, 3], [4, 5, 6, 7]]}
"""On two data ranks each group spans both."""
UNEVEN = {1: SPLITS[1], 2: [[0, 1, 2, 3, 4, 5, 6, 7], []]}


def run_experience(world, *args, **kwargs):
    return run_workers(world, cases.run_experience, *args, **kwargs)


def close(left, right):
    assert left.keys() == right.keys()
    return all(torch.allclose(left[name], right[name], rtol=1e-5, atol=1e-6) for name in left)


@pytest.mark.parametrize(
    ("world", "sp", "split"),
    [(1, 1, "sp"), (2, 1, "sp"), (2, 2, "sp"), (2, 1, "tp"), (2, 2, "tp"), (2, 2, "cp"), (2, 2, "pp")],
)
def test_two_updates_from_prompts(world, sp, split):
    results = run_workers(world, cases.run_two_updates, sp, split)
    for result in results:
        assert result["updates"] == result["global_step"] == 2
        assert [row["rl/update"] for row in result["history"]] == [1.0, 2.0]
        for row in result["history"]:
            # Nothing has changed since the old log-probabilities were computed, so the ratio is exactly 1.
            assert row["train/ratio"] == row["train/ratio_max"] == row["train/ratio_min"] == 1.0
            assert row["train/approx_kl"] == 0.0
            # The trainer's own log-probabilities are those that the rollout sampled with.
            assert row["train/rollout_log_prob_gap"] < 1e-5
            assert row["train/grad_norm"] > 0
            assert row["train/skipped_steps"] == 0
            assert row["train/tokens_per_second"] > 0
            total = row["train/reward_even"] + 0.5 * row["train/reward_long"]
            assert math.isclose(row["train/reward"], total, rel_tol=1e-6)
        assert result["logged"]["train/reward"] == pytest.approx(result["history"][-1]["train/reward"])
    for name, column in results[0]["sampled"].items():
        # Peers train on the same responses, data ranks on their own.
        assert all(torch.equal(column, other["sampled"][name]) == (sp == world) for other in results[1:]), name
    for other in results[1:]:
        same = [{k: v for k, v in row.items() if "second" not in k} for row in other["history"]]
        assert same == [{k: v for k, v in row.items() if "second" not in k} for row in results[0]["history"]]


def test_the_first_ratio_is_exactly_one_with_dropout_in_the_configuration():
    config = tiny_config("llama", attention_dropout=0.1).to_dict()
    (result,) = run_workers(1, cases.run_two_updates, 1, policy=cases.ModelConfig(from_config=config))
    for row in result["history"]:
        assert row["train/ratio_max"] == row["train/ratio_min"] == 1.0


def test_groups_of_one_have_zero_advantages():
    (result,) = run_experience(1, {1: [[0, 1, 2, 3]]})
    assert set(result["advantages"].values()) == {0.0}
    assert all(math.isfinite(value) for value in result["history"][0].values())
    assert result["history"][0]["train/grad_norm"] == 0.0


def test_training_raises_the_reward():
    (result,) = run_workers(1, cases.run_training, 25)
    rewards = [row["train/reward_even"] for row in result["history"]]
    assert sum(rewards[-5:]) / 5 > sum(rewards[:5]) / 5 + 0.2


@pytest.mark.parametrize(
    ("world", "sp", "split", "splits"),
    [
        *((world, sp, "sp", splits) for world, sp in ((2, 1), (2, 2), (4, 2)) for splits in (SPLITS, UNEVEN)),
        (2, 1, "tp", SPLITS),
        (2, 1, "tp", UNEVEN),
        *((2, 2, split, SPLITS) for split in ("tp", "cp", "pp")),
    ],
)
def test_an_update_does_not_depend_on_the_layout(world, sp, split, splits):
    options = {"loss": PolicyLoss(kl_coef=0.1, entropy_coef=0.01), "max_tokens_per_micro_batch": 24}
    (alone,) = run_experience(1, SPLITS, **options)
    results = run_experience(world, splits, sp=sp, split=split, **options)
    advantages = {}
    for result in results:
        advantages |= result["advantages"]
        assert close(result["weights"], alone["weights"])
        for name, value in alone["history"][0].items():
            if name != "train/tokens_per_second":
                assert result["history"][0][name] == pytest.approx(value, rel=1e-5, abs=1e-6), name
    # The same bits: a group that spans ranks is one group.
    assert advantages == alone["advantages"]


def test_advantages_are_those_of_the_global_batch():
    results = run_experience(2, SPLITS)
    rewards = torch.tensor([0.0, 1.0, 2.0, 1.0, 1.0, 1.0, 0.5, 0.0])
    expected = GRPOAdvantage()(rewards, torch.tensor([0, 1, 2, 3, 0, 1, 2, 3]), torch.ones(8))
    assert results[0]["advantages"] | results[1]["advantages"] == dict(enumerate(expected.tolist()))


def test_old_reference_and_current_log_probs_are_equal_bit_by_bit():
    options = {"loss": PolicyLoss(kl_coef=0.1), "mini_batches": 1}
    (result,) = run_experience(1, SPLITS, **options)
    columns = result["columns"]
    assert torch.equal(columns["old_log_probs"], columns["ref_log_probs"])
    row = result["history"][0]
    # Current against old, and current against reference, from the training pass itself.
    assert row["train/ratio_max"] == row["train/ratio_min"] == 1.0
    assert row["train/kl"] == 0.0


def test_given_columns_are_used_and_not_computed_again():
    old = [[-1.0] * length for length in cases.RECORDED_LENGTHS]
    given = {"advantages": [1.0] * 8, "old_log_probs": old, "ref_log_probs": old}
    (result,) = run_experience(1, SPLITS, columns=given)
    assert set(result["advantages"].values()) == {1.0}
    assert torch.equal(result["columns"]["old_log_probs"], torch.full_like(result["columns"]["old_log_probs"], -1.0))
    assert "train/entropy" not in result["history"][0]
    assert result["history"][0]["train/ratio"] != 1.0


def test_the_samplers_log_probs_stand_in_for_the_old_ones():
    (result,) = run_experience(1, SPLITS, recompute_old_log_probs=False)
    assert torch.equal(result["columns"]["old_log_probs"], result["columns"]["rollout_log_probs"])


@pytest.mark.parametrize("world", [1, 2])
def test_every_mini_batch_and_epoch_is_an_optimizer_step(world):
    for result in run_experience(world, SPLITS, mini_batches=2, update_epochs=3):
        assert result["global_step"] == 6
        assert result["updates"] == 1


def test_no_step_is_taken_without_documents():
    (result,) = run_experience(1, {1: [[0, 4]]}, mini_batches=5)
    assert result["global_step"] == 2


@pytest.mark.parametrize("world", [1, 2])
def test_groups_without_signal_are_dropped_on_request(world):
    kept = run_experience(world, SPLITS)
    for result in kept:
        assert result["history"][0]["train/groups_without_signal"] == 0.25
    assert sum(len(result["lengths"]) for result in kept) == 8
    filtered = run_experience(world, SPLITS, filter_zero_variance=True)
    assert sum(len(result["lengths"]) for result in filtered) == 6
    for result in filtered:
        # All rewards were earned, whether trained on or not.
        assert result["history"][0]["train/reward"] == kept[0]["history"][0]["train/reward"]


def test_groups_without_signal_move_the_policy_through_kl_unless_dropped():
    options = {"loss": PolicyLoss(kl_coef=1.0, kl_estimator="k2"), "columns": {"ref_log_probs": _constant(-2.0)}}
    flat = {1: [[1, 5]]}
    (result,) = run_experience(1, flat, **options)
    assert result["updates"] == 1
    assert result["history"][0]["train/grad_norm"] > 0
    (dropped,) = run_workers(1, cases.run_all_dropped, [1, 5])
    assert dropped == {"updates": 0, "global_step": 0, "unchanged": True}


def _constant(value):
    return [[value] * length for length in cases.RECORDED_LENGTHS]


@pytest.mark.parametrize("world", [1, 2])
def test_dynamic_sampling_goes_on_until_enough_groups_have_a_signal(world):
    for result in run_workers(world, cases.run_dynamic_sampling):
        rows = result["history"]
        assert [row["train/sampling_rounds"] for row in rows] == [2.0, 2.0]
        # Two prompts per data rank and batch, four responses each; one of two prompts gives a signal.
        assert result["documents"] == [8 * world, 8 * world]
        assert result["global_step"] == result["updates"] == 2


def test_dynamic_sampling_gives_up_after_the_rounds():
    (result,) = run_workers(1, cases.run_dynamic_sampling, max_sampling_rounds=1)
    assert [row["train/sampling_rounds"] for row in result["history"]] == [1.0] * 4
    assert result["documents"] == [4] * 4


def test_truncated_responses_can_be_masked():
    (result,) = run_workers(1, cases.run_masked)
    assert result["train/truncated"] > 0
    assert result["masked"] == result["truncated"]


def test_a_reward_that_fails_on_one_rank_fails_on_all():
    with pytest.raises(WorkerError) as raised:
        run_workers(2, cases.run_failing_reward)
    assert len(raised.value.errors) == 2
    assert all("reward 'bad' failed on prompt" in error.message for error in raised.value.errors)


def test_a_prompt_that_cannot_be_answered_is_an_error_on_all_ranks():
    with pytest.raises(WorkerError) as raised:
        run_workers(2, cases.run_failing_generation)
    assert len(raised.value.errors) == 2
    assert all("300" in error.message for error in raised.value.errors), [e.message for e in raised.value.errors]


def test_a_missing_column_is_an_error_on_all_ranks():
    with pytest.raises(WorkerError, match="has no per-document column 'group_ids'") as raised:
        run_workers(2, cases.run_without_groups)
    assert raised.value.all_ranks_raised(ValueError)


def test_steps_that_are_not_finite_are_skipped_counted_and_end_the_run():
    (result,) = run_workers(1, cases.run_not_finite)
    assert result["skipped"] == [1.0, 1.0]
    assert result["global_step"] == 0
    assert result["unchanged"]
    assert "3 optimizer steps in a row were skipped" in result["error"]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"mini_batches": 0}, "mini_batches=0"),
        ({"update_epochs": 0}, "update_epochs=0"),
        ({"max_grad_norm": 0.0}, "max_grad_norm=0.0"),
        ({"max_tokens_per_micro_batch": 0}, "max_tokens_per_micro_batch=0"),
        ({"max_skipped_steps": -1}, "max_skipped_steps=-1"),
        ({"reward": {}}, "reward={} is empty"),
        ({"reference": "old"}, "reference='old'"),
        ({"temperature": 0.0}, "temperature=0.0"),
        ({"temperature": 0.5, "rollout": HFRollout(temperature=0.7)}, "differs from that of the rollout, 0.7"),
        ({"reference": None, "loss": PolicyLoss(kl_coef=0.1), "rollout": HFRollout()}, "reference=None"),
    ],
)
def test_arguments_out_of_range_are_refused(options, message):
    config = cases.ModelConfig(from_config={"model_type": "llama"})
    with pytest.raises(ValueError, match=message):
        PolicyModule(policy=config, **options)


def test_the_temperature_is_that_of_the_rollout():
    config = cases.ModelConfig(from_config={"model_type": "llama"})
    assert PolicyModule(policy=config, rollout=HFRollout(temperature=0.7)).temperature == 0.7
    assert PolicyModule(policy=config).temperature == 1.0
