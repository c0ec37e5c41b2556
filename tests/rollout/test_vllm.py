"""Rollouts by vLLM servers, against a server that samples with a Hugging Face model."""

import os
import shutil
import tempfile
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from lightning_rl_engines import FSDPUlyssesStrategy, ModelConfig, PolicyModule, Prompt, TorchTitanStrategy, VLLMRollout
from lightning_rl_engines.modules.generation import SUSPICIOUS_GAP
from lightning_rl_engines.rollout.sampling import derive_seed
from tests.modules.cases import even_tokens, loader, prompts, sgd
from tests.rollout.fake_vllm import FakeVLLM, serve
from tests.rollout.stubs import StubStrategy, character_tokenizer
from tests.support import WorkerError, run_workers
from tests.support.lightning_env import make_trainer
from tests.support.lora import lora
from tests.support.models import random_documents, reference_log_probs, tiny_model, tiny_model_folder

LENGTHS = (3, 11, 1, 7)


@pytest.fixture
def server() -> Iterator[FakeVLLM]:
    with serve(tokenizer=character_tokenizer()) as running:
        yield running


def ready(*servers: FakeVLLM, model: str = "llama", strategy: Any = None, **options: Any) -> VLLMRollout:
    """A rollout whose servers have the weights of the tiny model."""
    rollout = VLLMRollout(urls=[server.url for server in servers], **options)
    rollout.setup(strategy or StubStrategy(), ModelConfig(path=str(tiny_model_folder(model))), character_tokenizer())
    rollout.update_weights(iter(named(model)))
    return rollout


def named(model: str, seed: int = 0) -> list[tuple[str, torch.Tensor]]:
    return [(name, tensor.detach()) for name, tensor in tiny_model(model, seed=seed).named_parameters()]


def some_prompts() -> list[Prompt]:
    return [Prompt(token_ids=ids.tolist(), index=i) for i, ids in enumerate(random_documents(LENGTHS))]


def tokens(generations: Any) -> list[list[list[int]]]:
    return [[item.token_ids for item in group] for group in generations]


# ---- responses ----


def test_log_probs_are_those_of_the_model_at_the_temperature(server: FakeVLLM) -> None:
    rollout = ready(server, temperature=0.7, max_new_tokens=12, num_generations=3, stop=[9, 19, "z"])
    model = tiny_model("llama")
    groups = rollout.generate(some_prompts())
    lengths = set()
    for prompt, group in zip(some_prompts(), groups, strict=True):
        assert len(group) == 3
        for item in group:
            document = torch.tensor(prompt.token_ids + item.token_ids)
            with torch.no_grad():
                (expected,), _ = reference_log_probs(model, [document], temperature=0.7)
            actual = torch.tensor(item.log_probs)
            torch.testing.assert_close(actual, expected[len(prompt.token_ids) :], rtol=0, atol=1e-5)
            assert item.text == character_tokenizer().decode(item.token_ids, skip_special_tokens=True)
            ended = item.token_ids[-1] in (2, 9, 19) or item.text.endswith("z")
            assert item.finish_reason == ("stop" if ended else "length")
            assert ended or len(item.token_ids) == 12
            lengths.add(len(item.token_ids))
    assert len(lengths) > 1
    assert len({tuple(item.token_ids) for group in groups for item in group}) > 10


def test_greedy_is_asked_for_once_and_repeated(server: FakeVLLM) -> None:
    rollout = ready(server, max_new_tokens=8)
    groups = rollout.generate(some_prompts(), greedy=True, num_generations=3)
    assert [request["n"] for request in server.requests] == [1] * len(LENGTHS)
    for prompt, group in zip(some_prompts(), groups, strict=True):
        ids = torch.tensor([prompt.token_ids])
        output = tiny_model("llama").generate(
            ids, attention_mask=torch.ones_like(ids), max_new_tokens=8, do_sample=False, eos_token_id=2, pad_token_id=0
        )
        assert [item.token_ids for item in group] == [output[0, len(prompt.token_ids) :].tolist()] * 3
    group[0].token_ids.append(7)
    assert group[1].token_ids != group[0].token_ids


def test_a_request_leaves_nothing_to_the_defaults_of_the_model(server: FakeVLLM) -> None:
    server.facts["model_config"]["logprobs_mode"] = "raw_logprobs"
    rollout = ready(server, top_k=5, top_p=0.9, stop=["!", 7], max_new_tokens=4, num_generations=2, seed=3)
    rollout.generate(some_prompts()[:1])
    (request,) = server.requests
    assert request == {
        "model": "served",
        "prompt": some_prompts()[0].token_ids,
        "n": 2,
        "max_tokens": 4,
        "temperature": 1.0,
        "top_p": 0.9,
        "top_k": 5,
        "min_p": 0.0,
        "repetition_penalty": 1.0,
        "presence_penalty": 0.0,
        "frequency_penalty": 0.0,
        "stop": ["!"],
        "stop_token_ids": [7, 2],
        "logprobs": 0,
        "return_token_ids": True,
        "skip_special_tokens": False,
        "seed": derive_seed(3, 0, 0, 0),
    }


def test_samples_depend_on_call_place_and_seed_and_on_nothing_else(server: FakeVLLM) -> None:
    same = [some_prompts()[0]] * 2
    rollout = ready(server, max_new_tokens=10, num_generations=2)
    first, second = tokens(rollout.generate(same)), tokens(rollout.generate(same))
    assert first[0] != first[1] and first != second and first[0][0] != first[0][1]
    state = rollout.state_dict()
    third = tokens(rollout.generate(same))
    with serve() as other:
        again = ready(other, server, max_new_tokens=10, num_generations=2)  # two servers make no difference
        again.load_state_dict(state)
        assert tokens(again.generate(same)) == third
        assert len(other.requests) == 1
    elsewhere = ready(server, strategy=StubStrategy(data_rank=1), max_new_tokens=10, num_generations=2)
    assert tokens(elsewhere.generate(same)) != first
    assert tokens(ready(server, max_new_tokens=10, num_generations=2, seed=1).generate(same)) != first


# ---- weights ----


@pytest.mark.parametrize("load_format", ["auto", "dummy"])
def test_new_weights_come_between_pause_and_resume_and_leave_no_files(server: FakeVLLM, load_format: str) -> None:
    server.facts["load_config"]["load_format"] = load_format
    rollout = ready(server, max_new_tokens=8)
    first = tokens(rollout.generate(some_prompts(), greedy=True))
    server.calls.clear()
    rollout.update_weights(iter(named("llama", seed=5)))
    rpc = ["POST /collective_rpc"] * (2 if load_format == "dummy" else 1)
    middle = ["POST /reset_prefix_cache", "POST /update_weight_version"]
    assert server.calls == ["POST /pause", *rpc, *middle, "POST /resume"]
    assert tokens(rollout.generate(some_prompts(), greedy=True)) != first
    assert server.folder
    assert not os.path.exists(server.folder)


def test_weights_are_written_in_the_type_that_is_asked_for(server: FakeVLLM) -> None:
    ready(server, dtype="bfloat16")
    assert server.model.dtype == torch.bfloat16


def test_a_server_with_a_head_of_its_own_gets_the_tied_tensor_twice(server: FakeVLLM) -> None:
    ready(server, model="llama_tied")
    assert "lm_head.weight" not in server.names
    for facts in ({"hf_overrides": {"tie_word_embeddings": False}}, {"word_embeddings_untied_by_checkpoint": True}):
        with serve() as other:
            other.facts["model_config"] |= facts
            ready(other, model="llama_tied")
            assert other.names == server.names | {"lm_head.weight"}


def test_a_server_on_cpu_must_have_a_head_of_its_own(server: FakeVLLM) -> None:
    server.facts["device_config"]["device"] = "cpu"
    ready(server, model="llama")
    with pytest.raises(ValueError, match=r"on CPU.*tied.*--hf-overrides '\{\"tie_word_embeddings\": false\}'"):
        ready(server, model="llama_tied")
    server.facts["model_config"]["hf_overrides"] = {"tie_word_embeddings": False}
    ready(server, model="llama_tied")


def test_a_server_that_was_started_again_is_not_asked(server: FakeVLLM) -> None:
    rollout = ready(server)
    server.forget()
    with pytest.raises(RuntimeError, match=rf"{server.url} no longer holds the weights of this run.*'default'.*Resume"):
        rollout.generate(some_prompts())
    assert server.requests == []
    rollout.update_weights(iter(named("llama")))
    rollout.generate(some_prompts())


def test_weights_that_change_in_the_midst_of_a_batch_are_noticed(
    server: FakeVLLM, monkeypatch: pytest.MonkeyPatch
) -> None:
    rollout, complete = ready(server), FakeVLLM.complete

    def restarted(self: FakeVLLM, body: dict[str, Any]) -> Any:
        self.forget()
        return complete(self, body)

    monkeypatch.setattr(FakeVLLM, "complete", restarted)
    with pytest.raises(RuntimeError, match="no longer holds the weights of this run"):
        rollout.generate(some_prompts())
    assert len(server.requests) == len(LENGTHS)


def test_a_server_that_an_earlier_run_left_asleep_is_woken_for_its_weights(server: FakeVLLM) -> None:
    server.facts["model_config"]["enable_sleep_mode"] = True
    server.asleep = True
    assert ready(server).generate(some_prompts())
    assert not server.asleep


def test_servers_get_an_absolute_path(server: FakeVLLM, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    ready(server, weights_folder="shared")
    assert server.folder.startswith(f"{tmp_path}/shared/")
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    ready(server, weights_folder="~/shared")
    assert server.folder.startswith(f"{tmp_path}/home/shared/")


def test_shared_memory_without_room_is_not_used(server: FakeVLLM, monkeypatch: pytest.MonkeyPatch) -> None:
    usage = shutil.disk_usage("/")
    monkeypatch.setattr(shutil, "disk_usage", lambda path: usage._replace(free=64_000))
    ready(server)
    assert Path(server.folder).parent.parent == Path(tempfile.gettempdir())


def test_a_server_with_a_key_gets_it_from_the_environment(server: FakeVLLM, monkeypatch: pytest.MonkeyPatch) -> None:
    server.key = "secret"
    with pytest.raises(RuntimeError, match="with 401"):
        ready(server)
    monkeypatch.setenv("VLLM_API_KEY", "secret")
    ready(server)


@pytest.mark.parametrize("path", ["/collective_rpc", "/reset_prefix_cache", "/update_weight_version"])
def test_a_failed_update_is_raised_and_leaves_the_server_running_and_the_rollout_without_weights(
    server: FakeVLLM, path: str
) -> None:
    rollout = ready(server)
    server.broken = {path}
    walked = iter(named("llama"))
    with pytest.raises(RuntimeError, match=rf"{path} with 500: .*out of order"):
        rollout.update_weights(walked)
    assert next(walked, None) is None, "the stream was walked to its end"
    assert not server.paused
    assert server.folder
    assert not os.path.exists(server.folder)
    with pytest.raises(RuntimeError, match="before update_weights"):
        rollout.generate(some_prompts())


def test_a_server_sleeps_between_responses_and_the_next_weights(server: FakeVLLM) -> None:
    with pytest.raises(ValueError, match=r"sleep=True.*--enable-sleep-mode"):
        ready(server, sleep=True)
    server.facts["model_config"]["enable_sleep_mode"] = True
    rollout = ready(server, sleep=True)
    for expected in ("awake", "asleep"):
        server.calls.clear()
        rollout.generate(some_prompts(), greedy=True)
        assert server.asleep
        assert ("POST /wake_up" in server.calls) == (expected == "asleep")
    rollout.update_weights(iter(named("llama")))
    assert not server.asleep
    server.broken = {"/v1/completions"}
    with pytest.raises(RuntimeError, match="completions with 500"):
        rollout.generate(some_prompts())
    assert server.asleep


# ---- what is refused ----


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"urls": []}, r"urls=\[\].*http://127.0.0.1:8000"),
        ({"urls": ["localhost:8000"]}, "urls=.*'localhost:8000'.*http://127"),
        ({"urls": ["http://localhost:8000/v1"]}, "urls=.*'http://localhost:8000/v1'.*without a path"),
        ({"urls": ["http://far:8000"]}, "weights_folder=None.*folder that this machine and .*far"),
        ({"temperature": 0.7, "top_p": 0.9}, "temperature=0.7.*1 with top_p or top_k"),
        ({"temperature": 0.7, "top_k": 5}, "temperature=0.7.*1 with top_p or top_k"),
        ({"max_concurrent_requests": 0}, "max_concurrent_requests=0.*64"),
        ({"timeout_seconds": 0}, "timeout_seconds=0.*1800"),
        ({"num_generations": 0}, r"VLLMRollout\(num_generations=0\).*8"),
        ({"stop": [""]}, "stop=.*one character"),
    ],
)
def test_an_argument_out_of_range(options: dict[str, Any], words: str) -> None:
    with pytest.raises(ValueError, match=words):
        VLLMRollout(**{"urls": ["http://localhost:8000"], **options})


def test_a_server_far_away_needs_a_folder_that_both_see() -> None:
    assert VLLMRollout(urls=["http://far:8000"], weights_folder="/shared").weights_folder == "/shared"


@pytest.mark.parametrize(
    ("mode", "options", "legal"),
    [
        ("raw_logprobs", {}, True),
        ("processed_logprobs", {}, True),
        ("raw_logprobs", {"temperature": 0.7}, False),
        ("processed_logprobs", {"temperature": 0.7}, True),
        ("raw_logprobs", {"top_k": 5}, True),
        ("processed_logprobs", {"top_k": 5}, False),
        ("raw_logits", {}, False),
    ],
)
def test_log_probs_of_another_distribution_are_refused(
    server: FakeVLLM, mode: str, options: dict[str, Any], legal: bool
) -> None:
    server.facts["model_config"]["logprobs_mode"] = mode
    if legal:
        ready(server, **options)
    else:
        with pytest.raises(
            ValueError, match=f"--logprobs-mode {mode}.*needs .*vllm serve MODEL --host 127.0.0.1 --logprobs-mode"
        ):
            ready(server, **options)


def test_a_server_without_the_routes_for_new_weights(server: FakeVLLM) -> None:
    server.dev_mode = False
    with pytest.raises(RuntimeError, match=r"no route for new weights.*VLLM_SERVER_DEV_MODE=1 vllm serve"):
        ready(server)


def test_no_server(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("time.sleep", lambda seconds: None)
    rollout = VLLMRollout(urls=["http://127.0.0.1:9"])
    with pytest.raises(RuntimeError, match=r"no vLLM server at http://127.0.0.1:9 .*vllm serve MODEL"):
        rollout.setup(StubStrategy(), ModelConfig(path=str(tiny_model_folder("llama"))), None)


def test_a_prompt_that_is_too_long_for_the_server(server: FakeVLLM) -> None:
    server.positions = 16
    rollout = ready(server, max_new_tokens=8)
    with pytest.raises(ValueError, match=r"prompt 1 has 11 tokens; with max_new_tokens=8 .*16 positions"):
        rollout.generate(some_prompts())
    assert server.requests == []


def test_a_peer_that_fails_fails_its_peers(server: FakeVLLM) -> None:
    strategy = StubStrategy(sequence_size=2)
    rollout = ready(server, strategy=strategy)
    strategy.gathered = [({}, "the peer's reason")]
    with pytest.raises(RuntimeError, match="the peer's reason"):
        rollout.generate(some_prompts())
    server.broken = {"/v1/completions"}
    strategy.gathered = [({}, None)]
    with pytest.raises(RuntimeError, match="/v1/completions with 500"):
        rollout.generate(some_prompts())


# ---- training ----

STRATEGIES: dict[str, Any] = {
    "fsdp": (2, FSDPUlyssesStrategy, {}),
    "fsdp-sp2": (2, FSDPUlyssesStrategy, {"ulysses_sp_size": 2}),
    "titan-tp2": (2, TorchTitanStrategy, {"tensor_parallel_degree": 2}),
    "titan-pp2": (2, TorchTitanStrategy, {"pipeline_parallel_degree": 2}),
}


def train(name: str, url: str, config: ModelConfig, **options: Any) -> Any:
    _, strategy, arguments = STRATEGIES[name]
    rollout = VLLMRollout(urls=[url], max_new_tokens=6, num_generations=4, **options)
    module = PolicyModule(policy=config, rollout=rollout, reward=even_tokens, optimizer=sgd, mini_batches=2)
    trainer = make_trainer(strategy(**arguments), max_epochs=1, limit_train_batches=2)
    with warnings.catch_warnings(record=True) as seen:
        warnings.simplefilter("always")
        trainer.fit(module, loader(prompts(), 2), loader(prompts(), 2))
    return module.history.to_dict("records"), [str(item.message) for item in seen]


@pytest.mark.parametrize("name", STRATEGIES)
def test_the_sampler_has_the_trainers_weights_after_each_update(name: str, server: FakeVLLM) -> None:
    adapter = lora() if name == "titan-pp2" else None
    config = ModelConfig(path=str(tiny_model_folder("llama")), lora=adapter)
    for rows, messages in run_workers(STRATEGIES[name][0], train, name, server.url, config):
        assert len(rows) == 2
        for row in rows:
            assert row["train/rollout_log_prob_gap"] < 1e-5
            assert row["train/grad_norm"] > 0
        assert not any("nats" in message for message in messages)
    assert server.folder
    assert not os.path.exists(server.folder)


def test_a_run_whose_server_sleeps_while_it_trains(server: FakeVLLM) -> None:
    server.facts["model_config"]["enable_sleep_mode"] = True
    config = ModelConfig(path=str(tiny_model_folder("llama")))
    for rows, _ in run_workers(2, train, "fsdp", server.url, config, sleep=True):
        assert all(row["train/rollout_log_prob_gap"] < 1e-5 for row in rows)
    assert server.calls.count("POST /sleep") >= 2
    server.broken = {"/v1/completions"}
    with pytest.raises(WorkerError, match="/v1/completions with 500"):
        run_workers(2, train, "fsdp", server.url, config, sleep=True)
    assert server.asleep


def validate_long(url: str) -> None:
    """Data rank 0 has a prompt that fits, data rank 1 one that does not."""
    rollout = VLLMRollout(urls=[url], max_new_tokens=6, num_generations=2, sleep=True)
    config = ModelConfig(path=str(tiny_model_folder("llama")))
    module = PolicyModule(policy=config, rollout=rollout, reward=even_tokens, optimizer=sgd)
    items = [Prompt(token_ids=[3] * length, index=length) for length in (3, 30)]
    make_trainer(FSDPUlyssesStrategy()).validate(module, loader(items, 1), verbose=False)


def test_a_prompt_that_is_too_long_on_one_rank_ends_the_run_on_all_and_servers_sleep(server: FakeVLLM) -> None:
    server.facts["model_config"]["enable_sleep_mode"] = True
    server.positions = 16
    with pytest.raises(WorkerError, match="prompt 30 has 30 tokens") as error:
        run_workers(2, validate_long, server.url, timeout=60)
    assert len(error.value.errors) == 2
    assert server.asleep


def test_a_sampler_with_other_weights_is_warned_about(server: FakeVLLM, monkeypatch: pytest.MonkeyPatch) -> None:
    rpc = FakeVLLM.rpc

    def spoil(self: FakeVLLM, body: dict[str, Any]) -> Any:
        answer = rpc(self, body)
        with torch.no_grad():
            self.model.lm_head.weight.mul_(3.0)
        return answer

    monkeypatch.setattr(FakeVLLM, "rpc", spoil)
    config = ModelConfig(path=str(tiny_model_folder("llama")))
    for rows, _ in (results := run_workers(2, train, "fsdp", server.url, config)):
        assert rows[0]["train/rollout_log_prob_gap"] > SUSPICIOUS_GAP
    assert sum("VLLMRollout differ from the trainer's by" in message for message in results[0][1]) == 1


def test_a_server_that_fails_ends_the_run_on_all_ranks(server: FakeVLLM) -> None:
    server.broken = {"/v1/completions"}
    with pytest.raises(WorkerError, match="/v1/completions with 500"):
        run_workers(2, train, "fsdp", server.url, ModelConfig(path=str(tiny_model_folder("llama"))))
