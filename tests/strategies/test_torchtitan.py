"""The strategy as Lightning users meet it: by name, as an instance, without torchtitan; options that are refused."""

import importlib.metadata
import subprocess
import sys
import textwrap
from typing import Any

import pytest
import torch
import torch.distributed as dist
from lightning import Trainer
from lightning.pytorch.accelerators import CPUAccelerator
from lightning.pytorch.strategies import StrategyRegistry, model_parallel
from lightning.pytorch.utilities.exceptions import MisconfigurationException
from torch.utils.data import DataLoader

from lightning_rl_engines import EnginePrecision, Experience, ModelConfig, SFTLoss, TorchTitanStrategy
from lightning_rl_engines.algorithms import LossOutput
from lightning_rl_engines.models import titan_library
from tests.strategies.steps import score_loss
from tests.support import WorkerError, run_workers
from tests.support.engine import EngineModule, with_engine
from tests.support.lightning_env import make_trainer
from tests.support.models import tiny_model_folder
from tests.support.shell import REPOSITORY


def test_the_trainer_finds_it_by_name():
    trainer = Trainer(strategy="torchtitan", accelerator="cpu", devices=1, logger=False, enable_checkpointing=False)
    assert isinstance(trainer.strategy, TorchTitanStrategy)
    assert "torchtitan" in StrategyRegistry


@pytest.mark.parametrize("precision", ["32-true", "bf16-mixed", "bf16-true"])
def test_precisions_it_has(precision):
    trainer = Trainer(strategy="torchtitan", accelerator="cpu", devices=1, precision=precision, logger=False)
    assert trainer.strategy.precision_plugin.precision == precision


@pytest.mark.parametrize("strategy", ["torchtitan", TorchTitanStrategy(), "fsdp_ulysses"])
def test_fp16_as_a_plugin(strategy):
    plugin = EnginePrecision("16-mixed")
    trainer = Trainer(strategy=strategy, accelerator="cpu", devices=1, plugins=plugin, logger=False)
    assert trainer.strategy.precision_plugin is trainer.precision_plugin is plugin
    assert plugin.loss_scale is not None


def test_precisions_it_has_not():
    with pytest.raises(MisconfigurationException, match=r"precision='16-true'.*bf16-mixed"):
        Trainer(strategy="torchtitan", accelerator="cpu", devices=1, precision="16-true", logger=False)


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"tensor_parallel_degree": 0}, "tensor_parallel_degree=0"),
        ({"pipeline_parallel_schedule": "ZBV"}, "pipeline_parallel_schedule='ZBV'.*Interleaved1F1B"),
        ({"context_parallel_load_balancer": "zigzag"}, "context_parallel_load_balancer='zigzag'.*headtail"),
        ({"fsdp_reshard_after_forward": "sometimes"}, "fsdp_reshard_after_forward='sometimes'.*never"),
        ({"activation_checkpointing": "half"}, "activation_checkpointing='half'.*selective"),
        ({"reduce_dtype": "float16"}, "reduce_dtype='float16'.*bfloat16"),
        ({"timeout_seconds": 0}, "timeout_seconds=0.*1800"),
    ],
)
def test_an_impossible_argument_is_refused_at_construction(options: dict[str, Any], words: str):
    with pytest.raises(ValueError, match=words):
        TorchTitanStrategy(**options)


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"tensor_parallel_degree": 2}, "tensor_parallel_degree=2.*does not divide the 1 processes"),
        ({"cpu_offload": True}, "cpu_offload=True needs an accelerator"),
        ({"reduce_dtype": "bfloat16"}, "reduce_dtype='bfloat16' has no effect under precision='32-true'"),
        ({"expert_parallel_degree": 1, "name": "mistral_window"}, "model_type='mistral' is not supported"),
    ],
)
def test_what_does_not_fit_the_run_is_refused_before_it(options: dict[str, Any], words: str):
    folder = str(tiny_model_folder(options.get("name", "llama")))
    given = {name: value for name, value in options.items() if name != "name"}
    with pytest.raises(WorkerError, match=words):
        run_workers(1, build, folder, given)


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"tensor_parallel_degree": 4}, "tensor_parallel_degree=4.*does not divide the 6 processes"),
        ({"pipeline_parallel_degree": 2, "context_parallel_degree": 2}, "= 4.*does not divide the 6 processes"),
        ({"expert_parallel_degree": 4}, "expert_parallel_degree=4"),
    ],
)
def test_an_impossible_product_is_refused_before_ranks_connect(monkeypatch, options: dict[str, Any], words: str):
    connected: list[Any] = []
    for module, name in ((model_parallel, "_init_dist_connection"), (dist, "init_process_group")):
        monkeypatch.setattr(module, name, lambda *arguments, **named: connected.append(arguments))
    strategy = TorchTitanStrategy(**options)
    strategy.accelerator, strategy.parallel_devices = CPUAccelerator(), [torch.device("cpu")] * 6
    with pytest.raises(ValueError, match=words):
        strategy.setup_environment()
    assert connected == []


@pytest.mark.parametrize(
    ("name", "options", "words"),
    [
        ("one_kv", {"tensor_parallel_degree": 2}, "tensor_parallel_degree=2 does not divide num_key_value_heads=1"),
        ("llama", {"expert_parallel_degree": 2}, "expert_parallel_degree=2 has nothing to spread"),
        ("llama_tied", {"pipeline_parallel_degree": 2}, "tie_word_embeddings=True and pipeline_parallel_degree=2"),
    ],
)
def test_what_a_model_cannot_be_split_by_is_refused_on_all_ranks(name: str, options: dict[str, Any], words: str):
    with pytest.raises(WorkerError, match=words):
        run_workers(2, build, str(tiny_model_folder(name)), options)


def build(folder: str, options: dict[str, Any], **config: Any) -> None:
    def body(module: EngineModule) -> None:
        pass

    with_engine(body, ModelConfig(path=folder, **config), engine="torchtitan", **options)


def longest(folder: str) -> None:
    def body(module: EngineModule) -> None:
        ids = [torch.ones(3, dtype=torch.long), torch.ones(300, dtype=torch.long)]
        masks = [torch.ones(len(item), dtype=torch.bool) for item in ids]
        module.engine.infer_batch(module.policy, Experience.from_documents(input_ids=ids, response_mask=masks))

    with_engine(body, ModelConfig(path=folder), engine="torchtitan")


def test_a_document_beyond_the_positions_is_named_before_anything_runs():
    with pytest.raises(WorkerError, match=r"document 1 has 300 tokens.*max_position_embeddings=256"):
        run_workers(2, longest, str(tiny_model_folder("llama_tied")))


def test_a_pattern_that_freezes_nothing_is_refused():
    with pytest.raises(WorkerError, match=r"freeze=\['model.embbed\*'\].* matches no tensor"):
        run_workers(1, build, str(tiny_model_folder("llama")), {}, freeze=["model.embbed*"])


def frozen_embedding(folder: str) -> list[str]:
    def body(module: EngineModule) -> list[str]:
        return [name for name, item in module.policy.named_parameters() if not item.requires_grad]

    return with_engine(body, ModelConfig(path=folder, freeze=["model.embed*"]), engine="torchtitan")


def test_a_pattern_freezes_what_it_names():
    assert run_workers(1, frozen_embedding, str(tiny_model_folder("llama"))) == [["parts.0.tok_embeddings.weight"]]


def test_an_unknown_compiler_is_refused():
    with pytest.raises(WorkerError, match="compile_backend='none'"):
        run_workers(1, build, str(tiny_model_folder("llama")), {}, compile=True, compile_backend="none")


class ValidateThenFit(EngineModule):
    """Validation with one Trainer before training; each step looks at what the optimizer holds."""

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.look()

    def val_dataloader(self) -> Any:
        return DataLoader(range(2))

    def look(self) -> Any:
        ids = [torch.arange(7)]
        masks = [torch.ones(7, dtype=torch.bool)]
        experience = Experience.from_documents(input_ids=ids, response_mask=masks)
        return experience, self.engine.infer_batch(self.policy, experience).columns["log_probs"]


def validate_then_fit(folder: str) -> tuple[bool, bool]:
    found = {}

    def body(module: Any) -> None:
        experience, before = module.look()
        optimizer = module.optimizers()
        with module.engine.train_mode(module.policy, optimizer):
            module.engine.train_batch(module.policy, optimizer, experience, SFTLoss())
        _, after = module.look()
        weights = dict(module.engine.get_per_tensor_param(module.policy))
        found["all_trained"] = {name: weights[name].clone() for name in weights}
        found["moved"] = bool((before != after)[1:].all())

    module = ValidateThenFit({"policy": ModelConfig(path=folder)}, body, 0.5)
    trainer = make_trainer(TorchTitanStrategy(), max_steps=-1, max_epochs=1, limit_train_batches=1)
    trainer.validate(module)
    start = {name: item.clone() for name, item in module.engine.get_per_tensor_param(module.policy)}
    trainer.fit(module, DataLoader(range(2)))
    changed = all(not torch.equal(start[name], item) for name, item in found["all_trained"].items())
    return found["moved"], changed


def test_every_weight_trains_after_a_validation_with_the_same_trainer():
    # A pass without gradients must leave no gathered weights behind: an optimizer would hold them.
    assert run_workers(1, validate_then_fit, str(tiny_model_folder("llama"))) == [(True, True)]


def test_liger_is_refused():
    with pytest.raises(WorkerError, match=r"use_liger=True.*compile=True"):
        run_workers(1, build, str(tiny_model_folder("llama")), {}, use_liger=True)


def test_a_vocabulary_that_torch_cannot_place_is_refused_on_all_ranks():
    layout = {"tensor_parallel_degree": 2, "context_parallel_degree": 2}
    with pytest.raises(WorkerError, match="dimension of 97, such as the vocabulary, is cut into uneven") as caught:
        run_workers(8, build, str(tiny_model_folder("odd_vocab")), layout)
    assert caught.value.all_ranks_raised(ValueError)


@pytest.mark.parametrize("version", ["0.2.9", "0.4.0", "0.30"])
def test_an_unsupported_torchtitan_is_named_with_the_range(monkeypatch, version):
    monkeypatch.setattr(titan_library, "version", lambda name: version)
    with pytest.raises(ImportError, match=rf"torchtitan>=0\.3,<0\.4.*found {version}"):
        TorchTitanStrategy()


def test_the_installed_version_is_supported():
    assert importlib.metadata.version("torchtitan").startswith(f"{titan_library.SUPPORTED}.")


def test_the_other_engine_works_where_torchtitan_cannot_be_imported():
    code = """
        import sys
        sys.modules["torchtitan"] = None
        import torch
        from lightning.pytorch import Trainer
        import lightning_rl_engines
        Trainer(strategy="fsdp_ulysses", accelerator="cpu", devices=1, logger=False, enable_checkpointing=False)
        try:
            lightning_rl_engines.TorchTitanStrategy()
        except ImportError as error:
            assert "torchtitan>=0.3,<0.4" in str(error), error
        else:
            raise SystemExit("no error")
    """
    result = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(code)], cwd=REPOSITORY, capture_output=True, text=True, timeout=280
    )
    assert result.returncode == 0, result.stderr


# ---- rows ----


def row_lengths(folder: str, **strategy: Any) -> set[int]:
    """On a rank: lengths of the rows of batches that have no length in common."""
    documents = [torch.arange(length) % 60 for length in (29, 71, 158, 250, 203, 17, 5)]
    found: set[int] = set()

    def loss(outputs: Any, micro_batch: Any) -> LossOutput:
        found.add(micro_batch.row.cu_seqlens_host[-1])
        return score_loss(outputs, micro_batch)

    def body(module: EngineModule) -> None:
        for budget in (None, 301):
            for count in range(2, 8):
                experience = Experience.from_documents(
                    input_ids=documents[:count],
                    response_mask=[torch.arange(len(item)) > 3 for item in documents[:count]],
                    advantages=[torch.ones(len(item)) for item in documents[:count]],
                )
                module.engine.forward_backward_batch(
                    module.policy, experience, loss, forward_only=True, max_tokens_per_micro_batch=budget
                )

    with_engine(body, ModelConfig(path=folder), engine="torchtitan", **strategy)
    return found


def test_tensor_parallel_ranks_meet_few_lengths_of_rows() -> None:
    """DTensor plans each operation anew for each shape; the budget is kept all the same."""
    folder = str(tiny_model_folder("llama"))
    assert run_workers(2, row_lengths, folder, tensor_parallel_degree=2) == [{128, 256, 300, 384, 512, 768}] * 2
    (alone,) = run_workers(1, row_lengths, folder)
    assert {100, 258, 508, 711, 728, 733} <= alone
