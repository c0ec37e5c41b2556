"""PPO with a critic: an update equals the naive computation in every layout; warm-up, resuming, exports, refusals."""

import math

import pytest
import torch
from transformers import AutoModelForTokenClassification

from lightning_rl_engines.checkpoint import export_checkpoint
from lightning_rl_engines.models import ModelConfig
from lightning_rl_engines.models.huggingface import load_hf_model
from lightning_rl_engines.modules import ActorCriticModule
from lightning_rl_engines.rollout import HFRollout
from tests.modules import critic_cases as cases
from tests.support import WorkerError, run_workers

CONFIG = ModelConfig(from_config={"model_type": "llama", "vocab_size": 8}, freeze=["lm_head.*"], seed=3)


@pytest.fixture(scope="module")
def naive():
    return cases.naive_update()


TITAN = ("tp", "cp", "pp")
WHOLE, UNEVEN = [[0, 1, 2, 3, 4, 5]], [[0], [1, 2, 3, 4, 5]]


@pytest.mark.parametrize(
    ("parts", "sp", "split"),
    [(WHOLE, 1, "sp"), (UNEVEN, 1, "sp"), (WHOLE, 2, "sp"), (UNEVEN, 1, "tp"), *((WHOLE, 2, s) for s in TITAN)],
)
def test_an_update_equals_the_naive_computation(naive, parts, sp, split):
    for result in run_workers(len(parts) * sp, cases.run_update, parts, sp, split):
        for name, documents in result["columns"].items():
            for index, found in zip(result["mine"], documents, strict=True):
                mask = torch.tensor(cases.MASKS[index], dtype=torch.bool)
                torch.testing.assert_close(found[mask], naive[name][index][mask], rtol=1e-5, atol=1e-5)
                if name != "values":
                    assert not found[~mask].any()
        for model in ("policy", "critic"):
            assert result[model].keys() == naive[model].keys()
            for key, tensor in result[model].items():
                torch.testing.assert_close(tensor, naive[model][key], rtol=1e-5, atol=1e-5, msg=f"{model}.{key}")
        row = result["row"]
        assert row["train/advantage_mean"] == pytest.approx(naive["advantage_mean"], abs=1e-5)
        assert row["train/critic/return_mean"] == pytest.approx(naive["return_mean"], abs=1e-5)
        assert row["train/critic/explained_variance"] == pytest.approx(naive["explained_variance"], abs=1e-4)
        # Both clips bind for some tokens in the second epoch, so that they are part of the comparison.
        assert row["train/clip_fraction"] > 0
        assert row["train/critic/value_clip_fraction"] > 0
        assert row["train/critic/grad_norm"] > 0
        assert result["global_step"] == 4


def test_the_critic_warms_up_alone_and_each_schedule_has_the_length_of_its_own_optimizer():
    (result,) = run_workers(1, cases.run_warmup)
    assert result["moved"] == {"policy": [False, True, True], "critic": [True, True, True]}
    assert result["steps"] == [0, 2, 6, 10]
    assert result["lengths"] == [4, 6]
    first, second, third = result["history"]
    assert math.isnan(first["train/grad_norm"])
    assert all(row["train/critic/grad_norm"] > 0 for row in (first, second, third))
    assert all(row["train/grad_norm"] > 0 for row in (second, third))
    assert [row["train/lr"] for row in (second, third)] == pytest.approx([1e-3 * (1 + 3 / 4) / 2, 1e-3 * 3 / 8])
    rates = [row["train/critic/lr"] for row in (first, second, third)]
    assert rates == pytest.approx([1e-3 * 11 / 12, 1e-3 * 7 / 12, 1e-3 * 3 / 12])
    # Reference and policy are equal until the policy moves.
    assert first["train/reward_kl"] == second["train/reward_kl"] == 0.0 != third["train/reward_kl"]
    for row in (first, second, third):
        assert row["train/rollout_log_prob_gap"] < 1e-5


def test_a_resumed_run_continues_exactly_and_the_critic_can_be_exported(tmp_path):
    results = run_workers(2, cases.run_resume, str(tmp_path))
    for result in results:
        straight, resumed = result["weights"]
        for model, tensors in straight.items():
            assert all(torch.equal(tensor, resumed[model][name]) for name, tensor in tensors.items())
        assert result["rows"][0] == result["rows"][1]
        assert result["global_step"] == 6
    exported = export_checkpoint(tmp_path / "step=6.ckpt", tmp_path / "from_checkpoint", model="critic")
    for folder in (exported, tmp_path / "critic"):
        model = AutoModelForTokenClassification.from_pretrained(folder)
        state = model.state_dict()
        assert model.config.num_labels == 1
        assert state.keys() == straight["critic"].keys() >= {"score.weight", "score.bias"}
        assert all(torch.equal(tensor, state[name]) for name, tensor in straight["critic"].items())
        again = load_hf_model(ModelConfig(path=str(folder), head="value", seed=77)).state_dict()
        assert all(torch.equal(tensor, again[name]) for name, tensor in state.items())
        assert not (folder / "generation_config.json").exists()


def test_the_critic_is_that_of_the_policy_unless_named():
    assert ActorCriticModule(policy=CONFIG).critic_config == ModelConfig(
        from_config=CONFIG.from_config, head="value", seed=3
    )
    named = ModelConfig(path="a/critic", head="value")
    module = ActorCriticModule(policy=CONFIG, critic=named)
    assert module.critic_config == named
    assert module.hparams["critic"] == {"path": "a/critic", "head": "value"}
    assert "advantage" not in module.hparams


def test_a_kl_in_the_reward_brings_a_reference():
    assert ActorCriticModule(policy=CONFIG).reference_config is None
    assert ActorCriticModule(policy=CONFIG, kl_in_reward=0.1).reference_config == CONFIG


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"gamma": 1.5}, "gamma=1.5 must be at least 0 and at most 1"),
        ({"lam": -0.1}, r"lam=-0\.1"),
        ({"kl_in_reward": -1.0}, r"kl_in_reward=-1\.0"),
        ({"kl_in_reward": float("nan")}, "kl_in_reward=nan"),
        ({"kl_in_reward_estimator": "k3+"}, r"kl_in_reward_estimator='k3\+'"),
        ({"kl_in_reward": 0.1, "reference": None, "rollout": HFRollout()}, "reference=None"),
        ({"critic": CONFIG}, r"critic=ModelConfig\(head='lm'\) gives no values"),
        ({"critic_warmup_updates": -1}, "critic_warmup_updates=-1"),
        ({"critic_max_tokens_per_micro_batch": 0}, "critic_max_tokens_per_micro_batch=0"),
        ({"mini_batches": 0}, "mini_batches=0"),
    ],
)
def test_arguments_out_of_range_are_refused(options, message):
    with pytest.raises(ValueError, match=message):
        ActorCriticModule(policy=CONFIG, **options)


def constant(value):
    return [[value] * len(mask) for mask in cases.MASKS]


def test_ready_columns_are_used_and_steps_of_the_policy_that_are_not_finite_end_the_run():
    """The critic's steps in between are fine, and do not count for the policy's."""
    given = {"advantages": [math.nan] * len(cases.MASKS), "returns": constant(1.0), "values": constant(0.5)}
    (result,) = run_workers(1, cases.run_given, **given)
    assert result["advantages"].isnan().all() and (result["values"] == 0.5).all()
    assert "3 optimizer steps in a row were skipped" in result["error"]
    assert [row["train/critic/return_mean"] for row in result["history"]] == [1.0, 1.0]
    assert [row["train/skipped_steps"] for row in result["history"]] == [1.0, 1.0]
    assert result["global_step"] == 3
    start = load_hf_model(ModelConfig(path=cases.folders()[0])).state_dict()
    assert all(torch.equal(tensor, start[name]) for name, tensor in result["policy"].items())
    # Returns do not vary, so there is no variance to explain.
    assert "train/critic/explained_variance" not in result["history"][0]


def test_advantages_without_returns_are_refused_on_all_ranks():
    with pytest.raises(WorkerError, match="of 'advantages' and 'returns' only one") as raised:
        run_workers(2, cases.run_given, advantages=[1.0] * len(cases.MASKS))
    assert raised.value.all_ranks_raised(ValueError)
