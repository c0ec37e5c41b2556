"""The model summary shows whole models and what of them is trained, however they are sharded."""

import logging
import re
import warnings
from typing import Any

import pytest
from lightning.pytorch import LightningModule
from lightning.pytorch.callbacks import ModelSummary, RichModelSummary
from peft import get_peft_model
from rich import get_console
from torch import nn
from transformers import AutoModelForTokenClassification

from lightning_rl_engines import FSDPUlyssesStrategy, ModelConfig
from lightning_rl_engines.callbacks import RichShardedModelSummary, ShardedModelSummary
from lightning_rl_engines.callbacks.start_card import work_rows
from lightning_rl_engines.models.huggingface import load_hf_model
from lightning_rl_engines.models.sizes import whole_sizes
from lightning_rl_engines.modules.summary import sharded_summaries
from tests.modules.cases import experience_loader, policy_module, recorded
from tests.strategies.steps import plain_model
from tests.support import run_workers
from tests.support.engine import EngineModule, with_engine
from tests.support.lightning_env import make_trainer
from tests.support.lora import lora
from tests.support.models import tiny_config, tiny_model_folder

LAYOUTS: list[tuple[int, dict[str, Any]]] = [
    (1, {}),
    (2, {}),
    (2, {"fsdp_size": 1, "ulysses_sp_size": 2}),
    (4, {"fsdp_size": 2}),
]
ADAPTER: dict[str, Any] = {"modules_to_save": ["norm"]}


def model_config(adapter: bool) -> ModelConfig:
    return ModelConfig(path=str(tiny_model_folder("llama_tied")), lora=lora(**ADAPTER) if adapter else None)


def elements(module: nn.Module, trained_only: bool = False) -> int:
    return sum(item.numel() for item in module.parameters() if item.requires_grad or not trained_only)


def plain_sizes(adapter: bool) -> tuple[int, int]:
    """Elements of the plain model, with stock peft's adapter on it, and of what is trained."""
    model: Any = plain_model(tiny_model_folder("llama_tied"))
    if adapter:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            model = get_peft_model(model, lora(**ADAPTER))
    return elements(model), elements(model, trained_only=True)


# ---- sizes ----


def sizes(configs: dict[str, ModelConfig], **strategy: Any) -> dict[str, Any]:
    def body(module: EngineModule) -> dict[str, Any]:
        found = {}
        module.frozen = module.engine.build_model(model_config(False), trainable=False)
        for name in (*configs, "frozen"):
            model = getattr(module, name)
            whole = whole_sizes(model)
            trained = sum(whole[id(item)] for item in model.parameters() if item.requires_grad)
            found[name] = (sum(whole.values()), trained, elements(model))
        return found

    return with_engine(body, configs, **strategy)


@pytest.mark.parametrize(("world", "strategy"), LAYOUTS)
def test_sizes_are_those_of_the_plain_model_on_every_rank(world: int, strategy: dict[str, Any]) -> None:
    experts = tiny_config("qwen3").to_dict()
    experts |= {"model_type": "qwen3_moe", "num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16}
    configs = {
        "full": model_config(False),
        "adapted": model_config(True),
        "experts": ModelConfig(from_config=experts),
        "critic": ModelConfig(path=str(tiny_model_folder("llama")), head="value"),
        "partly": ModelConfig(path=str(tiny_model_folder("llama")), freeze=["*mlp*"]),
    }
    critic = AutoModelForTokenClassification.from_config(tiny_config("llama", num_labels=1))
    partly = plain_model(tiny_model_folder("llama"))
    frozen = sum(item.numel() for name, item in partly.named_parameters() if "mlp" in name)
    whole, moe = plain_sizes(False)[0], elements(load_hf_model(configs["experts"]))
    expected = {
        "full": (whole, whole),
        "adapted": plain_sizes(True),
        "experts": (moe, moe),
        "critic": (elements(critic), elements(critic)),
        "partly": (elements(partly), elements(partly) - frozen),
        "frozen": (whole, 0),
    }
    ranks = run_workers(world, sizes, configs, **strategy)
    for found in ranks:
        assert {name: item[:2] for name, item in found.items()} == expected
    held = sum(found["full"][2] for found in ranks)
    assert whole * world // strategy.get("fsdp_size", world) == held  # a rank's own count is not the model's


# ---- the table ----


def output(module: LightningModule, loader: Any, **options: Any) -> str:
    """On a rank: what a fit writes as its summary, into the log or on the console."""
    lines: list[str] = []

    class Lines(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            lines.append(record.getMessage())

    logger, handler = logging.getLogger("lightning.pytorch.callbacks.model_summary"), Lines()
    level = logger.level
    logger.addHandler(handler)
    logger.setLevel(logging.INFO)
    try:
        options = {"enable_model_summary": True, "use_distributed_sampler": False, "max_steps": 1, **options}
        with get_console().capture() as captured:
            make_trainer(FSDPUlyssesStrategy(), **options).fit(module, loader)
    finally:
        logger.removeHandler(handler)
        logger.setLevel(level)
    return "\n".join([*lines, captured.get()]).strip()


def fit_policy(adapter: bool, precision: str, callbacks: list[Any]) -> tuple[str, list[str]]:
    module = policy_module(policy=model_config(adapter), rollout=None, reward=None)
    text = output(module, experience_loader(recorded()), precision=precision, callbacks=callbacks)
    return text, [value for name, value in work_rows(module.trainer, module) if name == "module"]


def shown(number: int) -> str:
    return f"{number / 1000:.1f} K" if number >= 1000 else str(number)


@pytest.mark.parametrize(("precision", "size"), [("32-true", 4), ("bf16-mixed", 4), ("bf16-true", 2)])
@pytest.mark.parametrize("adapter", [False, True])
@pytest.mark.parametrize("callbacks", [[], [ModelSummary()]], ids=["default", "plain"])
def test_lightnings_table_has_true_sizes(adapter: bool, precision: str, size: int, callbacks: list[Any]) -> None:
    total, trained = plain_sizes(adapter)
    (first, (card,)), (second, _) = run_workers(2, fit_policy, adapter, precision, callbacks)
    assert second == "", "rank 0 alone shows it"
    assert re.search(rf"policy +\S HFTokenModel +\S +{shown(total)} +\S +\d", first), first
    # A base has the precision's type, an adapter fp32.
    megabytes = ((total - trained) * size + trained * 4 if adapter else total * size) / 1e6
    numbers = {
        "Trainable params": shown(trained),
        "Non-trainable params": shown(total - trained),
        "Total params": shown(total),
        "Total estimated model params size (MB)": f"{megabytes:.3f}",
    }
    for name, number in numbers.items():
        line = f"{number} +{re.escape(name)}" if callbacks else f"{re.escape(name)}: {number} "
        assert re.search(f"^{line}", first, re.MULTILINE), (name, number, first)
    assert f"{total:,} parameters" in card
    assert (f"{trained:,} of them trained" in card) == adapter


def fit_deep() -> str:
    module = EngineModule({"policy": model_config(False)}, lambda module: None, 0.1)
    return output(module, [0, 1], max_steps=-1, max_epochs=1, callbacks=[ShardedModelSummary(max_depth=4)])


def test_parts_are_shown_without_the_wrappers_of_fsdp() -> None:
    table = run_workers(2, fit_deep)[0]
    names = re.findall(r"\| (policy\S*)", table)
    assert names[:4] == ["policy", "policy.hf", "policy.hf.model", "policy.hf.model.embed_tokens"]
    assert "fsdp" not in table.lower()
    layers = plain_model(tiny_model_folder("llama_tied")).model.layers
    assert re.search(rf"policy.hf.model.layers +\| ModuleList +\| {shown(elements(layers))} ", table), table


def test_lightnings_own_summaries_are_replaced_with_their_options() -> None:
    given = [RichModelSummary(max_depth=3, header_style="red"), ModelSummary(max_depth=-1), ShardedModelSummary()]
    rich, plain = sharded_summaries(given)
    assert type(rich) is RichShardedModelSummary
    assert (rich.max_depth, rich.table_options) == (3, {"header_style": "red"})
    assert type(plain) is ShardedModelSummary
    assert plain.max_depth == -1


class Plain(LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(3, 4)


def test_a_module_without_our_models_has_lightnings_table() -> None:
    found: list[Any] = []

    class Recorded(ShardedModelSummary):
        @staticmethod
        def summarize(summary_data: Any, *totals: Any, **options: Any) -> None:
            found.append((dict(summary_data)["Params"], totals[:2]))

    class AnyTrainer:
        is_global_zero = True
        strategy = None

    Recorded().on_fit_start(AnyTrainer(), Plain())  # type: ignore[arg-type]
    assert found == [(["16  "], (16, 16))]
