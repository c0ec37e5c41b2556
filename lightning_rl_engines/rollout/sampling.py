"""Choosing tokens and knowing when to stop: no model, no configuration objects.

Shape suffixes: B sequences, V vocabulary.
"""

import hashlib
from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch
from torch import Tensor

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


def sample_tokens(
    logits_BV: Tensor,
    *,
    temperature: float,
    top_k: int,
    top_p: float,
    greedy: bool,
    generator: torch.Generator | None,
) -> tuple[Tensor, Tensor]:
    """Choose one token per sequence.

    Args:
        logits_BV: Raw logits of the next token, any floating type.
        temperature: Divides the logits, for the choice and for the log-probabilities.
        top_k: Sample among this many most probable tokens; 0 means all.
        top_p: Sample among the fewest most probable tokens that together reach this probability, after ``top_k``.
        greedy: Take the most probable token.
        generator: Source of randomness on the logits' device; unused when greedy.

    Returns:
        Token ids ``[B]`` int64, and their log-probabilities ``[B]`` float32 over the whole vocabulary.
    """
    scaled_BV = logits_BV.float() / temperature
    log_probs_BV = scaled_BV.log_softmax(dim=-1)
    if greedy:
        tokens_B1 = logits_BV.argmax(dim=-1, keepdim=True)
    else:
        probs_BV = _truncate(scaled_BV, top_k=top_k, top_p=top_p).softmax(dim=-1)
        tokens_B1 = torch.multinomial(probs_BV, num_samples=1, generator=generator)
    return tokens_B1.squeeze(-1), log_probs_BV.gather(-1, tokens_B1).squeeze(-1)


def _truncate(scaled_BV: Tensor, *, top_k: int, top_p: float) -> Tensor:
    if 0 < top_k < scaled_BV.shape[-1]:
        smallest_B1 = scaled_BV.topk(top_k, dim=-1).values[:, -1:]
        scaled_BV = scaled_BV.masked_fill(scaled_BV < smallest_B1, float("-inf"))
    if top_p < 1.0:
        sorted_BV, order_BV = scaled_BV.sort(dim=-1, descending=True)
        probs_BV = sorted_BV.softmax(dim=-1)
        # A token goes when those before it reach top_p on their own; the first always stays.
        drop_BV = probs_BV.cumsum(dim=-1) - probs_BV >= top_p
        drop_BV[:, 0] = False
        drop_BV = torch.zeros_like(drop_BV).scatter(-1, order_BV, drop_BV)
        scaled_BV = scaled_BV.masked_fill(drop_BV, float("-inf"))
    return scaled_BV


def derive_seed(*parts: int) -> int:
    """Return a 63-bit seed that depends on every part, so that neighbouring ranks and calls are unrelated."""
    digest = hashlib.sha256(",".join(map(str, parts)).encode()).digest()
    return int.from_bytes(digest[:8], "little") >> 1


class StopRule:
    """Decides after each token whether a response is complete.

    Args:
        token_ids: Tokens that end a response.
        strings: Strings that end a response as soon as they appear in its text; special tokens count as text.
        tokenizer: Needed for strings.
    """

    def __init__(
        self,
        *,
        token_ids: Sequence[int],
        strings: Sequence[str] = (),
        tokenizer: "PreTrainedTokenizerBase | None" = None,
    ) -> None:
        self.token_ids = frozenset(token_ids)
        self.strings = tuple(strings)
        self._tokenizer = tokenizer
        # A token spells at least one byte, so the string lies within this many last tokens; a few more let
        # tokenizers that treat the start of a text specially settle.
        self._window = max((len(text.encode()) for text in self.strings), default=0) + 8

    def __call__(self, response: Sequence[int]) -> bool:
        """Return whether the last token completes the response."""
        if response[-1] in self.token_ids:
            return True
        if not self.strings or self._tokenizer is None:
            return False
        tail = self._tokenizer.decode(list(response[-self._window :]), clean_up_tokenization_spaces=False)
        return any(text in tail for text in self.strings)
