"""Output heads: fused log-probability and entropy, the same over a split vocabulary, and values."""

from lightning_rl_engines.heads.linear_logprob import linear_log_prob
from lightning_rl_engines.heads.value import ValueHead
from lightning_rl_engines.heads.vocab_parallel import vocab_parallel_linear_log_prob

__all__ = ["ValueHead", "linear_log_prob", "vocab_parallel_linear_log_prob"]
