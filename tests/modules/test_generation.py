import pytest

from lightning_rl_engines.modules import PolicyModule
from tests.modules import cases, runs
from tests.support import run_workers


@pytest.mark.parametrize(("world", "duplicates"), [(1, True), (2, True), (2, False)])
def test_validation_is_the_mean_over_real_prompts(world, duplicates):
    for result in run_workers(world, runs.run_validation, duplicates):
        metrics = result["metrics"]
        assert metrics["val/reward_even"] == pytest.approx(result["expected"], rel=1e-6)
        assert metrics["val/reward"] == pytest.approx(metrics["val/reward_even"] + 0.5 * metrics["val/reward_long"])
        assert 1 <= metrics["val/response_length"] <= 6
        for row in result["samples"]:
            assert row["reward"] == row["reward_even"] + 0.5 * (row["reward_long"] or 0.0)
            assert set(row) >= {"prompt", "response", "tokens", "finish_reason"}


def test_prediction_returns_generations_and_log_probs():
    (result,) = run_workers(1, runs.run_prediction)
    assert [row["index"] for row in result["rows"]] == [0, 1, 2]
    assert result["rows"][1]["columns"] == {"answer": "4"}
    assert len(result["generated"]) == 3
    for row, recorded in zip(result["rows"], result["recorded"], strict=True):
        assert recorded["token_ids"] == row["token_ids"]
        assert recorded["log_probs"] == pytest.approx(row["log_probs"], abs=1e-5)


def test_the_rollout_gets_weights_before_the_first_generation_and_after_each_update():
    (result,) = run_workers(1, runs.run_stale_rollout)
    # Once for the sanity check, where training starts too, and once after each of two updates.
    assert result == {"received": 3, "equal": True}


def test_what_is_missing_is_named():
    module = PolicyModule(policy=cases.ModelConfig(from_config={"model_type": "llama"}))
    with pytest.raises(ValueError, match=r"PolicyModule\(rollout=None\)"):
        module.require_rollout()
    with pytest.raises(ValueError, match=r"PolicyModule\(reward=None\)"):
        module.require_rewards()
    with pytest.raises(ValueError, match="has no tokenizer"):
        _ = module.tokenizer
