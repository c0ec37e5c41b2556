"""What a plain model says of two short documents: an architecture may do what packed rows and fused heads do not."""

from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from lightning_rl_engines.models.config import ModelConfig

if TYPE_CHECKING:
    from transformers import PreTrainedModel

COVERED = frozenset({"llama", "mistral", "qwen2", "qwen3", "qwen3_moe"})
"""Model types of transformers whose gradients the test suite compares in every layout; their code is not remote."""

_LENGTHS = (37, 27)
"""Two documents of a row, so that it shows whether one sees the other, and where the second begins."""


def is_checked(config: ModelConfig, model_type: str) -> bool:
    """Whether a model is compared with its plain self when it is built."""
    if config.check_forward is not None:
        return config.check_forward
    return config.trust_remote_code or model_type not in COVERED


def probe_documents(vocab_size: int) -> list[Tensor]:
    """Return token ids of the documents, int64, spread over the vocabulary."""
    numbers = torch.arange(1, sum(_LENGTHS) + 1, dtype=torch.int64)
    return list((numbers * 7919 % vocab_size).split(_LENGTHS))


@torch.no_grad()
def plain_outputs(hf: "PreTrainedModel") -> list[Tensor]:
    """Log-probabilities of the documents' tokens, or values, one document at a time through the model's own code.

    Args:
        hf: The model as transformers built it, on its device, in evaluation mode.

    Returns:
        One fp32 tensor for each document: a number for each token but the first.
    """
    outputs = []
    for ids in probe_documents(hf.config.get_text_config().vocab_size):
        ids = ids.to(hf.device)
        model: Any = hf
        scores = model(input_ids=ids[None], use_cache=False).logits[0, :-1].float()
        if scores.shape[-1] > 1:
            scores = scores.log_softmax(dim=-1).gather(-1, ids[1:, None])
        outputs.append(scores[:, 0].cpu())
    return outputs


def difference(found: Tensor, expected: Tensor, compute_dtype: torch.dtype) -> tuple[float, float]:
    """Return how far results are from the expected ones, and how far rounding may take them.

    The largest difference in fp32; in half precision, where single tokens may be far off, the mean one.

    Args:
        found: Any shape, fp32.
        expected: The same shape, fp32.
        compute_dtype: Type of weights and activations.
    """
    gaps = (found - expected).abs()
    if compute_dtype != torch.float32:
        # A fresh critic's values lie close together: a fixed limit would see nothing.
        return float(gaps.mean()), 0.2 * min(1.0, float(expected.std()))
    return float(gaps.max()), 1e-3 if torch.get_float32_matmul_precision() == "highest" else 0.1
