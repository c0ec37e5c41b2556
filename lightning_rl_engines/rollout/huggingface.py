"""Rollouts with a plain Hugging Face model in this process: no server, any device."""

from collections.abc import Iterator, Sequence
from functools import partial
from typing import TYPE_CHECKING

import torch
from torch import Tensor
from typing_extensions import override

from lightning_rl_engines.models.config import DTypeName, torch_dtype
from lightning_rl_engines.models.huggingface import load_causal_lm
from lightning_rl_engines.rollout.base import Generation, Prompt, RolloutStrategy
from lightning_rl_engines.rollout.decoding import DecodedSequence, decode_batch
from lightning_rl_engines.rollout.sampler import SamplingRollout
from lightning_rl_engines.rollout.sampling import StopRule, derive_seed, sample_tokens
from lightning_rl_engines.rollout.weights import WeightReceiver

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

    from lightning_rl_engines.models.config import ModelConfig


class HFRollout(SamplingRollout):
    """Samples with an unsharded copy of the policy on every rank.

    Simple, exact and slow: right for small models, tests and laptops. Random numbers come from a generator of its
    own, seeded by ``seed``, the ranks and the number of calls so far: the process's random state is never touched,
    and a resumed run continues with the same samples.

    A response ends at an end token (those of the tokenizer, of the model's configuration and of its
    ``generation_config.json``) or a stop; what ended it is part of the response.

    Args:
        num_generations: Responses per prompt.
        max_new_tokens: The most tokens per response.
        temperature: Divides the logits; must be positive. For the most probable tokens call ``generate(greedy=True)``.
        top_p: Sample among the fewest most probable tokens that together reach this probability; 1 means all.
        top_k: Sample among this many most probable tokens; 0 means all.
        dtype: Type of the weights; ``None`` means that of the model configuration, or float32 where it has none.
        max_batch_size: The most sequences that are generated at once; ``None`` means all.
        stop: Further ends of a response: token ids (int) and strings.
        seed: Seed of the samples.

    Raises:
        ValueError: An argument is out of its range.
    """

    def __init__(
        self,
        *,
        num_generations: int = 8,
        max_new_tokens: int = 64,
        temperature: float = 1.0,
        top_p: float = 1.0,
        top_k: int = 0,
        dtype: DTypeName | None = None,
        max_batch_size: int | None = None,
        stop: list[int | str] | None = None,
        seed: int = 0,
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
        limited = max_batch_size is None or max_batch_size >= 1
        self._require(limited, "max_batch_size", max_batch_size, "null, or 1 or more")
        self.dtype = None if dtype is None else torch_dtype(dtype)
        self.max_batch_size = max_batch_size
        self._ready = False
        self._model: PreTrainedModel | None = None

    @override
    def setup(
        self, strategy: RolloutStrategy, model_config: "ModelConfig", tokenizer: "PreTrainedTokenizerBase | None"
    ) -> None:
        strings = self._stop_strings(tokenizer)
        dtype = self.dtype or (torch.float32 if model_config.dtype is None else torch_dtype(model_config.dtype))
        self._ready = False
        self._strategy = strategy
        self._tokenizer = tokenizer
        # Built on the device itself: rotary caches and other non-persistent buffers are the model's own work.
        model = load_causal_lm(model_config, dtype=dtype, device=strategy.root_device, empty=True)
        self._model = model.eval().requires_grad_(False)
        self._receiver = WeightReceiver(self._model)
        self._stop = StopRule(
            token_ids=self._stop_tokens(self._model.config, model_config, tokenizer),
            strings=strings,
            tokenizer=tokenizer,
        )

    @override
    def update_weights(self, named_tensors: Iterator[tuple[str, Tensor]]) -> None:
        if self._model is None:
            raise RuntimeError(
                "HFRollout.update_weights before setup(): call setup(strategy, model_config, tokenizer)."
            )
        self._ready = False
        self._receiver.receive(named_tensors)
        self._ready = True

    @override
    def generate(
        self, prompts: Sequence[Prompt], *, greedy: bool = False, num_generations: int | None = None
    ) -> list[list[Generation]]:
        if not self._ready:
            raise RuntimeError(
                "HFRollout.generate before update_weights(): the model has no (valid) weights; send them first, as in "
                "rollout.update_weights(strategy.get_per_tensor_param(model))."
            )
        assert self._model is not None
        count = self._count(num_generations)
        self.check_prompts(prompts)
        # Greedy responses to one prompt are all alike, so one is generated and repeated.
        samples = 1 if greedy else count
        pairs = [index for index in range(len(prompts)) for _ in range(samples)]
        flat = self._generate_share([prompts[index].token_ids for index in pairs], greedy=greedy)
        grouped = [flat[start : start + samples] for start in range(0, len(flat), samples)]
        if not greedy:
            self._calls += 1
        return [[self._generation(item) for item in group * (count // samples)] for group in grouped]

    @override
    def check_prompts(self, prompts: Sequence[Prompt]) -> None:
        assert self._model is not None
        self._check_prompts(prompts, self._model.config)

    @override
    def teardown(self) -> None:
        self._ready = False
        self._model = None
        self._receiver = self._strategy = self._tokenizer = self._stop = None  # type: ignore[assignment]

    def _generate_share(self, sequences: list[list[int]], *, greedy: bool) -> list[DecodedSequence]:
        """Generate this rank's share of the sequences and gather those of the ranks with the same prompts."""
        rank, size = self._strategy.peer_rank, self._strategy.peer_size
        mine = list(range(len(sequences)))[rank::size]
        # Sequences of like length go together: less padding.
        mine.sort(key=lambda index: len(sequences[index]))
        generator = torch.Generator(device=self._strategy.root_device)
        generator.manual_seed(derive_seed(self.seed, self._strategy.data_parallel_rank, rank, self._calls))
        choose = partial(
            sample_tokens,
            temperature=self.temperature,
            top_k=self.top_k,
            top_p=self.top_p,
            greedy=greedy,
            generator=generator,
        )
        step = self.max_batch_size or max(len(mine), 1)
        assert self._model is not None
        done: dict[int, DecodedSequence] = {}
        for start in range(0, len(mine), step):
            batch = mine[start : start + step]
            decoded = decode_batch(
                self._model,
                [sequences[index] for index in batch],
                max_new_tokens=self.max_new_tokens,
                choose=choose,
                is_complete=self._stop,
            )
            done.update(zip(batch, decoded, strict=True))
        if size > 1:
            for other in self._strategy.all_gather_objects(done, group="peers"):
                done.update(other)
        return [done[index] for index in range(len(sequences))]
