"""Rollouts by vLLM servers."""

import os
import shutil
import tempfile
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import TYPE_CHECKING, Any, TypeVar
from urllib.parse import urlsplit

import torch
from torch import Tensor
from typing_extensions import override

from lightning_rl_engines.export.folder import HFFolderSink
from lightning_rl_engines.export.sinks import ExportContext, drain
from lightning_rl_engines.models.agreement import on_rank_zero
from lightning_rl_engines.models.config import DTypeName, torch_dtype
from lightning_rl_engines.models.huggingface import load_causal_lm
from lightning_rl_engines.rollout.base import Generation, Prompt, RolloutStrategy
from lightning_rl_engines.rollout.decoding import DecodedSequence
from lightning_rl_engines.rollout.handover import HandoverFolder
from lightning_rl_engines.rollout.sampler import SamplingRollout
from lightning_rl_engines.rollout.sampling import derive_seed
from lightning_rl_engines.rollout.vllm_server import COMMAND, ServerFacts, VLLMServer

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

    from lightning_rl_engines.models.config import ModelConfig

T = TypeVar("T")

_LOCAL = ("127.0.0.1", "localhost", "::1")
_SHARED_MEMORY = "/dev/shm"


class VLLMRollout(SamplingRollout):
    """Samples with vLLM servers that run beside the training.

    Start each with the policy's own model, in an environment of its own if you like::

        VLLM_SERVER_DEV_MODE=1 vllm serve MODEL --host 127.0.0.1 --logprobs-mode processed_logprobs

    Whoever reaches such a server commands it: serve beyond the machine in a trusted network alone. A server with
    ``--api-key`` needs the key in the environment variable ``VLLM_API_KEY`` here too.

    New weights are written into ``weights_folder`` by all ranks as a Hugging Face folder, which every server reads
    while it takes no requests; then it forgets the keys and values of old ones. A server that no longer holds this
    run's weights, since it was started again or another run gave it some, is noticed, and its responses are refused.

    Prompts are spread over ranks and servers. Each has a seed of its own, from ``seed``, the data rank, the number of
    calls so far and its place, so a resumed run asks for the same samples. Log-probabilities are those of vLLM's
    kernels, in its type: ``train/rollout_log_prob_gap`` shows how far they are from the trainer's, and
    ``RolloutCorrection`` corrects for it. Of a greedy response they are at temperature 1.

    A response ends at an end token (those of the tokenizer, of the model's configuration and of its
    ``generation_config.json``) or a stop; what ended it is part of the response. Other defaults of that file, such as
    a repetition penalty, are not used: the trainer could not know of them.

    Args:
        urls: Addresses of the servers, such as ``["http://127.0.0.1:8000"]``.
        num_generations: Responses per prompt.
        max_new_tokens: The most tokens per response.
        temperature: Divides the logits; must be positive. For the most probable tokens call ``generate(greedy=True)``.
        top_p: Sample among the fewest most probable tokens that together reach this probability; 1 means all. With 1
            and ``top_k=0`` a server needs ``--logprobs-mode processed_logprobs``, unless the temperature is 1.
        top_k: Sample among this many most probable tokens; 0 means all. With ``top_p`` or ``top_k`` a server needs
            ``--logprobs-mode raw_logprobs`` and a temperature of 1: vLLM's other log-probabilities are of the truncated
            distribution, which the trainer does not compute.
        dtype: Type that weights are written in, such as the servers' ``"bfloat16"``; ``None`` keeps that in which they
            are streamed: the storage type, and fp32 for merged adapters.
        stop: Further ends of a response: token ids (int) and strings.
        seed: Seed of the samples.
        weights_folder: A folder that ranks and servers see; what is written there is removed when the servers have
            read it, or by the next run if this one is killed. ``None`` takes shared memory (or the temporary folder)
            with room for the weights, where all servers run on this machine.
        sleep: Let the servers give the memory of their accelerators back while the model trains: weights wait in host
            memory, keys and values are dropped. For servers on the trainer's own devices, which were started with
            ``--enable-sleep-mode``. They sleep at the end, too, until ``/wake_up`` or the next run.
        max_concurrent_requests: Requests that each rank sends at once; a prompt's responses are one request.
        timeout_seconds: How long a request may take.

    Raises:
        ValueError: An argument is out of its range.
    """

    def __init__(
        self,
        *,
        urls: list[str],
        num_generations: int = 8,
        max_new_tokens: int = 64,
        temperature: float = 1.0,
        top_p: float = 1.0,
        top_k: int = 0,
        dtype: DTypeName | None = None,
        stop: list[int | str] | None = None,
        seed: int = 0,
        weights_folder: str | None = None,
        sleep: bool = False,
        max_concurrent_requests: int = 64,
        timeout_seconds: float = 1800.0,
    ) -> None:
        super().__init__(
            num_generations=num_generations,
            max_new_tokens=max_new_tokens,
            temperature=temperature,
            top_p=top_p,
            top_k=top_k,
            stop=stop,
            seed=seed,
        )
        self._require(bool(urls), "urls", urls, "the address of each server, such as ['http://127.0.0.1:8000']")
        for url in urls:
            parts = urlsplit(url)
            known = parts.scheme in ("http", "https") and bool(parts.hostname) and parts.path in ("", "/")
            self._require(known, "urls", urls, "addresses such as 'http://127.0.0.1:8000', without a path")
        positive = max_concurrent_requests >= 1
        self._require(positive, "max_concurrent_requests", max_concurrent_requests, "1 or more, such as 64")
        self._require(timeout_seconds > 0, "timeout_seconds", timeout_seconds, "a positive number, such as 1800")
        local = all(urlsplit(url).hostname in _LOCAL for url in urls)
        here = local or weights_folder is not None
        self._require(here, "weights_folder", weights_folder, f"a folder that this machine and {urls} share")
        truncated = top_p < 1 or top_k > 0
        self._require(
            not (truncated and temperature != 1),
            "temperature",
            temperature,
            "1 with top_p or top_k: vLLM reports log-probabilities before both or after both",
        )
        self.urls = [url.rstrip("/") for url in urls]
        self.dtype = None if dtype is None else torch_dtype(dtype)
        self.weights_folder = weights_folder
        self.sleep = sleep
        self.max_concurrent_requests = max_concurrent_requests
        self.timeout_seconds = timeout_seconds
        self._logprobs_modes = _modes(truncated, temperature)
        self._facts: list[ServerFacts] = []
        self._versions = 0
        self._version: str | None = None
        self._handover: HandoverFolder | None = None  # on rank 0

    # ---- set-up ----

    @override
    def setup(
        self, strategy: RolloutStrategy, model_config: "ModelConfig", tokenizer: "PreTrainedTokenizerBase | None"
    ) -> None:
        self.teardown()
        self._strategy = strategy
        self._tokenizer = tokenizer
        strings = self._stop_strings(tokenizer)
        # Its configuration is that of the policy with all changes; no storage is made.
        model = load_causal_lm(model_config, dtype=torch.float32, device="meta", empty=True)
        self._config = model.config
        self._tied = _tied_names(model)
        self._stops = {"stop": strings, "stop_token_ids": self._stop_tokens(self._config, model_config, tokenizer)}
        self._facts = self._on_all_ranks(self._check_servers)
        size = sum(item.numel() * (self.dtype or torch.float32).itemsize for item in model.parameters())
        self._folder = self._on_all_ranks(lambda: self._make_folder(size))

    def _make_folder(self, size: int) -> str:
        self._handover = HandoverFolder(self.weights_folder or _fast_folder(size))
        return self._handover.model

    def _check_servers(self) -> list[ServerFacts]:
        facts = self._on_all_servers(VLLMServer.facts)
        for url, seen in zip(self.urls, facts, strict=True):
            if seen.logprobs_mode not in self._logprobs_modes:
                raise ValueError(
                    f"the vLLM server at {url} has --logprobs-mode {seen.logprobs_mode}, and VLLMRollout("
                    f"temperature={self.temperature}, top_p={self.top_p}, top_k={self.top_k}) needs "
                    f"{' or '.join(self._logprobs_modes)}; start it as in: "
                    f"{COMMAND.replace('processed_logprobs', self._logprobs_modes[0])}"
                )
            if self.sleep and not seen.can_sleep:
                raise ValueError(
                    f"VLLMRollout(sleep=True) needs servers that can; start the one at {url} with "
                    "--enable-sleep-mode, or leave sleep=False."
                )
            if self._tied and seen.device == "cpu" and not seen.head_untied:
                raise ValueError(
                    f"the vLLM server at {url} runs on CPU, where a head that is tied to the embeddings keeps "
                    "its first weights for good; give it one of its own: "
                    "--load-format dummy --hf-overrides '{\"tie_word_embeddings\": false}'"
                )
        return facts

    @override
    def teardown(self) -> None:
        self._facts, self._version, self._tokenizer = [], None, None
        if self._handover is not None:
            self._handover.close()
            self._handover = None

    # ---- weights ----

    @override
    def update_weights(self, named_tensors: Iterator[tuple[str, Tensor]]) -> None:
        if not self._facts:
            raise RuntimeError(
                "VLLMRollout.update_weights before setup(): call setup(strategy, model_config, tokenizer)."
            )
        self._version = None
        sink = HFFolderSink(path=self._folder)
        try:
            drain(self._cast(named_tensors), sink, self._strategy, context=ExportContext(config=self._config))
            self._versions += 1
            # Of this run alone: others may use the same servers after it.
            version = f"{os.path.basename(os.path.dirname(self._folder))}-{self._versions}"
            self._on_all_ranks(lambda: self._load(version))
            self._version = version
        finally:
            if self._handover is not None:
                self._handover.clear()

    def _cast(self, named_tensors: Iterator[tuple[str, Tensor]]) -> Iterator[tuple[str, Tensor]]:
        untied = any(seen.head_untied for seen in self._facts)
        for name, tensor in named_tensors:
            cast_ = tensor if self.dtype is None or not tensor.is_floating_point() else tensor.to(self.dtype)
            # A server with a head of its own wants the tied tensor under both of its names.
            for each in self._tied if untied and name in self._tied else (name,):
                yield each, cast_ if each == name else cast_.clone()

    def _load(self, version: str) -> None:
        facts = dict(zip(self.urls, self._facts, strict=True))

        def load(server: VLLMServer) -> None:
            if facts[server.url].can_sleep:
                server.wake()  # an earlier run may have left it asleep
            server.load_weights(self._folder, version, load_format=facts[server.url].load_format)

        self._on_all_servers(load)

    # ---- responses ----

    @override
    def generate(
        self, prompts: Sequence[Prompt], *, greedy: bool = False, num_generations: int | None = None
    ) -> list[list[Generation]]:
        if self._version is None:
            raise RuntimeError(
                "VLLMRollout.generate before update_weights(): the servers have no weights of this run; send them "
                "first, as in rollout.update_weights(strategy.get_per_tensor_param(model))."
            )
        count = self._count(num_generations)
        # Greedy responses to one prompt are all alike, so one is generated and repeated.
        samples = 1 if greedy else count
        with self._awake():
            done = self._complete_with_peers(prompts, samples, greedy=greedy)
        if not greedy:
            self._calls += 1
        return [[self._generation(item) for item in done[index] * (count // samples)] for index in range(len(prompts))]

    @override
    def check_prompts(self, prompts: Sequence[Prompt]) -> None:
        if not self._facts:
            raise RuntimeError(
                "VLLMRollout.check_prompts before setup(): call setup(strategy, model_config, tokenizer)."
            )
        self._check_prompts(prompts, self._config, min(seen.max_model_len for seen in self._facts))

    @contextmanager
    def _awake(self) -> Iterator[None]:
        """Wake servers that sleep, and send them to sleep when all ranks have what they asked for."""
        if not self.sleep:
            yield
            return
        self._on_all_ranks(lambda: self._on_all_servers(VLLMServer.wake))
        try:
            yield
        finally:
            self._strategy.all_gather_objects(None, group="world")
            self._on_all_ranks(lambda: self._on_all_servers(VLLMServer.sleep))

    def _complete_with_peers(
        self, prompts: Sequence[Prompt], samples: int, *, greedy: bool
    ) -> dict[int, list[DecodedSequence]]:
        mine = range(self._strategy.peer_rank, len(prompts), self._strategy.peer_size)
        done: dict[int, list[DecodedSequence]] = {}
        failure: Exception | None = None
        try:
            # Not before: other data ranks are about to wake the servers, and wait for this one.
            self.check_prompts(prompts)
            done = self._complete(prompts, mine, samples, greedy=greedy)
        except Exception as error:  # of any type: peers wait
            failure = error
        if self._strategy.peer_size > 1:
            for other, message in self._strategy.all_gather_objects((done, failure and str(failure)), group="peers"):
                if message is not None:
                    raise failure or RuntimeError(message)
                done = {**done, **other}
        elif failure is not None:
            raise failure
        return done

    def _complete(
        self, prompts: Sequence[Prompt], mine: Sequence[int], samples: int, *, greedy: bool
    ) -> dict[int, list[DecodedSequence]]:
        self._on_all_servers(self._require_version)
        options = self._request(samples, greedy=greedy)
        place = self._strategy.data_parallel_rank

        def ask(index: int) -> list[DecodedSequence]:
            number = (place + index) % len(servers)
            seed = derive_seed(self.seed, place, self._calls, index)
            request = {**options, "model": self._facts[number].model, "seed": seed}
            return [_decoded(choice) for choice in servers[number].complete(prompts[index].token_ids, request)]

        with self._connected() as servers, ThreadPoolExecutor(self.max_concurrent_requests) as pool:
            done = dict(zip(mine, pool.map(ask, mine), strict=True))
        self._on_all_servers(self._require_version)  # or some may be of other weights
        return done

    def _require_version(self, server: VLLMServer) -> None:
        if (found := server.weight_version()) != self._version:
            raise RuntimeError(
                f"the vLLM server at {server.url} no longer holds the weights of this run (version {found!r}, not "
                f"{self._version!r}): it was started again, or another run uses it. Resume from the last checkpoint."
            )

    def _request(self, samples: int, *, greedy: bool) -> dict[str, Any]:
        # All of it is said: a server takes what is left out from the model's generation_config.json.
        return {
            **self._stops,
            "n": samples,
            "max_tokens": self.max_new_tokens,
            "temperature": 0.0 if greedy else self.temperature,
            "top_p": self.top_p,
            "top_k": self.top_k,
            "min_p": 0.0,
            "repetition_penalty": 1.0,
            "presence_penalty": 0.0,
            "frequency_penalty": 0.0,
            "logprobs": 0,
            "return_token_ids": True,
            "skip_special_tokens": False,  # so that a stop string may be one
        }

    # ---- several at once ----

    @contextmanager
    def _connected(self) -> Iterator[list[VLLMServer]]:
        # Not for longer than a phase: between them a server may end, and nobody says when the last one was.
        with ExitStack() as stack:
            yield [
                stack.enter_context(
                    VLLMServer(url, timeout_seconds=self.timeout_seconds, max_connections=self.max_concurrent_requests)
                )
                for url in self.urls
            ]

    def _on_all_servers(self, action: Callable[[VLLMServer], T]) -> list[T]:
        with self._connected() as servers, ThreadPoolExecutor(len(servers)) as pool:
            return list(pool.map(action, servers))

    def _on_all_ranks(self, action: Callable[[], T]) -> T:
        strategy = self._strategy
        return on_rank_zero(action, strategy.global_rank == 0, partial(strategy.all_gather_objects, group="world"))


def _modes(truncated: bool, temperature: float) -> tuple[str, ...]:
    """Modes of a server in which it reports log-probabilities at the temperature, over the whole vocabulary."""
    if truncated:
        return ("raw_logprobs",)
    return ("processed_logprobs", "raw_logprobs") if temperature == 1 else ("processed_logprobs",)


def _tied_names(model: "PreTrainedModel") -> tuple[str, ...]:
    """Names of the tensor that is both embeddings and head; none where they are two."""
    embeddings, head = model.get_input_embeddings(), model.get_output_embeddings()
    if embeddings is None or head is None or embeddings.weight is not head.weight:
        return ()
    shared = embeddings.weight
    return tuple(name for name, item in model.named_parameters(remove_duplicate=False) if item is shared)


def _fast_folder(size: int) -> str:
    """Shared memory, where there is some with room for so many bytes: containers often have 64 MB of it."""
    room = shutil.disk_usage(_SHARED_MEMORY).free if os.path.isdir(_SHARED_MEMORY) else 0
    return _SHARED_MEMORY if room > 1.1 * size else tempfile.gettempdir()


def _decoded(choice: dict[str, Any]) -> DecodedSequence:
    reason = choice["finish_reason"]
    if reason not in ("stop", "length"):
        raise RuntimeError(f"a vLLM server ended a response for the reason {reason!r}, not 'stop' or 'length'")
    return DecodedSequence(
        token_ids=list(choice["token_ids"]),
        log_probs=[float(value) for value in choice["logprobs"]["token_logprobs"]],
        finish_reason=reason,
    )
