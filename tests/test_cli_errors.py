"""What the command says about wrong configurations, from the messages that jsonargparse 4.53 gives."""

import pytest

from lightning_rl_engines.cli_errors import FOREIGN_OPTIONS, did_you_mean, explain, strategy_problem

OPTIONS = ["clip_high", "clip_low", "optimizer", "trainer.strategy", "trainer.max_steps", "ulysses_sp_size"]
CLASSES = ["PolicyModule", "SFTModule", "PolicyLoss", "HFRollout", "AdamW"]


def last_line(message: str) -> str:
    return explain(message, options=OPTIONS, classes=CLASSES).splitlines()[-1]


def test_a_misspelt_class_inside_a_union():
    message = """Parser key "model":
  Does not validate against any of the Union subtypes
  Subtypes: [<class 'lightning.pytorch.core.module.LightningModule'>, <class 'NoneType'>]
  Errors:
    - Expected a dot import path string: PolicyModul
    - Expected a <class 'NoneType'>
  Given value type: <class 'dict'>
  Given value: {'class_path': 'PolicyModul', 'init_args': {'policy': {'path': 'x'}}}"""
    assert last_line(message) == "error: Expected a dot import path string: PolicyModul Did you mean PolicyModule?"


def test_a_value_outside_a_literal():
    message = """Parser key "policy.dtype":
  Does not validate against any of the Union subtypes
  Subtypes: [typing.Literal['float32', 'bfloat16'], <class 'NoneType'>]
  Errors:
    - Expected a typing.Literal['float32', 'bfloat16']
    - Expected a <class 'NoneType'>
  Given value type: <class 'str'>
  Given value: flaot32"""
    assert last_line(message) == "error: policy.dtype=flaot32 is not valid; use one of 'float32', 'bfloat16'."


@pytest.mark.parametrize(
    ("message", "hint"),
    [
        ("Option 'clip_hihg' is not accepted", "Did you mean clip_high?"),
        ("Option 'epsilon_high' is not accepted", "`epsilon_high` is loss.clip_high here."),
        ("Option 'optimiser.class_path' is not accepted", "Did you mean optimizer?"),
        ("unrecognized arguments: --trainer.stratgy x", "Did you mean trainer.strategy?"),
        ("unrecognized arguments: --trainer.max_step=3", "Did you mean trainer.max_steps?"),
        ("argument subcommand: invalid choice: 'fitt' (choose from 'fit', 'validate')", "Did you mean fit?"),
        ("Option 'ulysses_sequence_parallel_size' is not accepted", "is strategy.ulysses_sp_size here."),
    ],
)
def test_the_last_words_say_what_was_meant(message, hint):
    assert last_line(message).endswith(hint)


def test_nothing_is_guessed_from_afar():
    assert last_line("Option 'xyzzy' is not accepted") == "error: Option 'xyzzy' is not accepted"
    assert did_you_mean("xyzzy", OPTIONS) == ""


def test_the_file_that_does_not_exist_is_named():
    message = "Parser key \"config\": File does not exist: '/nope.yaml'"
    assert explain(message, options=[], classes=[]) == "error: File does not exist: '/nope.yaml'"


def test_strategy_names():
    ours, known = ["fsdp_ulysses", "FSDPUlyssesStrategy"], ["fsdp_ulysses", "ddp"]
    assert strategy_problem("fsdp_ulysses", ours=ours, known=known) is None
    assert strategy_problem("ddp", ours=ours, known=known) is None
    assert strategy_problem("auto", ours=ours, known=known) is None
    assert strategy_problem("fsdp_ulises", ours=ours, known=known) == (
        "trainer.strategy='fsdp_ulises' does not exist; ours are fsdp_ulysses, FSDPUlyssesStrategy. "
        "Did you mean fsdp_ulysses?"
    )
    problem = strategy_problem("FSDPUlysesStrategy", ours=ours, known=known)
    assert problem is not None
    assert problem.endswith("Did you mean FSDPUlyssesStrategy?")


def test_foreign_names_lead_to_options_that_exist():
    import inspect

    import lightning_rl_engines as package

    own = {
        name
        for item in vars(package).values()
        if inspect.isclass(item) and item.__module__.startswith("lightning_rl_engines.")
        for name in inspect.signature(item).parameters
    }
    for foreign, here in FOREIGN_OPTIONS.items():
        for target in here.split(",")[0].split(" and "):
            name = target.split(" ")[0]
            if name.startswith(("loss.", "rollout.", "data.", "model.", "strategy.")):
                assert name.rsplit(".", 1)[1] in own, (foreign, here)
