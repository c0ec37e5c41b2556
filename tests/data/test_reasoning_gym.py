from pathlib import Path

import pytest

from lightning_rl_engines.data import ReasoningGymDataModule, ReasoningGymReward, Reward, compute_rewards
from lightning_rl_engines.rollout import Generation, Prompt
from tests.rollout.stubs import save_character_tokenizer

OPTIONS = {"chain_sum": {"min_terms": 2, "max_terms": 2, "min_digits": 1, "max_digits": 1}}


def _data(tmp_path: Path, **options: object) -> ReasoningGymDataModule:
    arguments = {"task_options": OPTIONS, "size": 6, "eval_size": 4, "batch_size": 2, **options}
    return ReasoningGymDataModule(
        tasks=["chain_sum", "gcd"], tokenizer=save_character_tokenizer(tmp_path), **arguments  # type: ignore[arg-type]
    )  # fmt: skip


def _prompts(data: ReasoningGymDataModule) -> list[Prompt]:
    return [prompt for batch in data.train_dataloader() for prompt in batch]


def test_prompts_and_their_verifier(tmp_path: Path) -> None:
    data = _data(tmp_path, shuffle=False)
    data.setup("fit")
    prompts = _prompts(data)
    assert [prompt.columns["task"] for prompt in prompts] == ["chain_sum", "gcd"] * 3
    again = _data(tmp_path, shuffle=False)
    again.setup("fit")
    assert [prompt.text for prompt in _prompts(again)] == [prompt.text for prompt in prompts]
    other = _data(tmp_path, shuffle=False, seed=1)
    other.setup("fit")
    assert [prompt.text for prompt in _prompts(other)] != [prompt.text for prompt in prompts]
    (validation,) = data.val_dataloader()
    assert len([prompt for batch in validation for prompt in batch]) == 4

    def answers(form: str) -> list[Generation]:
        texts = [form.format(prompt.columns["answer"]) for prompt in prompts]
        return [Generation(token_ids=[1], log_probs=[0.0], finish_reason="stop", text=text) for text in texts]

    cases = [
        (ReasoningGymReward(), "I count 77 and say {}.", 1.0),
        (ReasoningGymReward(extract="answer_tag"), "<answer>{}</answer> is right", 1.0),
        (ReasoningGymReward(extract="all"), " {} ", 1.0),
        (ReasoningGymReward(), "{} or 123456", 0.0),
        (ReasoningGymReward(extract="answer_tag"), "{}", 0.0),
    ]
    for function, form, expected in cases:
        total, _ = compute_rewards({"verifier": Reward(function)}, prompts, answers(form))
        # Some verifiers give a little for any number.
        assert [float(score == 1.0) for score in total] == [expected] * 6


def test_errors(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="names \\['other'\\]"):
        _data(tmp_path, task_options={"other": {}})
    with pytest.raises(ValueError, match="size=1"):
        _data(tmp_path, size=1)
    with pytest.raises(ValueError, match="extract='first'"):
        ReasoningGymReward(extract="first")  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="refuses task 'no_such_task'"):
        ReasoningGymDataModule(tasks="no_such_task").setup("fit")
    with pytest.raises(ValueError, match=r"refuses task 'gcd' with options {'bogus': 1}"):
        ReasoningGymDataModule(tasks="gcd", task_options={"gcd": {"bogus": 1}}).setup("fit")
