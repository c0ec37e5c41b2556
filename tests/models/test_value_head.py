"""What a value head starts from: a saved critic, a language model, or a refusal that names what does not match."""

import shutil

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForSequenceClassification, AutoModelForTokenClassification

from lightning_rl_engines.models import ModelConfig
from lightning_rl_engines.models import huggingface as module
from lightning_rl_engines.models.huggingface import load_hf_model
from tests.models.architectures import save_small_model
from tests.support.models import tiny_config, tiny_model_folder


def save(factory, folder, **options):
    torch.manual_seed(0)
    model = factory.from_config(tiny_config("llama", **options), dtype=torch.float32)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn_like(parameter), alpha=0.1)
    model.save_pretrained(folder)
    return model.state_dict()


@pytest.fixture
def said(monkeypatch):
    lines = []
    monkeypatch.setattr(module, "rank_zero_info", lines.append)
    return lines


def critic(folder):
    return load_hf_model(ModelConfig(path=str(folder), head="value"))


@pytest.mark.parametrize("name", ["llama", "llama_tied"])
def test_a_language_model_gives_its_backbone_and_the_fresh_head_is_mentioned(said, name):
    folder = tiny_model_folder(name)
    state = critic(folder).state_dict()
    stored = load_file(folder / "model.safetensors")
    backbone = {key for key in stored if key.startswith("model.")}
    assert state.keys() == backbone | {"score.weight", "score.bias"}
    assert all(torch.equal(state[key], stored[key]) for key in backbone)
    assert said == [f"The value head of {folder} is freshly initialised: the checkpoint holds none."]


def test_a_saved_critic_is_restored(said, tmp_path):
    saved = save(AutoModelForTokenClassification, tmp_path, num_labels=1)
    state = critic(tmp_path).state_dict()
    assert state.keys() == saved.keys()
    assert all(torch.equal(tensor, saved[name]) for name, tensor in state.items())
    assert said == []


def test_a_sequence_classifier_with_one_label_is_a_critic_without_bias(said, tmp_path):
    saved = save(AutoModelForSequenceClassification, tmp_path, num_labels=1)
    state = critic(tmp_path).state_dict()
    assert torch.equal(state["score.weight"], saved["score.weight"])
    assert state["score.bias"].tolist() == [0.0]
    assert said == [f"The value head of {tmp_path} has no bias; it starts from 0."]


def test_a_head_with_several_labels_is_refused_by_name(tmp_path):
    save(AutoModelForTokenClassification, tmp_path, num_labels=2)
    with pytest.raises(ValueError, match=r"score\.weight.*\[2, .*a value head has one label"):
        critic(tmp_path)


@pytest.mark.parametrize("renamed", [("score.weight", "score.bias"), ("score.weight",)])
def test_a_trained_head_under_another_name_is_not_lost_in_silence(said, tmp_path, renamed):
    save(AutoModelForTokenClassification, tmp_path / "critic", num_labels=1)
    shutil.copytree(tmp_path / "critic", tmp_path / "other")
    file = tmp_path / "other" / "model.safetensors"
    stored = load_file(file)
    for name in renamed:
        stored[name.replace("score", "v_head")] = stored.pop(name)
    save_file(stored, file, metadata={"format": "pt"})
    with pytest.raises(ValueError, match=r"missing \[.*'score\.weight'\], left over \[.*'v_head\.weight'\]"):
        critic(tmp_path / "other")
    assert said == []


@pytest.mark.parametrize(
    ("family", "reason"),
    [("falcon", "calls the head of its token classification otherwise than 'score'"), ("olmo2", "has no such model")],
)
def test_a_family_without_a_value_head_is_refused_by_name(tmp_path, family, reason):
    folder = save_small_model(tmp_path, family)
    with pytest.raises(ValueError, match=f"head='value'.*'{family}' {reason} in transformers; use a family such as"):
        load_hf_model(ModelConfig(path=folder, head="value"))
