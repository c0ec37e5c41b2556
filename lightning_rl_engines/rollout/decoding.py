"""Batched decoding of a plain Hugging Face causal language model with a key-value cache.

A loop of our own rather than transformers' ``generate``: that one draws from the process's global random state, reads
hidden defaults from generation configurations (penalties, suppressed tokens), and gives log-probabilities of sampled
tokens only by keeping the scores of every step. This loop keeps one step of logits.
"""

import inspect
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

import torch
from torch import Tensor

if TYPE_CHECKING:
    from transformers import PreTrainedModel

ChooseTokens = Callable[[Tensor], tuple[Tensor, Tensor]]
"""Logits ``[B, V]`` to token ids ``[B]`` and log-probabilities ``[B]``."""


@dataclass
class DecodedSequence:
    """A response as token ids, log-probabilities and the reason of its end."""

    token_ids: list[int]
    log_probs: list[float]
    finish_reason: Literal["stop", "length"] = "length"


@torch.no_grad()
def decode_batch(
    model: "PreTrainedModel",
    prompts: Sequence[Sequence[int]],
    *,
    max_new_tokens: int,
    choose: ChooseTokens,
    is_complete: Callable[[Sequence[int]], bool],
) -> list[DecodedSequence]:
    """Continue prompts of any lengths, left-padded into one batch; finished sequences leave it.

    Args:
        model: In evaluation mode; the batch is made on its device.
        prompts: Token ids, none of them empty.
        max_new_tokens: The most tokens per response.
        choose: Picks the next tokens.
        is_complete: Called with a response after each of its tokens.

    Returns:
        One response per prompt.
    """
    from transformers import DynamicCache

    responses = [DecodedSequence([], []) for _ in prompts]
    if not prompts:
        return responses
    input_ids, mask = _left_pad(prompts, model.device)
    positions = (mask.cumsum(dim=-1) - 1).clamp_min(0)
    cache = DynamicCache(config=model.config)
    active = list(range(len(prompts)))
    accepted = inspect.signature(model.forward).parameters
    # Code from the hub may still have the cache's former name.
    fixed: dict[str, Any] = {"use_cache": True, "cache" if "cache" in accepted else "past_key_values": cache}
    if "logits_to_keep" in accepted:
        fixed["logits_to_keep"] = 1
    for _ in range(max_new_tokens):
        # Models without position embeddings have no such argument.
        placed = {"position_ids": positions} if "position_ids" in accepted else {}
        output = model(input_ids=input_ids, attention_mask=mask, **fixed, **placed)
        tokens, log_probs = choose(output.logits[:, -1])
        kept = _append(responses, active, tokens.tolist(), log_probs.tolist(), is_complete)
        if not kept:
            break
        input_ids, positions = tokens[:, None], positions[:, -1:] + 1
        mask = torch.cat([mask, mask.new_ones(len(active), 1)], dim=-1)
        if len(kept) < len(active):
            rows = torch.tensor(kept, device=mask.device)
            cache.batch_select_indices(rows)
            input_ids, positions, mask = input_ids[rows], positions[rows], mask[rows]
            active = [active[row] for row in kept]
    return responses


def _left_pad(prompts: Sequence[Sequence[int]], device: torch.device) -> tuple[Tensor, Tensor]:
    width = max(len(prompt) for prompt in prompts)
    # Any valid id does as padding: the mask hides it.
    ids = torch.tensor([[0] * (width - len(prompt)) + list(prompt) for prompt in prompts])
    mask = torch.tensor([[0] * (width - len(prompt)) + [1] * len(prompt) for prompt in prompts])
    return ids.to(device), mask.to(device)


def _append(
    responses: list[DecodedSequence],
    active: list[int],
    tokens: list[int],
    log_probs: list[float],
    is_complete: Callable[[Sequence[int]], bool],
) -> list[int]:
    """Add a token to each active response; return the rows of the batch that go on."""
    kept = []
    for row, index in enumerate(active):
        response = responses[index]
        response.token_ids.append(tokens[row])
        response.log_probs.append(log_probs[row])
        if is_complete(response.token_ids):
            response.finish_reason = "stop"
        else:
            kept.append(row)
    return kept
