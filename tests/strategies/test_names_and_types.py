"""Names and types of streamed weights, whatever is put around the plain model; ties in the files that are read."""

import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file

from lightning_rl_engines import ModelConfig
from tests.strategies.reference import Documents, make_documents
from tests.strategies.steps import copies, mine, plain_model, score_loss
from tests.support import run_workers
from tests.support.engine import EngineModule, with_engine
from tests.support.lora import lora
from tests.support.models import reference_log_probs, tiny_model_folder

OPTIONS: dict[str, dict[str, Any]] = {
    "plain": {},
    "checkpointing": {"gradient_checkpointing": True},
    "compiled": {"compile": True, "compile_backend": "eager", "gradient_checkpointing": True},
    "lora": {"lora": lora(modules_to_save=["norm"])},
    "lora-checkpointing": {"lora": lora(), "gradient_checkpointing": True},
}


def stream(config: ModelConfig, documents: Documents) -> dict[str, Any]:
    """On a rank: names and types by mode and by the type that was asked for, after a pass with gradients."""

    def body(module: EngineModule) -> dict[str, Any]:
        engine, policy = module.engine, module.policy
        if config.head == "lm":
            engine.forward_backward_batch(policy, mine(engine, documents), score_loss)
        found: dict[str, Any] = {}
        for mode in ("merged", "adapter") if config.has_adapter else ("full",):
            for dtype in (None, "bfloat16", "float32"):
                pairs = copies(engine.get_per_tensor_param(policy, mode=mode, dtype=dtype))  # type: ignore[arg-type]
                found[f"{mode} {dtype}"] = (sorted(pairs), {item.dtype for item in pairs.values()})
        return found

    return with_engine(body, config, precision="bf16-true")


@pytest.mark.parametrize("head", ["lm", "value"])
@pytest.mark.parametrize("option", OPTIONS)
def test_names_are_those_of_a_save_and_types_those_asked_for(head: Any, option: str) -> None:
    folder = tiny_model_folder("llama_tied")
    documents = make_documents(folder, vocabulary=64)
    with safe_open(folder / "model.safetensors", "pt") as file:
        names = set(file.keys())
    if head == "value":
        names |= {"score.weight", "score.bias"}
    config = ModelConfig(path=str(folder), head=head, **OPTIONS[option])
    # By default what is stored, which is fp32 for adapters and for sums with one.
    default = torch.float32 if config.has_adapter else torch.bfloat16
    for found in run_workers(2, stream, config, documents, timeout=240):
        for call, (streamed, types) in found.items():
            mode, _, dtype = call.partition(" ")
            assert types == {default if dtype == "None" else getattr(torch, dtype)}, call
            if mode == "adapter":
                assert all(name.startswith("base_model.model.") for name in streamed)
                assert not any(part in name for name in streamed for part in ("default", "_fsdp", "base_layer"))
            else:
                assert set(streamed) == names, call


# ---- ties ----


def log_probs(config: ModelConfig, documents: Documents) -> torch.Tensor:
    def body(module: EngineModule) -> torch.Tensor:
        experience = documents.experience(list(range(documents.size)))
        return module.engine.infer_batch(module.policy, experience).columns["log_probs"]

    return with_engine(body, config)


@pytest.mark.filterwarnings("ignore:.*the configuration is followed.*")
@pytest.mark.parametrize("content", ["embedding", "equal", "different"])
@pytest.mark.parametrize("options", [{}, {"lora": lora()}], ids=["full", "lora"])
def test_a_tied_model_uses_its_embedding_whatever_the_file_says_of_the_head(
    tmp_path: Path, content: str, options: dict[str, Any]
) -> None:
    folder = tmp_path / "model"
    shutil.copytree(tiny_model_folder("llama_tied"), folder)
    documents = make_documents(folder, vocabulary=64)
    with torch.no_grad():
        expected, _ = reference_log_probs(plain_model(folder), documents.input_ids)
    tensors = load_file(folder / "model.safetensors")
    if content != "embedding":
        embedding = tensors["model.embed_tokens.weight"]
        tensors["lm_head.weight"] = embedding.clone() if content == "equal" else embedding + 1
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    response = torch.cat(documents.response_mask)
    for found in run_workers(2, log_probs, ModelConfig(path=str(folder), **options), documents):
        torch.testing.assert_close(found[response], torch.cat(expected)[response], rtol=1e-5, atol=1e-5)
