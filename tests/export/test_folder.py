import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from tokenizers import Tokenizer, models
from transformers import AutoModelForCausalLM, AutoTokenizer, GenerationConfig, PreTrainedTokenizerFast

from lightning_rl_engines.export import (
    ExportContext,
    HFFolderSink,
    drain,
    plan_from_hf_model,
    stream_full_parameters,
)
from tests.export.support import Alone, World, assert_same, make_model, save, saved_tensors, shard
from tests.support import run_workers

IDS = torch.arange(10)[None]


def export(name: str, path: Path | str, dtype: torch.dtype | None = None, scale: float = 1.0, **options: object) -> str:
    model = make_model(name)
    with torch.no_grad():
        model.model.norm.weight.mul_(scale)
    plan = plan_from_hf_model(model)
    stream = stream_full_parameters(model, plan, prefix="", dtype=dtype)
    context = ExportContext(step=20, update=5, config=model.config)
    location = drain(stream, HFFolderSink(path=str(path), **options), Alone(), plan=plan, context=context)
    assert location is not None
    return location


def export_sharded(name: str, path: str) -> str | None:
    model = make_model(name)
    plan = plan_from_hf_model(model)
    root = shard(model)
    context = ExportContext(config=model.config)
    return drain(stream_full_parameters(root, plan), HFFolderSink(path=path), World(), plan=plan, context=context)


@pytest.mark.parametrize("world_size", [1, 2, 4])
@pytest.mark.parametrize("name", ["llama", "qwen2", "qwen3", "qwen3_moe"])
def test_a_sharded_model_loads_with_equal_logits(name: str, world_size: int, tmp_path: Path) -> None:
    path = str(tmp_path / "out")
    assert run_workers(world_size, export_sharded, name, path) == [path] * world_size
    loaded, info = AutoModelForCausalLM.from_pretrained(path, output_loading_info=True, attn_implementation="eager")
    assert not any(info[key] for key in ("missing_keys", "unexpected_keys", "mismatched_keys"))
    assert torch.equal(loaded(input_ids=IDS).logits, make_model(name)(input_ids=IDS).logits)
    assert_same(saved_tensors(path), save(make_model(name), tmp_path / "reference"))


@pytest.mark.parametrize("name", ["llama_tied", "qwen3"])
def test_files_are_those_of_a_hugging_face_save(name: str, tmp_path: Path) -> None:
    model = make_model(name)
    model.save_pretrained(tmp_path / "reference", max_shard_size="20KB")
    plan = plan_from_hf_model(model)
    sink = HFFolderSink(path=str(tmp_path / "out"), max_shard_size="20KB")
    context = ExportContext(config=model.config, generation_config=model.generation_config)
    drain(iter(model_in_plan_order(model)), sink, Alone(), plan=plan, context=context)
    ours = {file.name for file in (tmp_path / "out").iterdir()}
    assert ours == {file.name for file in (tmp_path / "reference").iterdir()}
    assert len(ours) > 4
    for file in ("config.json", "generation_config.json", "model.safetensors.index.json"):
        assert (tmp_path / "out" / file).read_text() == (tmp_path / "reference" / file).read_text()
    assert not list(tmp_path.glob(".*"))


def model_in_plan_order(model: torch.nn.Module) -> list[tuple[str, torch.Tensor]]:
    state = model.state_dict()
    return [(entry.name, state[entry.name]) for entry in plan_from_hf_model(model).entries]


def test_one_shard_has_the_plain_name_and_no_index(tmp_path: Path) -> None:
    export("llama", tmp_path / "out")
    assert {file.name for file in (tmp_path / "out").iterdir()} == {"config.json", "model.safetensors"}


def test_shards_keep_to_their_size_and_memory_to_one_shard(tmp_path: Path) -> None:
    limit = 7000
    export("llama", tmp_path / "out", max_shard_size=limit)
    files = sorted((tmp_path / "out").glob("*.safetensors"))
    assert len(files) > 5
    index = json.loads((tmp_path / "out" / "model.safetensors.index.json").read_text())
    model = make_model("llama")
    assert index["metadata"] == {
        "total_parameters": model.num_parameters(),
        "total_size": 4 * model.num_parameters(),
    }
    held = {file.name: saved_tensors_of(file) for file in files}
    assert index["weight_map"] == {key: name for name, tensors in held.items() for key in tensors}
    for tensors in held.values():
        assert len(tensors) == 1 or sum(t.nbytes for t in tensors.values()) <= limit
    assert any(len(tensors) > 1 for tensors in held.values())
    assert any(t.nbytes > limit for tensors in held.values() for t in tensors.values())
    assert_same(saved_tensors(tmp_path / "out"), dict(model.state_dict()))


def saved_tensors_of(file: Path) -> dict[str, torch.Tensor]:
    from safetensors.torch import load_file

    return load_file(file)


def test_the_exported_type_is_in_the_files_and_in_the_config(tmp_path: Path) -> None:
    export("llama", tmp_path / "out", torch.bfloat16)
    model = make_model("llama")
    assert_same(saved_tensors(tmp_path / "out"), {k: t.bfloat16() for k, t in model.state_dict().items()})
    assert json.loads((tmp_path / "out" / "config.json").read_text())["dtype"] == "bfloat16"
    assert AutoModelForCausalLM.from_pretrained(tmp_path / "out", dtype="auto").dtype == torch.bfloat16
    # The live configuration is the model's own.
    assert model.config.dtype == torch.float32


def test_the_tokenizer_and_generation_config_go_along(tmp_path: Path) -> None:
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=Tokenizer(models.WordLevel({"a": 0, "b": 1, "<eos>": 2}, unk_token="a")), eos_token="<eos>"
    )
    model = make_model("llama")
    context = ExportContext(
        config=model.config, tokenizer=tokenizer, generation_config=GenerationConfig(eos_token_id=[2, 1])
    )
    sink = HFFolderSink(path=str(tmp_path / "out"))
    drain(iter(model_in_plan_order(model)), sink, Alone(), context=context)
    assert AutoTokenizer.from_pretrained(tmp_path / "out")("b")["input_ids"] == [1]
    assert GenerationConfig.from_pretrained(tmp_path / "out").eos_token_id == [2, 1]


def test_placeholders_are_filled_in(tmp_path: Path) -> None:
    assert export("llama", tmp_path / "u{update}" / "s{step:04d}") == str(tmp_path / "u5" / "s0020")
    assert (tmp_path / "u5" / "s0020" / "model.safetensors").exists()


def test_an_export_replaces_the_last_one_as_a_whole(tmp_path: Path) -> None:
    export("llama", tmp_path / "out", max_shard_size=7000)
    export("llama", tmp_path / "out", scale=2.0)
    assert {file.name for file in (tmp_path / "out").iterdir()} == {"config.json", "model.safetensors"}
    weight = saved_tensors(tmp_path / "out")["model.norm.weight"]
    assert torch.equal(weight, 2 * make_model("llama").state_dict()["model.norm.weight"])
    assert [file.name for file in tmp_path.iterdir()] == ["out"]


def test_an_aborted_export_leaves_the_last_one(tmp_path: Path) -> None:
    export("llama", tmp_path / "out")
    before = saved_tensors(tmp_path / "out")
    sink = HFFolderSink(path=str(tmp_path / "out"), max_shard_size=7000)

    def broken() -> object:
        for name, tensor in model_in_plan_order(make_model("llama")):
            if name == "lm_head.weight":
                raise OSError("disk gone")
            yield name, tensor * 3

    with pytest.raises(OSError, match="disk gone"):
        drain(broken(), sink, Alone())
    assert_same(saved_tensors(tmp_path / "out"), before)
    assert [file.name for file in tmp_path.iterdir()] == ["out"]
    # The same sink works again.
    drain(iter(model_in_plan_order(make_model("llama"))), sink, Alone())
    assert_same(saved_tensors(tmp_path / "out"), before)


KILLED = """
import os, sys
import torch
from pathlib import Path
from lightning_rl_engines.export import ExportContext, HFFolderSink
sink = HFFolderSink(path=sys.argv[1], max_shard_size=10)
rename = Path.rename
if sys.argv[2] == "between renames":
    Path.rename = lambda self, target: os._exit(9) if self.name == ".out.partial" else rename(self, target)
sink.open(None, ExportContext())
sink.write("a", torch.zeros(8))
sink.write("b", torch.zeros(8))
if sys.argv[2] == "writing":
    os._exit(9)
sink.close()
"""


@pytest.mark.parametrize("when", ["writing", "between renames"])
def test_a_killed_process_leaves_the_last_export(when: str, tmp_path: Path) -> None:
    export("llama", tmp_path / "out")
    before = saved_tensors(tmp_path / "out")
    path = str(tmp_path / "out")
    process = subprocess.run([sys.executable, "-c", KILLED, path, when], env={**os.environ, "PYTHONPATH": os.getcwd()})
    assert process.returncode == 9
    assert (tmp_path / ".out.partial").exists()
    if when == "between renames":
        # The one instant without a folder of that name: the old one lies beside it, and the next export finds it.
        assert_same(saved_tensors(tmp_path / ".out.previous"), before)
        HFFolderSink(path=path).open(None, ExportContext())
    assert_same(saved_tensors(tmp_path / "out"), before)
    export("llama", tmp_path / "out", scale=2.0)
    assert [file.name for file in tmp_path.iterdir()] == ["out"]


@pytest.mark.parametrize("content", ["notes.txt", "model.safetensors and data/x"])
def test_a_folder_that_holds_other_things_is_refused(content: str, tmp_path: Path) -> None:
    for name in content.split(" and "):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text("precious")
    with pytest.raises(ValueError, match="holds something else than exported weights"):
        export("llama", tmp_path)
    assert (tmp_path / content.split(" and ")[-1]).read_text() == "precious"


def test_a_file_is_refused(tmp_path: Path) -> None:
    (tmp_path / "out").write_text("precious")
    with pytest.raises(ValueError, match="is a file; name a folder"):
        export("llama", tmp_path / "out")


def test_an_empty_export_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(RuntimeError, match="holds no tensor"):
        drain(iter([]), HFFolderSink(path=str(tmp_path / "out")), Alone())
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("size", [0, "5 apples", "GB", "-1MB"])
def test_sizes_are_checked(size: int | str) -> None:
    with pytest.raises(ValueError, match=r"max_shard_size=.* is no size; use bytes"):
        HFFolderSink(path="out", max_shard_size=size)


@pytest.mark.parametrize("path", ["{epoch}", "{}", "{"])
def test_placeholders_are_checked(path: str) -> None:
    with pytest.raises(ValueError, match=r"only \{step\} and \{update\}"):
        HFFolderSink(path=path)
