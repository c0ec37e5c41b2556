"""Fingerprints of models, which tell whether an adapter belongs to a base; alike in all engines and layouts."""

import hashlib
import math
from collections.abc import Iterable

import torch
from torch import Tensor

_SAMPLES = 64


def sampled(shape: tuple[int, ...]) -> range:
    """Return the flat indices, evenly spaced, of a tensor's elements that the fingerprint reads."""
    size = math.prod(shape)
    return range(0, size, max(1, size // _SAMPLES))


def sample_bits(values: Tensor) -> Tensor:
    """Return int16 bits of sampled elements as bf16: a base may be stored in another type and is still the same."""
    return values.detach().to(torch.bfloat16).view(torch.int16)


def fingerprint(tensors: Iterable[tuple[str, tuple[int, ...], Tensor]]) -> str:
    """Hash names, shapes and samples of the tensors of a Hugging Face save.

    Args:
        tensors: In the order of the export plan: name, shape, and the bits of :func:`sampled` elements.
    """
    digest = hashlib.sha256()
    for name, shape, bits in tensors:
        digest.update(f"{name}{shape}".encode())
        digest.update(bits.cpu().contiguous().numpy().tobytes())
    return digest.hexdigest()
