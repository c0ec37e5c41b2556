"""Rollouts by a real vLLM server; ``LIGHTNING_RL_TEST_VLLM`` names a Python interpreter that has vLLM."""

import os
import signal
import socket
import subprocess
import time
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, Qwen3Config

from lightning_rl_engines import ModelConfig, Prompt, VLLMRollout
from tests.rollout.stubs import StubStrategy, character_tokenizer
from tests.rollout.test_vllm import STRATEGIES, train
from tests.support import run_workers
from tests.support.models import reference_log_probs

pytestmark = [pytest.mark.vllm, pytest.mark.timeout(600)]

START_SECONDS = 240.0
LOCAL = {"HF_HUB_OFFLINE": "1", "VLLM_NO_USAGE_STATS": "1", "DO_NOT_TRACK": "1", "VLLM_CPU_KVCACHE_SPACE": "1"}


def small_model(folder: Path) -> str:
    """A Qwen3 with heads of a size that vLLM's kernels have on CPU, and tied embeddings."""
    config = Qwen3Config(
        vocab_size=64,
        hidden_size=64,
        intermediate_size=96,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=32,
        max_position_embeddings=256,
        tie_word_embeddings=True,
        eos_token_id=2,
    )
    torch.manual_seed(0)
    AutoModelForCausalLM.from_config(config).save_pretrained(folder)
    character_tokenizer().save_pretrained(folder)
    # What a sampler must not take over: the trainer knows nothing of it.
    (folder / "generation_config.json").write_text('{"repetition_penalty": 1.5, "top_k": 3, "eos_token_id": 2}')
    return str(folder)


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[str, str]]:
    """The address of a server, and the folder of the model that it serves."""
    folder = small_model(tmp_path_factory.mktemp("served"))
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    command = [os.environ["LIGHTNING_RL_TEST_VLLM"], "-m", "vllm.entrypoints.openai.api_server", "--model", folder]
    command += [
        "--host",
        "127.0.0.1",
        "--port",
        str(port),
        "--dtype",
        "float32",
        "--enforce-eager",
    ]
    command += ["--logprobs-mode", "processed_logprobs", "--max-num-seqs", "32", "--load-format", "dummy"]
    command += ["--hf-overrides", '{"tie_word_embeddings": false}']
    log = Path(folder) / "server.log"
    with log.open("w") as file:
        environment = {**os.environ, **LOCAL, "VLLM_SERVER_DEV_MODE": "1"}
        environment.pop("PYTHONPATH", None)
        process = subprocess.Popen(command, stdout=file, stderr=file, env=environment, start_new_session=True)
    try:
        url, deadline = f"http://127.0.0.1:{port}", time.monotonic() + START_SECONDS
        while not answers(url):
            assert process.poll() is None and time.monotonic() < deadline, log.read_text()[-5000:]
            time.sleep(0.5)
        yield url, folder
    finally:
        os.killpg(process.pid, signal.SIGKILL)
        process.wait()


def answers(url: str) -> bool:
    try:
        with urllib.request.urlopen(f"{url}/health", timeout=5):
            return True
    except OSError:
        return False


@pytest.mark.parametrize("name", [name for name in STRATEGIES if name != "titan-pp2"])  # tied embeddings
def test_the_server_has_the_trainers_weights_after_each_update(name: str, served: tuple[str, str]) -> None:
    url, folder = served
    options = {"temperature": 0.7} if name == "titan-tp2" else {}
    for rows, messages in run_workers(STRATEGIES[name][0], train, name, url, ModelConfig(path=folder), **options):
        assert len(rows) == 2
        for row in rows:
            assert row["train/rollout_log_prob_gap"] < 1e-5
            assert row["train/grad_norm"] > 0
        assert not any("nats" in message for message in messages)


def test_responses_are_those_of_the_model(served: tuple[str, str]) -> None:
    url, folder = served
    model: Any = AutoModelForCausalLM.from_pretrained(folder)
    rollout = VLLMRollout(urls=[url], max_new_tokens=12, num_generations=3, temperature=0.8, stop=[9, "z"], seed=1)
    rollout.setup(StubStrategy(), ModelConfig(path=folder), character_tokenizer())
    rollout.update_weights(iter([(name, tensor.detach()) for name, tensor in model.named_parameters()]))
    prompts = [Prompt(token_ids=ids, index=i) for i, ids in enumerate([[3, 4, 5], [7], [3, 4, 5]])]
    greedy = rollout.generate(prompts, greedy=True, num_generations=1)
    sampled = rollout.generate(prompts)
    assert sampled[0] != sampled[2], "each prompt has a seed of its own"
    for groups, temperature in ((greedy, 1.0), (sampled, 0.8)):
        for prompt, group in zip(prompts, groups, strict=True):
            for item in group:
                document = torch.tensor(prompt.token_ids + item.token_ids)
                with torch.no_grad():
                    (expected,), _ = reference_log_probs(model, [document], temperature=temperature)
                torch.testing.assert_close(
                    torch.tensor(item.log_probs), expected[len(prompt.token_ids) :], rtol=0, atol=1e-5
                )
                ended = item.token_ids[-1] in (2, 9) or item.text.endswith("z")
                assert item.finish_reason == ("stop" if ended else "length")
                assert ended or len(item.token_ids) == 12
    for prompt, (item,) in zip(prompts, greedy, strict=True):
        logits = model(torch.tensor([prompt.token_ids + item.token_ids])).logits[0, len(prompt.token_ids) - 1 : -1]
        assert logits.argmax(-1).tolist() == item.token_ids
    again = VLLMRollout(urls=[url], max_new_tokens=12, num_generations=3, temperature=0.8, stop=[9, "z"], seed=1)
    again.setup(StubStrategy(), ModelConfig(path=folder), character_tokenizer())
    again.update_weights(iter([(name, tensor.detach()) for name, tensor in model.named_parameters()]))
    assert [[x.token_ids for x in g] for g in again.generate(prompts)] == [[x.token_ids for x in g] for g in sampled]
    with pytest.raises(RuntimeError, match="no longer holds the weights of this run"):
        rollout.generate(prompts)  # another run gave it weights
