"""Modules whose policy has an adapter: the reference is its base, the rollout gets merged weights."""

from typing import Any

import pytest
import torch

from lightning_rl_engines import ActorCriticModule, ModelConfig, PolicyLoss
from tests.modules.cases import (
    Spy,
    experience_loader,
    fit,
    history,
    loader,
    policy_module,
    prompts,
    recorded,
    spy_module,
)
from tests.modules.runs import CountingRollout
from tests.strategies.steps import plain_model
from tests.support import run_workers
from tests.support.lora import lora
from tests.support.models import reference_log_probs, tiny_model_folder


def adapted(**options: Any) -> ModelConfig:
    return ModelConfig(path=str(tiny_model_folder("llama")), lora=lora(), **options)


def run_quickstart(sp: int) -> dict[str, Any]:
    """Two updates with a KL term and a rollout."""
    rollout = CountingRollout(num_generations=4, max_new_tokens=6)
    module = policy_module(policy=adapted(), loss=PolicyLoss(kl_coef=0.1), rollout=rollout)
    # A data rank per row: all see the same prompts.
    fit(module, sp=sp, train=lambda: loader(prompts(4), 2), use_distributed_sampler=False)
    merged = dict(module.engine.get_per_tensor_param(module.policy, mode="merged"))
    return {
        "history": history(module),
        "built": module.reference is None,
        "received": rollout.received,
        "equal": all(torch.equal(rollout.last[name], merged[name]) for name in merged),
        "hparams": dict(module.hparams),
        "trained": sum(item.numel() for item in module.policy.parameters() if item.requires_grad),
        "state": sum(item.numel() for group in module.optimizers().param_groups for item in group["params"]),
    }


@pytest.mark.parametrize("sp", [1, 2])
def test_updates_with_an_adapter_and_a_kl_term(sp: int) -> None:
    for result in run_workers(2, run_quickstart, sp):
        first, second = result["history"]
        assert first["train/kl"] == pytest.approx(0.0, abs=1e-7)
        assert second["train/kl"] > 1e-6
        assert result["built"] and result["equal"]
        assert result["received"] == 3
        assert result["hparams"]["policy"]["lora"] == {"r": 4, "target_modules": "all-linear"}
        assert result["trained"] == result["state"]


def run_recorded(batches: int) -> dict[str, Any]:
    module = spy_module(policy=adapted(), loss=PolicyLoss(kl_coef=0.1))
    fit(module, train=lambda: experience_loader(*[recorded() for _ in range(batches)]), use_distributed_sampler=False)
    assert isinstance(module, Spy)
    return {"ref": module.seen.documents("ref_log_probs"), "old": module.seen.documents("old_log_probs")}


def test_reference_log_probabilities_are_those_of_the_base() -> None:
    experience = recorded()
    model = plain_model(tiny_model_folder("llama"))
    with torch.no_grad():
        expected, _ = reference_log_probs(model, experience.documents("input_ids"))
    for result in run_workers(1, run_recorded, 2):
        for found, old, value in zip(result["ref"], result["old"], expected, strict=True):
            torch.testing.assert_close(found[3:], value[3:], rtol=1e-5, atol=1e-5)
            assert not torch.allclose(old[3:], value[3:], rtol=1e-5, atol=1e-5)


def test_a_critic_gets_an_adapter_of_its_own() -> None:
    module = ActorCriticModule(policy=ModelConfig(path="model", lora=lora(task_type="CAUSAL_LM")))
    assert module.critic_config.lora == lora()
    with pytest.raises(ValueError, match="critic=None would start from the adapter"):
        ActorCriticModule(policy=ModelConfig(path="model", adapter="folder"))
