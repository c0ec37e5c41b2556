import pytest

from lightning_rl_engines.modules import SFTModule
from lightning_rl_engines.rollout import Prompt
from tests.modules import cases, runs
from tests.support import run_workers

CONFIG = cases.ModelConfig(from_config={"model_type": "llama"})


@pytest.fixture(scope="module")
def alone():
    return run_workers(1, runs.run_sft, 1, "sp")[0]


@pytest.mark.parametrize(
    ("world", "sp", "split"), [(2, 1, "sp"), (2, 2, "sp"), (2, 2, "tp"), (2, 2, "cp"), (2, 2, "pp")]
)
def test_the_policy_learns_the_responses(alone, world, sp, split):
    for result in (alone, *run_workers(world, runs.run_sft, sp, split)):
        rows = result["history"]
        if sp == world:  # the same documents in each step as on one process
            assert result["val"] == pytest.approx(alone["val"], rel=1e-5)
            for row, expected in zip(rows, alone["history"], strict=True):
                speed = {"train/tokens_per_second": row["train/tokens_per_second"]}
                assert row == pytest.approx({**expected, **speed}, rel=1e-5)
        assert result["updates"] == result["global_step"] == len(rows)
        assert rows[0]["train/nll"] > 3.5
        assert result["val"] < rows[0]["train/nll"] - 1.5
        assert rows[0]["train/loss"] == pytest.approx(rows[0]["train/nll"])


def test_only_the_response_is_learnt():
    module = SFTModule(policy=CONFIG, completion_column="answer")
    experience = module.to_experience(
        [Prompt(token_ids=[5, 6], columns={"answer": [7]}), Prompt(token_ids=[5], columns={"answer": [8, 9]})]
    )
    assert experience.lengths == (3, 3)
    assert experience["response_mask"].tolist() == [False, False, True, False, True, True]
    assert experience["input_ids"].tolist() == [5, 6, 7, 5, 8, 9]
    assert module.to_experience(experience) is experience


def test_a_prompt_without_a_response_is_named():
    module = SFTModule(policy=CONFIG)
    with pytest.raises(ValueError, match=r"Prompt 3 has no column 'completion'.*\['answer'\]"):
        module.to_experience([Prompt(token_ids=[5], index=3, columns={"answer": [1]})])
    with pytest.raises(ValueError, match="Prompt 4 has an empty response"):
        module.to_experience([Prompt(token_ids=[5], index=4, columns={"completion": []})])
