"""Every option of a model and of the strategy changes something that can be seen, or is refused.

The checks are found by the name of the option, so a new option without one fails here.
"""

import dataclasses
import inspect
import json
import warnings
from collections import Counter
from collections.abc import Callable
from datetime import timedelta
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch.accelerators import CPUAccelerator
from lightning.pytorch.plugins.precision import DoublePrecision, FSDPPrecision, MixedPrecision
from lightning.pytorch.strategies import fsdp as lightning_fsdp
from peft import LoraConfig, get_peft_model
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from transformers import AutoConfig, AutoModelForCausalLM

from lightning_rl_engines import FSDPUlyssesStrategy, ModelConfig
from lightning_rl_engines.checkpoint.saver import CheckpointSaver
from lightning_rl_engines.models.huggingface import load_hf_model
from tests.models.architectures import save_small_model
from tests.models.test_architectures import build
from tests.strategies.checks import asked_of_torch
from tests.strategies.reference import make_documents
from tests.strategies.steps import assert_near, assert_same, copies, mine, score_loss, weights_of
from tests.support import WorkerError, run_workers
from tests.support.engine import EngineModule, with_engine
from tests.support.lightning_env import ExternalEnvironment
from tests.support.models import tiny_config, tiny_model_folder

CPU = torch.device("cpu")


def folder() -> str:
    return str(tiny_model_folder("llama"))


# ---- what a rank sees ----


class Collectives(TorchDispatchMode):
    """Counts collectives by operator and type."""

    def __init__(self) -> None:
        super().__init__()
        self.counts: Counter[str] = Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func.namespace == "c10d":
            dtypes = {str(item.dtype) for item in tree_leaves((args, kwargs)) if isinstance(item, torch.Tensor)}
            self.counts[f"{func.__name__} {sorted(dtypes)}"] += 1
        return func(*args, **(kwargs or {}))


def observe(config: ModelConfig, precision: str = "32-true", **strategy: Any) -> dict[str, Any]:
    """On a rank: what two micro-batches with gradients do and leave behind."""
    documents = make_documents(folder(), vocabulary=64)

    def body(module: EngineModule) -> dict[str, Any]:
        engine: Any = module.engine
        policy, calls = module.policy, Counter[str]()
        optimizer = torch.optim.AdamW(policy.parameters(), 1e-2)
        for item in policy.modules():
            item.register_forward_pre_hook(lambda owner, _: calls.update([type(owner).__name__]))
        found: dict[str, Any] = {"types": {item.dtype for item in policy.parameters()}}
        with engine.train_mode(policy, optimizer), Collectives() as collectives:
            engine.forward_backward_batch(policy, mine(engine, documents), score_loss, max_tokens_per_micro_batch=40)
            found["gradients"] = copies(engine.get_per_tensor_grad(policy))
            found["shard"] = sum(item.numel() for item in policy.parameters())
            optimizer.step()
        states = [value for state in optimizer.state.values() for value in state.values() if value.dim()]
        found["parameter_bytes"] = sum(item.untyped_storage().nbytes() for item in policy.parameters())
        found["state_bytes"] = sum(item.untyped_storage().nbytes() for item in states)
        found["kernel"] = policy.hf.config._attn_implementation
        return {**found, "calls": calls, "collectives": collectives.counts}

    return with_engine(body, config, precision=precision, **strategy)


@cache
def plain(precision: str = "32-true") -> dict[str, Any]:
    """What two ranks see without any option."""
    return run_workers(2, observe, ModelConfig(path=folder()), precision)[0]


def seen(options: dict[str, Any], precision: str = "32-true", **strategy: Any) -> dict[str, Any]:
    return run_workers(2, observe, ModelConfig(path=folder(), **options), precision, **strategy)[0]


def number(found: dict[str, Any], kind: str) -> int:
    return sum(count for name, count in found["collectives"].items() if kind in name)


# ---- options of a model ----


def check_path(tmp_path: Path) -> None:
    assert_same(weights_of(load_hf_model(ModelConfig(path=folder()))), weights_of(plain_hf()))


def plain_hf() -> Any:
    return AutoModelForCausalLM.from_pretrained(folder(), dtype=torch.float32)


def check_from_config(tmp_path: Path) -> None:
    wide = load_hf_model(ModelConfig(from_config=tiny_config("llama", vocab_size=80).to_dict()))
    assert wide.get_output_embeddings().weight.shape[0] == 80


def check_head(tmp_path: Path) -> None:
    with torch.no_grad():
        model = load_hf_model(ModelConfig(path=folder(), head="value"))
        assert model(input_ids=torch.arange(5)[None]).logits.shape == (1, 5, 1)


def check_dtype(tmp_path: Path) -> None:
    with pytest.raises(WorkerError, match=r"dtype='bfloat16'.*contradicts precision='32-true'"):
        seen({"dtype": "bfloat16"})
    assert seen({"dtype": "bfloat16"}, "bf16-true")["types"] == {torch.bfloat16}


def check_attn_implementation(tmp_path: Path) -> None:
    assert plain()["kernel"] == seen({"attn_implementation": "sdpa"})["kernel"] == "packed_sdpa"
    with pytest.raises(WorkerError, match="'packed_flex' has no backward on the CPU"):
        seen({"attn_implementation": "flex"})
    for kernel in ("varlen", "flash"):
        with pytest.raises(WorkerError, match=f"packed_{kernel}.*needs CUDA"):
            seen({"attn_implementation": kernel})


def check_freeze(tmp_path: Path) -> None:
    found = seen({"freeze": ["*mlp*"]})["gradients"]
    assert found.keys() == {name for name in plain()["gradients"] if "mlp" not in name}


def check_gradient_checkpointing(tmp_path: Path) -> None:
    found = seen({"gradient_checkpointing": True})
    assert found["calls"]["LlamaMLP"] == 2 * plain()["calls"]["LlamaMLP"]
    assert_near(found["gradients"], plain()["gradients"])


def check_use_liger(tmp_path: Path) -> None:
    with pytest.raises(WorkerError, match=r"use_liger=True.*'cpu'"):
        seen({"use_liger": True})


def check_compile(tmp_path: Path) -> None:
    # A backend that is not installed: nobody would ask for it were nothing compiled.
    with pytest.raises(WorkerError, match=r"compile_backend='tvm'.*does not work"):
        seen({"compile": True, "compile_backend": "tvm"})


def check_compile_backend(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"compile_backend='eager'.*compile=True"):
        ModelConfig(path="x", compile_backend="eager")
    with pytest.raises(WorkerError, match=r"compile_backend='nothing'.*is unknown"):
        seen({"compile": True, "compile_backend": "nothing"})


def check_check_forward(tmp_path: Path) -> None:
    scaled = save_small_model(tmp_path, "dory")  # its head does more than multiply
    with pytest.raises(WorkerError, match="check_forward=False"):
        run_workers(1, build, scaled, None, {}, {})
    run_workers(1, build, scaled, None, {"check_forward": False}, {})


def check_trust_remote_code(tmp_path: Path) -> None:
    remote = tmp_path / "remote"
    remote.mkdir()
    (remote / "config.json").write_text(
        json.dumps({"model_type": "ours", "auto_map": {"AutoConfig": "ours.OursConfig"}})
    )
    code = "from transformers import LlamaConfig\nclass OursConfig(LlamaConfig):\n    model_type = 'ours'\n"
    (remote / "ours.py").write_text(code)
    with pytest.raises(ValueError, match="trust_remote_code=True"):
        ModelConfig(path=str(remote)).load_hf_config()
    with pytest.MonkeyPatch.context() as patch:
        # Code from a folder is copied into a cache, which is to be ours.
        patch.setattr("transformers.dynamic_module_utils.HF_MODULES_CACHE", str(tmp_path / "modules"))
        patch.syspath_prepend(str(tmp_path / "modules"))
        config = ModelConfig(path=str(remote), trust_remote_code=True).load_hf_config()
    assert type(config).__name__ == "OursConfig"


def check_revision(tmp_path: Path) -> None:
    # A folder has no revisions, and there is no hub here: what the hub would be asked for.
    asked: list[Any] = []

    def record(owner: Any) -> Callable[..., Any]:
        original = owner.from_pretrained

        def from_pretrained(*args: Any, **kwargs: Any) -> Any:
            asked.append(kwargs["revision"])
            return original(*args, **{**kwargs, "revision": "main"})

        return from_pretrained

    with pytest.MonkeyPatch.context() as patch:
        for owner in (AutoConfig, AutoModelForCausalLM):
            patch.setattr(owner, "from_pretrained", record(owner))
        load_hf_model(ModelConfig(path=folder(), revision="v2"))
    assert asked == ["v2", "v2"]


def check_tokenizer(tmp_path: Path) -> None:
    assert ModelConfig(path="model").tokenizer_path == "model"
    assert ModelConfig(path="model", tokenizer="words").tokenizer_path == "words"


def check_seed(tmp_path: Path) -> None:
    made = [load_hf_model(ModelConfig(from_config=folder(), seed=seed)).lm_head.weight for seed in (0, 0, 1)]
    assert torch.equal(made[0], made[1])
    assert not torch.equal(made[0], made[2])


def check_lora(tmp_path: Path) -> None:
    found = seen({"lora": {"r": 2, "target_modules": ["q_proj"]}})["gradients"]
    assert len(found) == 4
    assert {min(item.shape) for item in found.values()} == {2}


def check_adapter(tmp_path: Path) -> None:
    with warnings.catch_warnings():
        # peft asks transformers 5.24 for a property that it renamed.
        warnings.filterwarnings("ignore", message=".is_gradient_checkpointing. is deprecated", category=FutureWarning)
        adapted = get_peft_model(plain_hf(), LoraConfig(r=3, target_modules=["v_proj"], task_type="CAUSAL_LM"))
    adapted.save_pretrained(tmp_path)
    found = seen({"adapter": str(tmp_path)})["gradients"]
    assert len(found) == 4
    assert {min(item.shape) for item in found.values()} == {3}


# ---- options of the strategy ----


def check_ulysses_sp_size(tmp_path: Path) -> None:
    found = seen({}, ulysses_sp_size=2)
    assert number(found, "alltoall_base") > number(plain(), "alltoall_base")
    assert_near(found["gradients"], plain()["gradients"])


def check_fsdp_size(tmp_path: Path) -> None:
    found = seen({}, fsdp_size=1)
    assert plain()["shard"] < 0.7 * found["shard"]
    assert_near(found["gradients"], plain()["gradients"])


def check_offload_param(tmp_path: Path) -> None:
    found = seen({}, offload_param=True)
    assert (found["parameter_bytes"], found["state_bytes"]) == (0, plain()["state_bytes"])
    assert plain()["parameter_bytes"] > 0


def check_offload_optimizer(tmp_path: Path) -> None:
    found = seen({}, offload_optimizer=True)
    assert (found["parameter_bytes"], found["state_bytes"]) == (plain()["parameter_bytes"], 0)
    assert plain()["state_bytes"] > 0


def check_reduce_dtype(tmp_path: Path) -> None:
    assert number(plain("bf16-mixed"), "_reduce_scatter_base_.default ['torch.float32']") > 0
    found = seen({}, "bf16-mixed", reduce_dtype="bfloat16")
    assert number(found, "_reduce_scatter_base_.default ['torch.bfloat16']") > 0
    assert number(found, "_reduce_scatter_base_.default ['torch.float32']") == 0


def check_defer_gradient_sync(tmp_path: Path) -> None:
    found = seen({}, defer_gradient_sync=True)
    assert 0 < number(found, "_reduce_scatter_base_") < number(plain(), "_reduce_scatter_base_")
    assert_near(found["gradients"], plain()["gradients"])


def save_once(path: str, **strategy: Any) -> list[bool]:
    """On a rank: whether a save in training was to go on in the background."""
    asked: list[bool] = []
    save = CheckpointSaver.save

    def record(saver: CheckpointSaver, *args: Any, background: bool) -> None:
        asked.append(background)
        save(saver, *args, background=background)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(CheckpointSaver, "save", record)
        with_engine(lambda module: module.trainer.save_checkpoint(path), ModelConfig(path=folder()), **strategy)
    return asked


def check_async_checkpoint(tmp_path: Path) -> None:
    assert run_workers(2, save_once, str(tmp_path / "a")) == [[False]] * 2
    assert run_workers(2, save_once, str(tmp_path / "b"), async_checkpoint=True) == [[True]] * 2


def check_process_group_backend(tmp_path: Path) -> None:
    for processes in (1, 2):
        assert asked_of_torch(FSDPUlyssesStrategy(), lightning_fsdp, processes)["backend"] == "gloo"
        strategy = FSDPUlyssesStrategy(process_group_backend="mpi")
        assert asked_of_torch(strategy, lightning_fsdp, processes)["backend"] == "mpi"


def check_timeout_seconds(tmp_path: Path) -> None:
    for processes in (1, 2):
        asked = asked_of_torch(FSDPUlyssesStrategy(timeout_seconds=7.0), lightning_fsdp, processes)
        assert asked["timeout"] == timedelta(seconds=7)


def check_accelerator(tmp_path: Path) -> None:
    accelerator = CPUAccelerator()
    assert FSDPUlyssesStrategy(accelerator=accelerator).accelerator is accelerator


def check_parallel_devices(tmp_path: Path) -> None:
    environment = ExternalEnvironment()
    strategy = FSDPUlyssesStrategy(parallel_devices=[torch.device("cuda", 3)], cluster_environment=environment)
    assert strategy.root_device == torch.device("cuda", 3)
    assert strategy.num_processes == 1


def check_cluster_environment(tmp_path: Path) -> None:
    environment = ExternalEnvironment()
    strategy = FSDPUlyssesStrategy(cluster_environment=environment)
    assert asked_of_torch(strategy, lightning_fsdp)["environment"] is environment


def check_precision_plugin(tmp_path: Path) -> None:
    assert FSDPUlyssesStrategy().precision_plugin.storage_dtype == torch.float32
    strategy = FSDPUlyssesStrategy(precision_plugin=FSDPPrecision("bf16-true"))
    assert strategy.precision_plugin.storage_dtype == torch.bfloat16
    # Of the plugins that the Trainer makes itself, the name counts.
    mixed = FSDPUlyssesStrategy(precision_plugin=MixedPrecision("bf16-mixed", "cpu"))
    assert mixed.precision_plugin.precision == "bf16-mixed"
    with pytest.raises(TypeError, match="does not fit"):
        FSDPUlyssesStrategy(precision_plugin=DoublePrecision())


MODEL_OPTIONS = [item.name for item in dataclasses.fields(ModelConfig)]
STRATEGY_OPTIONS = list(inspect.signature(FSDPUlyssesStrategy).parameters)


@pytest.mark.parametrize("name", MODEL_OPTIONS + STRATEGY_OPTIONS)
def test_the_option_does_something_or_is_refused(name: str, tmp_path: Path) -> None:
    check = globals().get(f"check_{name}")
    assert check is not None, f"the option {name!r} has no check here"
    check(tmp_path)


def test_there_are_no_checks_of_options_that_are_gone() -> None:
    checks = {name.removeprefix("check_") for name in globals() if name.startswith("check_")}
    assert checks == {*MODEL_OPTIONS, *STRATEGY_OPTIONS}
    assert not set(MODEL_OPTIONS) & set(STRATEGY_OPTIONS)


# ---- pairs ----


def look(config: ModelConfig, **strategy: Any) -> dict[str, torch.Tensor]:
    documents = make_documents(folder(), vocabulary=64)

    def body(module: EngineModule) -> dict[str, torch.Tensor]:
        experience = mine(module.engine, documents)
        return dict(module.engine.infer_batch(module.policy, experience, calculate_entropy=config.head == "lm").columns)

    return with_engine(body, config, **strategy)


@pytest.mark.parametrize("head", ["lm", "value"])
@pytest.mark.parametrize("strategy", [{}, {"ulysses_sp_size": 2}])
def test_kernels_and_heads_in_every_pair_give_the_same_columns(head: Any, strategy: dict[str, Any]) -> None:
    expected = run_workers(2, look, ModelConfig(path=folder(), head=head), **strategy)
    for options in ({"attn_implementation": "flex"}, {"attn_implementation": "sdpa", "gradient_checkpointing": True}):
        found = run_workers(2, look, ModelConfig(path=folder(), head=head, **options), **strategy)
        for rank, wanted in zip(found, expected, strict=True):
            assert rank.keys() == wanted.keys()
            for name, column in wanted.items():
                assert (rank[name] - column).abs().max() < 1e-5, (options, name)
                assert column.abs().max() > 0.1
