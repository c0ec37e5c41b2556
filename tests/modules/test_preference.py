"""Reward models and DPO: a step equals the plain models in every layout; they learn; data and exports fit together."""

import math

import pytest
import torch
from torch.nn.functional import logsigmoid
from transformers import AutoModelForCausalLM, AutoModelForTokenClassification

from lightning_rl_engines.models import ModelConfig
from lightning_rl_engines.modules import DPOModule, RewardModelModule
from lightning_rl_engines.rollout import Prompt
from tests.modules import preference_cases as cases
from tests.strategies.test_value import critic_folder, plain_model, plain_values
from tests.support import run_workers
from tests.support.models import reference_log_probs, tiny_model_folder

LAYOUTS = [(1, 1, "sp"), (2, 1, "sp"), (2, 2, "sp"), (2, 2, "tp")]
PIPELINE = (2, 2, "pp")


def documents(side):
    return [torch.tensor([*row["prompt"], *row[side]]) for row in cases.pairs()]


def naive_reward_step(name):
    model = plain_model(critic_folder(name))
    scores = [torch.stack([values[-1] for values in plain_values(model, documents(side))]) for side in SIDES]
    margins = scores[0] - scores[1]
    loss = -logsigmoid(margins).mean()
    loss.backward()
    return stepped(model), {"loss": loss.item(), "reward_margin": margins.mean().item()}


def naive_dpo_step(name):
    folder = tiny_model_folder(name)
    model = AutoModelForCausalLM.from_pretrained(folder, attn_implementation="eager", dtype=torch.float32).eval()
    ratios = []
    for side in SIDES:
        rows = [len(row["prompt"]) for row in cases.pairs()]
        found = reference_log_probs(model, documents(side))[0]
        sums = torch.stack([values[start:].sum() for values, start in zip(found, rows, strict=True)])
        # The reference is the policy before the step.
        ratios.append(sums - sums.detach())
    loss = -logsigmoid(0.5 * (ratios[0] - ratios[1])).mean()
    loss.backward()
    return stepped(model), {"loss": math.log(2), "reward_margin": 0.0}


SIDES = ("chosen", "rejected")
NAIVE = {"reward": naive_reward_step, "dpo": naive_dpo_step}


def stepped(model):
    with torch.no_grad():
        for parameter in model.parameters():
            parameter -= cases.LEARNING_RATE * parameter.grad
    return {name: tensor.detach() for name, tensor in model.state_dict().items()}


@pytest.mark.parametrize(
    ("kind", "model", "layouts"),
    [("reward", "llama", [*LAYOUTS, PIPELINE]), ("dpo", "llama_tied", LAYOUTS), ("dpo", "llama", [PIPELINE])],
)
def test_a_step_equals_the_plain_model(kind, model, layouts, tmp_path):
    weights, metrics = NAIVE[kind](model)
    file = cases.write_pairs(tmp_path)
    for world, sp, split in layouts:
        for result in run_workers(world, cases.run, kind, file, world, sp, 1, split=split, model=model):
            for name, tensor in result["weights"].items():
                torch.testing.assert_close(
                    tensor, weights[name], rtol=1e-5, atol=1e-6, msg=f"{world} {sp} {split} {name}"
                )
            row = result["history"][0]
            for name, value in metrics.items():
                assert row[f"train/{name}"] == pytest.approx(value, rel=1e-5, abs=1e-6)
            # After the step, on the same pairs.
            assert result["val"]["val/loss"] < row["train/loss"]
            assert result["global_step"] == 1


@pytest.mark.parametrize("kind", ["reward", "dpo"])
def test_pairs_are_learned(kind, tmp_path):
    folder = tmp_path / "hf"
    file = cases.write_pairs(tmp_path)
    results = run_workers(2, cases.run, kind, file, 2, 1, 15, export=str(folder))
    first, last = results[0]["history"][0], results[0]["history"][-1]
    assert last["train/loss"] < first["train/loss"] - 0.3
    assert last["train/reward_accuracy"] == results[0]["val"]["val/reward_accuracy"] == 1.0
    factory = AutoModelForTokenClassification if kind == "reward" else AutoModelForCausalLM
    state = factory.from_pretrained(folder).state_dict()
    assert all(torch.equal(tensor, state[name]) for name, tensor in results[0]["weights"].items())


def test_scores_are_learned_by_regression_and_predicted():
    (result,) = run_workers(1, cases.run_regression)
    assert [row["index"] for row in result["rows"]] == [0, 1, 2, 3, 4]
    assert [row["score"] for row in result["rows"]] == pytest.approx(result["targets"], abs=0.2)
    assert result["history"][0]["train/absolute_error"] > 0.4


def test_a_model_without_value_head_and_a_batch_of_prompts_are_refused():
    config = ModelConfig(from_config={"model_type": "llama"})
    with pytest.raises(ValueError, match=r"reward_model=ModelConfig\(head='lm'\) gives no scores"):
        RewardModelModule(reward_model=config)
    with pytest.raises(ValueError, match="DPOModule trains on experiences, and the batch is list"):
        DPOModule(policy=config).prepare([Prompt(token_ids=[1])])


def test_dpo_builds_a_reference_only_where_one_is_needed():
    config = ModelConfig(from_config={"model_type": "llama"})
    assert DPOModule(policy=config).reference_config == config
    assert DPOModule(policy=config, reference=None).reference_config is None
