import math

import pytest
import torch
from lightning.pytorch import Trainer
from lightning.pytorch.utilities.exceptions import MisconfigurationException

from lightning_rl_engines.algorithms import PolicyLoss
from lightning_rl_engines.modules import PolicyModule
from lightning_rl_engines.modules.optimization import build_optimizer, fill_total_steps
from lightning_rl_engines.optim import WarmupConstant, WarmupCosine
from tests.modules import cases, runs
from tests.support import run_workers

CONFIG = cases.ModelConfig(from_config={"model_type": "llama"})
QUIET = {
    "accelerator": "cpu",
    "max_epochs": 1,
    "logger": False,
    "enable_checkpointing": False,
    "enable_progress_bar": False,
}


def test_without_a_trainer_the_error_names_the_export_command():
    with pytest.raises(MisconfigurationException, match="lightning-rl export --checkpoint"):
        PolicyModule(policy=CONFIG).configure_model()


def test_loading_without_a_trainer_names_the_export_command(tmp_path):
    with pytest.raises(MisconfigurationException, match="lightning-rl export --checkpoint"):
        PolicyModule.load_from_checkpoint(tmp_path)


@pytest.mark.parametrize("strategy", ["auto", "ddp"])
def test_a_strategy_that_is_no_engine_is_refused_with_the_one_to_use(strategy):
    trainer = Trainer(strategy=strategy, devices=1, **QUIET)
    with pytest.raises(MisconfigurationException, match='strategy="fsdp_ulysses"'):
        trainer.fit(PolicyModule(policy=CONFIG), cases.loader(cases.prompts(), 2))


def test_gradient_clipping_by_the_trainer_names_max_grad_norm():
    trainer = cases.make_trainer(cases.FSDPUlyssesStrategy(), gradient_clip_val=0.5, max_epochs=1)
    with pytest.raises(MisconfigurationException, match=r"PolicyModule\(max_grad_norm=0.5\)"):
        trainer.fit(PolicyModule(policy=CONFIG), cases.loader(cases.prompts(), 2))


def test_gradient_accumulation_by_the_trainer_names_the_token_budget():
    trainer = cases.make_trainer(cases.FSDPUlyssesStrategy(), accumulate_grad_batches=2, max_epochs=1)
    with pytest.raises(MisconfigurationException, match="max_tokens_per_micro_batch"):
        trainer.fit(PolicyModule(policy=CONFIG), cases.loader(cases.prompts(), 2))


def test_a_second_fit_goes_on_with_the_same_model_and_optimizer():
    (result,) = run_workers(1, runs.run_two_fits)
    assert result["same"] == (True, True)
    assert result["kept"]
    assert result["updates"] == result["global_step"] == 4
    before, after = result["rates"]
    # The schedule was two steps long, and is four steps long once the limit is raised.
    assert before == [pytest.approx(1e-3), pytest.approx(5e-4)]
    assert after[2:] == [pytest.approx(1e-3 * 0.5 * (1 + math.cos(math.pi * step / 4))) for step in (2, 3)]


def test_another_trainer_builds_the_module_anew_and_says_so():
    (result,) = run_workers(1, runs.run_rebuilt)
    assert result == {"rebuilt": True, "warned": True, "updates": 1}


def test_a_checkpoint_holds_updates_history_and_plain_hyperparameters(tmp_path):
    (result,) = run_workers(1, runs.run_checkpoint, str(tmp_path))
    assert result["equal"]
    assert result["history"] == [1.0, 2.0]
    assert result["rows_equal"]
    assert result["hparams"]["optimizer"] == "tests.modules.cases.adam"
    assert result["hparams"]["rollout"]["class_path"].endswith(".HFRollout")
    assert result["hparams"]["reward"]["long"] == {"function": "tests.modules.cases.long_response", "weight": 0.5}
    assert result["rollout"]


@pytest.mark.parametrize(
    ("limits", "expected"),
    [
        ({"max_epochs": 3}, 3 * 4 * 6),
        ({"max_epochs": 3, "max_steps": 10}, 10),
        ({"max_epochs": 1, "max_steps": 100}, 24),
        ({"max_epochs": -1, "max_steps": 50}, 50),
        ({"max_epochs": -1}, None),
    ],
)
def test_the_length_of_a_fit_is_counted_in_optimizer_steps(limits, expected):
    assert run_workers(1, runs.run_length, **limits) == [expected]


def test_an_open_schedule_needs_a_limit_only_if_it_decays():
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=1.0)
    with pytest.raises(ValueError, match="give max_steps or max_epochs"):
        fill_total_steps(WarmupCosine(optimizer), None)
    constant = WarmupConstant(optimizer)
    fill_total_steps(constant, None)
    assert constant.total_steps is None
    cosine = WarmupCosine(optimizer)
    fill_total_steps(cosine, 12)
    assert cosine.total_steps == 12


def test_only_trainable_parameters_are_optimized():
    model = torch.nn.Sequential(torch.nn.Linear(2, 2), torch.nn.Linear(2, 1))
    model[0].requires_grad_(False)
    optimizer, scheduler = build_optimizer(model, cases.sgd, None)
    assert scheduler is None
    assert [id(p) for p in optimizer.param_groups[0]["params"]] == [id(p) for p in model[1].parameters()]
    with pytest.raises(ValueError, match="no trainable parameter"):
        build_optimizer(model.requires_grad_(False), cases.sgd, None)


def test_a_schedule_that_waits_for_a_metric_is_refused():
    with pytest.raises(ValueError, match="lr_scheduler=ReduceLROnPlateau"):
        build_optimizer(torch.nn.Linear(1, 1), cases.sgd, torch.optim.lr_scheduler.ReduceLROnPlateau)


def test_the_loss_default_is_not_shared_state():
    first, second = PolicyModule(policy=CONFIG), PolicyModule(policy=CONFIG, loss=PolicyLoss(clip_high=0.28))
    assert (first.loss.clip_high, second.loss.clip_high) == (0.2, 0.28)
