"""Advantages per token from rewards per token and a critic, and the rewards per token that go into them.

Columns are flat, documents one after another. ``values[t]`` is the value of the state before token ``t``, so the value
of the state after a response token is the value before the next one. Only response tokens act and earn: the recursion
runs over the response tokens of a document in order and skips what lies between them (the output of a tool), as verl
does, so ``gamma`` discounts per response token. Sums are taken on the host in fp64 and rounded once at the end.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from lightning_rl_engines.algorithms.kl import KLEstimator, kl_estimate


def gae(
    rewards: Tensor,
    values: Tensor,
    lengths: Sequence[int],
    response_mask: Tensor,
    *,
    gamma: float = 1.0,
    lam: float = 1.0,
    bootstrap_values: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Estimate advantages by GAE (Schulman et al. 2016, "High-dimensional continuous control", equation 16).

    With the response tokens of a document numbered ``1..n``: ``delta_i = r_i + gamma * V_{i+1} - V_i``,
    ``A_i = delta_i + gamma * lam * A_{i+1}``, ``V_{n+1}`` being 0 or the document's bootstrap value, ``A_{n+1} = 0``;
    the return is ``A_i + V_i``. No communication; a result depends on its own document alone, to the last bit.

    Args:
        rewards: ``[T]`` finite floats, zero outside the response.
        values: ``[T]`` floats; what they are outside the response does not matter.
        lengths: Tokens per document, ``T`` in all.
        response_mask: ``[T]`` bool.
        gamma: Discount per response token, between 0 and 1.
        lam: Weight of longer estimates, between 0 (one step) and 1 (all rewards to come).
        bootstrap_values: ``[N]`` value of the state after the last response token, for documents that were cut off;
            0 for those that ended. ``None``: all ended.

    Returns:
        Advantages and returns, ``[T]`` each, zero outside the response, on the device of ``rewards``; fp64 where
        ``values`` is fp64, else fp32.

    Raises:
        ValueError: Shapes do not match, a number is out of range, or a token outside the response has a reward.
    """
    for name, number in (("gamma", gamma), ("lam", lam)):
        if not 0 <= number <= 1:
            raise ValueError(f"{name}={number} must lie between 0 and 1, for instance 1.0")
    places, documents, following = _response_tokens(lengths, response_mask)
    for name, column in (("rewards", rewards), ("values", values)):
        _check_shape(name, column, response_mask)
    reward = _host(rewards)
    outside = torch.nonzero((reward != 0) & ~response_mask.cpu()).flatten()
    if len(outside):
        index = int(outside[0])
        raise ValueError(
            f"rewards[{index}]={float(reward[index])} belongs to a token outside the response, which cannot earn; put "
            "it on a response token, as outcome_rewards does"
        )
    value = _host(values)[places]
    after = torch.zeros(len(lengths), dtype=torch.float64)
    if bootstrap_values is not None:
        if bootstrap_values.shape != after.shape:
            raise ValueError(
                f"bootstrap_values of shape {tuple(bootstrap_values.shape)} must have one number per document, "
                f"shape ({len(lengths)},)"
            )
        after = _host(bootstrap_values)
    # The next slot holds the next response token of the same document, unless this is its last.
    next_value = torch.where(following > 0, value.roll(-1), after[documents])
    advantage = _discounted_sum(reward[places] + gamma * next_value - value, following, gamma * lam)
    dtype = torch.float64 if values.dtype == torch.float64 else torch.float32
    results = []
    for found in (advantage, advantage + value):
        column = torch.zeros(len(reward), dtype=torch.float64).index_copy_(0, places, found)
        results.append(column.to(rewards.device, dtype))
    return results[0], results[1]


def _discounted_sum(terms: Tensor, following: Tensor, factor: float) -> Tensor:
    """``S_i = terms_i + factor * S_{i+1}`` within each document, in a logarithmic number of passes.

    A pass with distance d adds the discounted sum of the token d ahead, so that each sum reaches 2 * d tokens ahead.
    """
    sums, distance = terms, 1
    longest = int(following.max()) if len(following) else 0
    while distance <= longest:
        reached = torch.where(following >= distance, sums.roll(-distance), torch.zeros_like(sums))
        sums = sums + factor**distance * reached
        distance *= 2
    return sums


def outcome_rewards(rewards: Tensor, lengths: Sequence[int], response_mask: Tensor) -> Tensor:
    """Put the reward of each document on its last response token.

    Add :func:`kl_penalty_rewards` for the reward of InstructGPT. The reward of a document without any response token
    has no place and is left out; no loss sees such a document either.

    Args:
        rewards: ``[N]`` floats.
        lengths: Tokens per document.
        response_mask: ``[T]`` bool.

    Returns:
        ``[T]`` on the device of ``rewards``; fp64 for fp64 rewards, else fp32.

    Raises:
        ValueError: Shapes do not match.
    """
    places, documents, following = _response_tokens(lengths, response_mask)
    if rewards.shape != (len(lengths),):
        raise ValueError(
            f"rewards of shape {tuple(rewards.shape)} must have one number per document, shape ({len(lengths)},)"
        )
    last = following == 0
    column = torch.zeros(len(response_mask), dtype=torch.float64)
    column.index_copy_(0, places[last], _host(rewards)[documents[last]])
    return column.to(rewards.device, torch.float64 if rewards.dtype == torch.float64 else torch.float32)


def kl_penalty_rewards(
    log_probs: Tensor,
    ref_log_probs: Tensor,
    response_mask: Tensor,
    *,
    coef: float,
    estimator: KLEstimator = "k1",
) -> Tensor:
    """Charge each response token for its distance from the reference: ``-coef * KL`` (Ouyang et al. 2022, equation 2).

    Args:
        log_probs: ``[T]`` log-probabilities of the policy that sampled the tokens.
        ref_log_probs: ``[T]`` those of the reference.
        response_mask: ``[T]`` bool.
        coef: Weight of the penalty, not negative.
        estimator: ``"k1"``, ``"k2"``, ``"k3"`` or ``"abs"``; see ``algorithms.kl``.

    Returns:
        ``[T]`` zero outside the response, without gradient; fp64 for fp64 log-probabilities, else fp32.

    Raises:
        ValueError: Shapes do not match, ``coef`` is out of range, or the estimator differs from another one only in a
            gradient, which rewards do not have.
    """
    if not 0 <= coef < float("inf"):
        raise ValueError(f"coef={coef} must be finite and not negative, for instance 0.001")
    if estimator.endswith("+"):
        raise ValueError(f"estimator={estimator!r} names a gradient, and rewards have none; use {estimator[:-1]!r}")
    for name, column in (("log_probs", log_probs), ("ref_log_probs", ref_log_probs)):
        _check_shape(name, column, response_mask)
    wide = torch.float64 if log_probs.dtype == torch.float64 else torch.float32
    kl = kl_estimate(log_probs.detach().to(wide), ref_log_probs.detach().to(wide), estimator)
    return torch.where(response_mask.to(kl.device, torch.bool), -coef * kl, torch.zeros_like(kl))


def _host(column: Tensor) -> Tensor:
    # The host, because some devices have no fp64, and advantages are computed once per update.
    return column.detach().to("cpu", torch.float64)


def _check_shape(name: str, column: Tensor, response_mask: Tensor) -> None:
    if column.shape != response_mask.shape:
        raise ValueError(
            f"{name} of shape {tuple(column.shape)} does not match response_mask of shape "
            f"{tuple(response_mask.shape)}; pass one number per token in both, shape [T]"
        )


def _response_tokens(lengths: Sequence[int], response_mask: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Flat index and document of each response token, and how many response tokens follow in its document."""
    if response_mask.shape != (sum(lengths),):
        raise ValueError(
            f"response_mask of shape {tuple(response_mask.shape)} does not match lengths, which sum to "
            f"{sum(lengths)}; pass the tokens of all documents one after another"
        )
    places = response_mask.cpu().nonzero().flatten()
    owners = torch.repeat_interleave(torch.arange(len(lengths)), torch.tensor(lengths, dtype=torch.int64))
    documents = owners[places]
    ends = torch.bincount(documents, minlength=len(lengths)).cumsum(0)
    return places, documents, ends[documents] - 1 - torch.arange(len(places))
