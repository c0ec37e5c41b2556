import copy
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import PreTrainedModel, Qwen3MoeConfig, Qwen3MoeForCausalLM

from lightning_rl_engines.models.config import ModelConfig
from lightning_rl_engines.rollout import Generation, HFRollout, Prompt
from tests.rollout.stubs import StubStrategy, character_tokenizer
from tests.support.models import random_documents, reference_log_probs, tiny_config, tiny_model

LENGTHS = (3, 11, 1, 7, 5)


def _model_config(name: str, **changes: Any) -> ModelConfig:
    return ModelConfig(from_config=tiny_config(name, **changes).to_dict())


def _saved(model: PreTrainedModel) -> Iterator[tuple[str, Tensor]]:
    """Copies of the tensors that a save would hold, tied ones once."""
    seen: set[int] = set()
    for name, tensor in model.state_dict().items():
        if tensor.data_ptr() not in seen:
            seen.add(tensor.data_ptr())
            yield name, tensor.clone()


def _rollout(
    name: str = "llama", *, weights: int = 0, strategy: StubStrategy | None = None, **options: Any
) -> HFRollout:
    rollout = HFRollout(**options)
    rollout.setup(strategy or StubStrategy(), _model_config(name), character_tokenizer())
    rollout.update_weights(_saved(tiny_model(name, seed=weights)))
    return rollout


def _prompts(lengths: tuple[int, ...] = LENGTHS) -> list[Prompt]:
    return [Prompt(token_ids=ids.tolist(), index=i) for i, ids in enumerate(random_documents(lengths))]


def _tokens(generations: list[list[Generation]]) -> list[list[list[int]]]:
    return [[item.token_ids for item in group] for group in generations]


@pytest.mark.parametrize("name", ["llama", "llama_tied", "qwen2", "qwen3", "mistral_window"])
@pytest.mark.parametrize("max_batch_size", [None, 2])
def test_greedy_equals_unbatched_generate(name: str, max_batch_size: int | None) -> None:
    model = tiny_model(name, attn_implementation="sdpa")
    rollout = _rollout(name, max_new_tokens=24, max_batch_size=max_batch_size)
    prompts = _prompts()

    def generate(prompt: Prompt, **options: Any) -> list[int]:
        ids = torch.tensor([prompt.token_ids])
        # Without a mask, transformers takes token 0 of a prompt for padding.
        output = model.generate(
            ids, attention_mask=torch.ones_like(ids), max_new_tokens=24, do_sample=False, pad_token_id=0, **options
        )
        return output[0, len(prompt.token_ids) :].tolist()

    # Make a token that the model does produce an end token, so that some responses end early.
    end = generate(prompts[1])[4]
    rollout.stop = [end]
    rollout.setup(StubStrategy(), _model_config(name), character_tokenizer())
    rollout.update_weights(_saved(model))
    expected = [[generate(prompt, eos_token_id=[2, end])] for prompt in prompts]
    generations = rollout.generate(prompts, greedy=True, num_generations=1)
    assert _tokens(generations) == expected
    reasons = {item.finish_reason for group in generations for item in group}
    assert "stop" in reasons
    for (item,) in generations:
        assert (item.token_ids[-1] in (2, end)) == (item.finish_reason == "stop")
        assert item.finish_reason == "stop" or len(item.token_ids) == 24


@pytest.mark.parametrize("name", ["llama", "mistral_window"])
def test_log_probs_equal_a_fresh_forward_at_the_sampling_temperature(name: str) -> None:
    model = tiny_model(name)
    rollout = _rollout(
        name, max_new_tokens=16, temperature=0.7, top_k=20, top_p=0.9, num_generations=8, stop=[9, 19, 29, 39, 49]
    )
    prompts = _prompts()
    generations = rollout.generate(prompts)
    lengths = set()
    for prompt, group in zip(prompts, generations, strict=True):
        assert len(group) == 8
        for item in group:
            document = torch.tensor(prompt.token_ids + item.token_ids)
            with torch.no_grad():
                (expected,), _ = reference_log_probs(model, [document], temperature=0.7)
            actual = torch.tensor(item.log_probs)
            torch.testing.assert_close(actual, expected[len(prompt.token_ids) :], rtol=0, atol=1e-5)
            assert item.text == character_tokenizer().decode(item.token_ids, skip_special_tokens=True)
            lengths.add(len(item.token_ids))
    assert len(lengths) > 1  # sequences left the batch at different times


def test_tied_weights_stay_tied_and_updates_change_the_output() -> None:
    rollout = _rollout("llama_tied", max_new_tokens=8)
    inner = rollout._model
    assert inner is not None
    assert inner.lm_head.weight.data_ptr() == inner.model.embed_tokens.weight.data_ptr()
    first = _tokens(rollout.generate(_prompts(), greedy=True))
    other = tiny_model("llama_tied", seed=5)
    # The other name of the tied tensor is as good.
    named = [("lm_head.weight" if n == "model.embed_tokens.weight" else n, t) for n, t in _saved(other)]
    rollout.update_weights(iter(named))
    assert inner.lm_head.weight.data_ptr() == inner.model.embed_tokens.weight.data_ptr()
    second = _tokens(rollout.generate(_prompts(), greedy=True))
    assert second != first
    assert second == _tokens(_rollout("llama_tied", weights=5, max_new_tokens=8).generate(_prompts(), greedy=True))


def test_greedy_repeats_one_response_as_separate_objects() -> None:
    (group,) = _rollout(max_new_tokens=4).generate(_prompts((3,)), greedy=True, num_generations=3)
    assert len(group) == 3 and group[0] == group[1] == group[2]
    group[0].token_ids.append(7)
    assert group[1].token_ids != group[0].token_ids


def test_samples_are_reproducible_and_leave_the_global_random_state_alone() -> None:
    rollout = _rollout(max_new_tokens=8, num_generations=4)
    torch.manual_seed(1)
    before = torch.get_rng_state()
    first, second = rollout.generate(_prompts()), rollout.generate(_prompts())
    assert torch.equal(torch.get_rng_state(), before)
    torch.manual_seed(2)
    again = _rollout(max_new_tokens=8, num_generations=4)
    assert again.generate(_prompts()) == first
    assert first != second
    state = again.state_dict()
    resumed = _rollout(max_new_tokens=8, num_generations=4)
    resumed.load_state_dict(copy.deepcopy(state))
    assert resumed.generate(_prompts()) == second
    assert _rollout(max_new_tokens=8, num_generations=4, seed=1).generate(_prompts()) != first
    elsewhere = _rollout(max_new_tokens=8, num_generations=4, strategy=StubStrategy(data_rank=1))
    assert elsewhere.generate(_prompts()) != first


def test_greedy_calls_do_not_move_the_samples() -> None:
    first = _rollout(max_new_tokens=8, num_generations=2).generate(_prompts())
    rollout = _rollout(max_new_tokens=8, num_generations=2)
    rollout.generate(_prompts(), greedy=True)
    assert rollout.generate(_prompts()) == first


def test_sequence_peers_share_the_work_and_agree() -> None:
    prompts = _prompts((4, 2, 6))
    shares = []
    for rank in range(2):
        strategy = StubStrategy(sequence_rank=rank, sequence_size=2)
        rollout = _rollout(strategy=strategy, max_new_tokens=6, num_generations=3)
        with pytest.raises(KeyError):  # the stub returns this rank's own share only
            rollout.generate(prompts)
        shares.append(strategy.sent[0])
    assert [sorted(share) for share in shares] == [[0, 2, 4, 6, 8], [1, 3, 5, 7]]
    results = []
    for rank in range(2):
        strategy = StubStrategy(sequence_rank=rank, sequence_size=2)
        strategy.gathered = [shares[1 - rank]]
        results.append(_rollout(strategy=strategy, max_new_tokens=6, num_generations=3).generate(prompts))
    assert results[0] == results[1]
    assert [len(group) for group in results[0]] == [3, 3, 3]
    # Peers draw different samples for the same prompt.
    assert shares[0][0].token_ids != shares[1][1].token_ids


def test_no_prompts_still_takes_part_in_the_gather() -> None:
    strategy = StubStrategy(sequence_size=2)
    assert _rollout(strategy=strategy).generate([]) == []
    assert strategy.sent == [{}]


def test_stop_strings_and_ids_end_a_response() -> None:
    rollout = _rollout(max_new_tokens=40)
    (group,) = rollout.generate(_prompts((5,)), greedy=True, num_generations=1)
    text = group[0].text
    stop = text[3:5]
    first = text.index(stop) + 2
    stopped = HFRollout(max_new_tokens=40, stop=[stop])
    stopped.setup(StubStrategy(), _model_config("llama"), character_tokenizer())
    stopped.update_weights(_saved(tiny_model("llama")))
    (item,) = stopped.generate(_prompts((5,)), greedy=True, num_generations=1)[0]
    assert item.text == text[:first]
    assert item.finish_reason == "stop"


def test_stacked_experts_arrive_as_a_save_names_them(tmp_path: Any) -> None:
    from safetensors.torch import load_file

    config = Qwen3MoeConfig(
        vocab_size=64, hidden_size=32, intermediate_size=48, moe_intermediate_size=24, num_hidden_layers=2,
        num_attention_heads=4, num_key_value_heads=2, head_dim=16, num_experts=11, num_experts_per_tok=2,
        eos_token_id=2, bos_token_id=1, initializer_range=0.2, max_position_embeddings=64,
    )  # fmt: skip
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(3)

        model = Qwen3MoeForCausalLM(config).eval()
    model.save_pretrained(tmp_path)
    saved = load_file(tmp_path / "model.safetensors")
    assert any(".experts.10.up_proj" in name for name in saved)
    rollout = HFRollout(max_new_tokens=8)
    rollout.setup(StubStrategy(), ModelConfig(from_config=config.to_dict()), None)
    rollout.update_weights(iter(saved.items()))
    assert rollout._model is not None
    for name, tensor in rollout._model.state_dict().items():
        assert torch.equal(tensor, model.state_dict()[name]), name
    del saved["model.layers.1.mlp.experts.10.up_proj.weight"]
    with pytest.raises(ValueError, match=r"missing: \['model.layers.1.mlp.experts.10.up_proj.weight'\]"):
        rollout.update_weights(iter(saved.items()))


def test_wrong_weights_are_named_after_the_whole_iterator_was_walked() -> None:
    rollout = _rollout()
    walked = []

    def weights() -> Iterator[tuple[str, Tensor]]:
        for name, tensor in _saved(tiny_model("llama")):
            walked.append(name)
            if name == "model.norm.weight":
                continue
            if name == "lm_head.weight":
                tensor = tensor[:5]
            yield name, tensor
            if name == "model.embed_tokens.weight":
                yield name, tensor
                yield "model.layers.0.self_attn.rotary_emb.inv_freq", tensor

    with pytest.raises(ValueError) as caught:
        rollout.update_weights(weights())
    message = str(caught.value)
    assert "missing: ['model.norm.weight']" in message
    assert "unknown: ['model.layers.0.self_attn.rotary_emb.inv_freq']" in message
    assert "twice: ['model.embed_tokens.weight']" in message
    assert "lm_head.weight [5, 32] instead of [64, 32]" in message
    assert walked == [name for name, _ in _saved(tiny_model("llama"))]
    with pytest.raises(RuntimeError, match="before update_weights"):
        rollout.generate(_prompts())


def test_errors_before_anything_runs() -> None:
    with pytest.raises(RuntimeError, match=r"before setup\(\)"):
        HFRollout().update_weights(iter(()))
    rollout = HFRollout()
    rollout.setup(StubStrategy(), _model_config("llama"), None)
    with pytest.raises(RuntimeError, match="before update_weights"):
        rollout.generate(_prompts())
    with pytest.raises(ValueError, match="need a tokenizer"):
        HFRollout(stop=["x"]).setup(StubStrategy(), _model_config("llama"), None)
    ready = _rollout(max_new_tokens=250)
    with pytest.raises(ValueError, match=r"prompt 1 has 11 tokens.*256 positions.*at most 245.*max_prompt_length=6"):
        ready.generate(_prompts())
    with pytest.raises(ValueError, match="prompt 4 has no tokens"):
        ready.generate([Prompt(token_ids=[], index=4)])
    with pytest.raises(ValueError, match="prompt 4 holds token id 64"):
        ready.generate([Prompt(token_ids=[1, 64], index=4)])


@pytest.mark.parametrize(
    "arguments",
    [
        {"num_generations": 0},
        {"max_new_tokens": 0},
        {"temperature": 0.0},
        {"top_p": 0.0},
        {"top_p": 1.5},
        {"top_k": -1},
        {"max_batch_size": 0},
        {"stop": [""]},
    ],
)
def test_arguments_out_of_range_are_named(arguments: dict[str, Any]) -> None:
    (name,) = arguments
    with pytest.raises(ValueError, match=rf"HFRollout\({name}=.* use "):
        HFRollout(**arguments)


def test_dtype_and_teardown() -> None:
    rollout = _rollout(dtype="bfloat16", max_new_tokens=3)
    assert rollout._model is not None and rollout._model.dtype == torch.bfloat16
    assert len(rollout.generate(_prompts(), greedy=True)) == len(LENGTHS)
    rollout.teardown()
    with pytest.raises(RuntimeError):
        rollout.generate(_prompts())
