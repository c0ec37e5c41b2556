import pytest
import torch

from lightning_rl_engines import PolicyModule, RolloutCorrection
from tests.modules import cases
from tests.modules.test_policy import SPLITS, UNEVEN, close, run_experience
from tests.support.models import tiny_config


@pytest.mark.parametrize("splits", [SPLITS, UNEVEN], ids=["even", "uneven"])
def test_a_correction_weighs_tokens_once_per_update_and_does_not_depend_on_the_layout(splits):
    correction = RolloutCorrection(kind="tis", level="token", upper=1.5)
    plain = run_experience(1, splits)[0]
    single = run_experience(1, splits, correction=correction)[0]
    assert not close(plain["weights"], single["weights"])
    row = single["history"][0]
    assert 0 < row["train/rollout_ess"] <= 1
    assert 0 < row["train/rollout_truncated_fraction"] <= 1
    for result in run_experience(2, splits, correction=correction):
        assert close(result["weights"], single["weights"])
        for name in ("train/rollout_ess", "train/rollout_truncated_fraction", "train/rollout_weight_mean"):
            assert result["history"][0][name] == pytest.approx(row[name], rel=1e-6)


def test_rejected_documents_leave_the_loss():
    # The recorded sampler is far from the policy, so a tight threshold rejects everything and nothing moves.
    rejecting = RolloutCorrection(kind="none", reject_kl="k3", reject_threshold=1e-6)
    result = run_experience(1, SPLITS, correction=rejecting)[0]
    assert result["history"][0]["train/rollout_rejected_fraction"] == 1
    start = cases.weights_of_folder("llama")
    assert all(torch.equal(result["weights"][name], start[name]) for name in start)


def test_a_correction_needs_two_policies():
    with pytest.raises(ValueError, match="recompute_old_log_probs=False"):
        PolicyModule(
            policy=cases.ModelConfig(from_config=tiny_config("llama").to_dict()),
            correction=RolloutCorrection(),
            recompute_old_log_probs=False,
        )
