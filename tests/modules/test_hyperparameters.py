import functools
import io
from enum import Enum
from pathlib import Path

import pytest
import torch
import yaml
from lightning.pytorch.cli import LightningCLI

from lightning_rl_engines.algorithms import CISPOLoss, DrGRPOAdvantage, GSPOLoss, PolicyLoss
from lightning_rl_engines.data import LengthPenalty, Reward, exact_match
from lightning_rl_engines.models import ModelConfig
from lightning_rl_engines.modules import (
    ActorCriticModule,
    DPOModule,
    PolicyModule,
    RewardModelModule,
    RLModule,
    SFTModule,
)
from lightning_rl_engines.modules.hyperparameters import plain
from lightning_rl_engines.optim import WarmupCosine
from lightning_rl_engines.rollout import HFRollout

# LightningCLI itself calls a deprecated function of jsonargparse.
pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning")

CONFIG = {"model_type": "llama", "vocab_size": 8}


class Colour(Enum):
    RED = "red"


def is_plain(value):
    if isinstance(value, dict):
        return all(type(key) is str and is_plain(item) for key, item in value.items())
    if isinstance(value, list):
        return all(is_plain(item) for item in value)
    return value is None or type(value) in (bool, int, float, str)


@pytest.mark.parametrize(
    ("value", "expected"),
    [
        (Colour.RED, "red"),
        (Path("a/b"), "a/b"),
        (torch.bfloat16, "bfloat16"),
        ({"b", "a"}, ["a", "b"]),
        ((1, (2.0, None)), [1, [2.0, None]]),
        (exact_match, "lightning_rl_engines.data.reward_functions.exact_match"),
        (WarmupCosine, "lightning_rl_engines.optim.WarmupCosine"),
        (functools.partial(torch.optim.SGD, lr=0.1), {"class_path": "torch.optim.sgd.SGD", "init_args": {"lr": 0.1}}),
        (Reward(function=exact_match, weight=2.0), {"function": plain(exact_match), "weight": 2.0}),
        (ModelConfig(from_config=CONFIG, seed=3), {"from_config": CONFIG, "seed": 3}),
    ],
)
def test_arguments_become_plain_data(value, expected):
    assert plain(value) == expected
    assert is_plain(plain(value))


def test_instances_become_a_class_path_and_their_arguments():
    found = plain(PolicyLoss(clip_high=0.28, kl_coef=0.1))
    assert found["class_path"].endswith("PolicyLoss")
    assert found["init_args"]["clip_high"] == 0.28
    assert found["init_args"]["kl_coef"] == 0.1
    rollout = plain(HFRollout(dtype="bfloat16", stop=["\n", 7]))
    assert rollout["init_args"]["dtype"] == "bfloat16"
    assert rollout["init_args"]["stop"] == ["\n", 7]


def full_module():
    return PolicyModule(
        policy=ModelConfig(from_config=CONFIG),
        rollout=HFRollout(num_generations=2),
        reward={"exact": Reward(function=exact_match), "short": Reward(function=LengthPenalty(max_length=5))},
        loss=CISPOLoss(is_weight_high=2.0),
        advantage=DrGRPOAdvantage(),
        optimizer=functools.partial(torch.optim.SGD, lr=0.1),
        lr_scheduler=functools.partial(WarmupCosine, warmup_steps=2),
    )


def test_saved_hyperparameters_load_weights_only():
    module = full_module()
    assert is_plain(dict(module.hparams))
    file = io.BytesIO()
    torch.save({"hyper_parameters": dict(module.hparams)}, file)
    file.seek(0)
    loaded = torch.load(file, weights_only=True)["hyper_parameters"]
    assert loaded == dict(module.hparams)
    assert loaded["mini_batches"] == 1
    assert loaded["policy"] == {"from_config": CONFIG}


def test_a_subclass_adds_its_own_arguments():
    class Mine(PolicyModule):
        def __init__(self, *, bonus: float = 0.5, **options):
            super().__init__(**options)
            self.save_plain_hyperparameters(bonus=bonus)

    module = Mine(policy=ModelConfig(from_config=CONFIG), bonus=0.7)
    assert module.hparams["bonus"] == 0.7
    assert module.hparams["policy"] == {"from_config": CONFIG}


@pytest.fixture
def parse(tmp_path, monkeypatch):
    def run(*arguments):
        # Lightning warns about arguments that are passed while those of pytest are in sys.argv.
        monkeypatch.setattr("sys.argv", ["lightning-rl", *arguments])
        options = {"logger": False, "enable_checkpointing": False, "accelerator": "cpu", "devices": 1, "max_epochs": 1}
        return LightningCLI(
            RLModule,
            subclass_mode_model=True,
            run=False,
            save_config_callback=None,
            auto_configure_optimizers=False,
            seed_everything_default=False,
            trainer_defaults={**options, "default_root_dir": str(tmp_path), "enable_model_summary": False},
        )

    return run


def write(tmp_path, hparams, class_path):
    path = tmp_path / "config.yaml"
    path.write_text(yaml.safe_dump({"model": {"class_path": class_path, "init_args": hparams}}))
    return str(path)


def test_hyperparameters_of_a_script_are_a_configuration_of_the_command_line(parse, tmp_path):
    written = dict(full_module().hparams)
    module = parse("--config", write(tmp_path, written, "lightning_rl_engines.modules.PolicyModule")).model
    assert module.loss.is_weight_high == 2.0
    assert type(module.advantage) is DrGRPOAdvantage
    assert module.rollout.num_generations == 2
    assert module.rewards["exact"].function is exact_match
    assert module.rewards["short"].function.max_length == 5
    parameter = torch.nn.Parameter(torch.zeros(1))
    optimizer = module.optimizer([parameter])
    assert optimizer.defaults["lr"] == 0.1
    assert module.lr_scheduler(optimizer).warmup_steps == 2
    # What the command line saves is plain, too.
    assert module.hparams["policy"]["from_config"] == CONFIG


@pytest.mark.parametrize("module", [PolicyModule, ActorCriticModule, SFTModule, DPOModule, RewardModelModule])
def test_print_config_round_trips(module, parse, tmp_path, capsys):
    start = [
        f"--model={module.__name__}",
        f"--model.reward_model={{from_config: {CONFIG}, head: value}}"
        if module is RewardModelModule
        else f"--model.policy={{from_config: {CONFIG}}}",
        "--model.max_tokens_per_micro_batch=64",
        "--model.optimizer=AdamW",
        "--model.optimizer.lr=0.003",
        "--model.lr_scheduler=WarmupCosine",
    ]
    if module is ActorCriticModule:
        start += [f"--model.critic={{from_config: {CONFIG}, head: value, seed: 9}}", "--model.critic_optimizer=SGD"]
        start += ["--model.critic_optimizer.lr=0.5", "--model.critic_loss.value_clip=0.4", "--model.lam=0.5"]
        start += ["--model.critic_lr_scheduler=WarmupCosine", "--model.kl_in_reward_estimator=k2"]
    if module is PolicyModule:
        start += ["--model.reward={exact: {function: lightning_rl_engines.exact_match, weight: 0.7}}"]
        start += ["--model.rollout=HFRollout", "--model.rollout.max_new_tokens=3", "--model.loss=GSPOLoss"]
        start += [f"--model.reference={{from_config: {CONFIG}, seed: 4}}"]
    with pytest.raises(SystemExit):
        parse(*start, "--print_config")
    printed = capsys.readouterr().out
    path = tmp_path / "printed.yaml"
    path.write_text(printed)
    with pytest.raises(SystemExit):
        parse("--config", str(path), "--print_config")
    assert yaml.safe_load(capsys.readouterr().out)["model"] == yaml.safe_load(printed)["model"]
    built = parse("--config", str(path)).model
    assert type(built) is module
    assert built.max_tokens_per_micro_batch == 64
    assert built.optimizer([torch.nn.Parameter(torch.zeros(1))]).defaults["lr"] == 0.003
    torch.save(dict(built.hparams), path.with_suffix(".pt"))
    assert torch.load(path.with_suffix(".pt"), weights_only=True) == dict(built.hparams)
    if module is ActorCriticModule:
        assert built.critic_config == ModelConfig(from_config=CONFIG, head="value", seed=9)
        assert built.critic_optimizer([torch.nn.Parameter(torch.zeros(1))]).defaults["lr"] == 0.5
        assert (built.critic_loss.value_clip, built.lam, built.kl_in_reward_estimator) == (0.4, 0.5, "k2")
    if module is PolicyModule:
        assert type(built.loss) is GSPOLoss
        assert built.reference_config == ModelConfig(from_config=CONFIG, seed=4)
        assert built.rollout.max_new_tokens == 3
        assert (built.rewards["exact"].function, built.rewards["exact"].weight) == (exact_match, 0.7)
