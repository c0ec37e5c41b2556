"""What rollouts that sample by temperature, top-p and top-k have in common: options, limits, the counter of calls."""

from collections.abc import Sequence
from contextlib import suppress
from typing import TYPE_CHECKING, Any, cast

from typing_extensions import override

from lightning_rl_engines.rollout.base import Generation, Prompt, RolloutEngine
from lightning_rl_engines.rollout.decoding import DecodedSequence

if TYPE_CHECKING:
    from transformers import PretrainedConfig, PreTrainedTokenizerBase

    from lightning_rl_engines.models.config import ModelConfig


class SamplingRollout(RolloutEngine):
    """Base of rollouts with the usual options of sampling.

    Args:
        num_generations: Responses per prompt.
        max_new_tokens: The most tokens per response.
        temperature: Divides the logits; must be positive. For the most probable tokens call ``generate(greedy=True)``.
        top_p: Sample among the fewest most probable tokens that together reach this probability; 1 means all.
        top_k: Sample among this many most probable tokens; 0 means all.
        stop: Further ends of a response: token ids (int) and strings.
        seed: Seed of the samples.

    Raises:
        ValueError: An argument is out of its range.
    """

    _tokenizer: "PreTrainedTokenizerBase | None"

    def __init__(
        self,
        *,
        num_generations: int,
        max_new_tokens: int,
        temperature: float,
        top_p: float,
        top_k: int,
        stop: list[int | str] | None,
        seed: int,
    ) -> None:
        self._require(num_generations >= 1, "num_generations", num_generations, "1 or more, such as 8")
        self._require(max_new_tokens >= 1, "max_new_tokens", max_new_tokens, "1 or more, such as 64")
        self._require(temperature > 0, "temperature", temperature, "a positive number, such as 1.0")
        self._require(0 < top_p <= 1, "top_p", top_p, "a number in (0, 1], such as 1.0")
        self._require(top_k >= 0, "top_k", top_k, "0 for all tokens, or a count such as 50")
        stops = list(stop or [])
        self._require("" not in stops, "stop", stop, "strings of at least one character")
        self.num_generations = num_generations
        self.max_new_tokens = max_new_tokens
        self.temperature = temperature
        self.top_p = top_p
        self.top_k = top_k
        self.stop = stops
        self.seed = seed
        self._calls = 0
        self._tokenizer = None

    @override
    def state_dict(self) -> dict[str, Any]:
        return {"calls": self._calls}

    @override
    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self._calls = state_dict["calls"]

    def _require(self, condition: bool, name: str, value: object, remedy: str) -> None:
        if not condition:
            raise ValueError(f"{type(self).__name__}({name}={value!r}) is out of range; use {remedy}.")

    def _stop_strings(self, tokenizer: "PreTrainedTokenizerBase | None") -> list[str]:
        strings = [stop for stop in self.stop if isinstance(stop, str)]
        if strings and tokenizer is None:
            raise ValueError(
                f"{type(self).__name__}(stop={self.stop!r}) holds strings, which need a tokenizer; name one with "
                "ModelConfig(tokenizer=...), or give token ids."
            )
        return strings

    def _stop_tokens(
        self,
        config: "PretrainedConfig",
        model_config: "ModelConfig",
        tokenizer: "PreTrainedTokenizerBase | None",
    ) -> list[int]:
        """Tokens that end a response: those of the options, the tokenizer and the model's own configurations."""
        ids = [stop for stop in self.stop if isinstance(stop, int)]
        return [*ids, *sorted(_end_tokens(config, model_config, tokenizer))]

    def _count(self, num_generations: int | None) -> int:
        count = self.num_generations if num_generations is None else num_generations
        self._require(count >= 1, "num_generations", count, "1 or more")
        return count

    def _check_prompts(self, prompts: Sequence[Prompt], config: "PretrainedConfig", limit: int | None = None) -> None:
        """Refuse prompts that the model cannot continue.

        Args:
            prompts: The prompts.
            config: Configuration of the model.
            limit: The most tokens of prompt and response; ``None`` takes the positions of the model.
        """
        text = config.get_text_config()
        limit = limit or getattr(text, "max_position_embeddings", None)
        for prompt in prompts:
            length = len(prompt.token_ids)
            if length == 0:
                raise ValueError(f"prompt {prompt.index} has no tokens; a response needs at least one before it.")
            bad = [token for token in prompt.token_ids if not 0 <= token < text.vocab_size]
            if bad:
                raise ValueError(
                    f"prompt {prompt.index} holds token id {bad[0]}, outside the model's vocabulary of "
                    f"{text.vocab_size}; use the tokenizer of this model."
                )
            if limit is not None and length + self.max_new_tokens > limit:
                remedies = [f"max_new_tokens to at most {limit - length}"] if length < limit else []
                if limit > self.max_new_tokens:
                    remedies.append(f"max_prompt_length={limit - self.max_new_tokens} in the data module")
                raise ValueError(
                    f"prompt {prompt.index} has {length} tokens; with max_new_tokens={self.max_new_tokens} it could "
                    f"exceed the model's {limit} positions. "
                    + (f"Set {', or '.join(remedies)}." if remedies else "Set a smaller max_new_tokens.")
                )

    def _generation(self, item: DecodedSequence) -> Generation:
        text = ""
        if self._tokenizer is not None:
            decoded = self._tokenizer.decode(
                item.token_ids, skip_special_tokens=True, clean_up_tokenization_spaces=False
            )
            text = cast(str, decoded)
        return Generation(
            token_ids=list(item.token_ids), log_probs=list(item.log_probs), finish_reason=item.finish_reason, text=text
        )


def _end_tokens(
    config: "PretrainedConfig", model_config: "ModelConfig", tokenizer: "PreTrainedTokenizerBase | None"
) -> set[int]:
    """Return the end tokens that the tokenizer, the configuration and the generation configuration name."""
    from transformers import GenerationConfig

    named: list[Any] = [config.get_text_config().eos_token_id]
    if tokenizer is not None:
        named.append(tokenizer.eos_token_id)
    if model_config.path is not None:
        # Many checkpoints come without a generation_config.json.
        with suppress(OSError):
            generation = GenerationConfig.from_pretrained(model_config.path, revision=model_config.revision or "main")
            named.append(generation.eos_token_id)
    lists = [ids if isinstance(ids, list) else [ids] for ids in named if ids is not None]
    return {int(token) for ids in lists for token in ids}
