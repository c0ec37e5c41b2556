"""Rotary embeddings with the frequencies of transformers, in the order of dimensions that its weights have."""

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor
from torchtitan.models.common.rope import CosSinRoPE
from typing_extensions import override

if TYPE_CHECKING:
    from transformers import PretrainedConfig

SUPPORTED_ROPE_TYPES = ("default", "linear", "llama3", "yarn", "proportional")
"""Types whose frequencies do not depend on the lengths of documents."""


class HFRotary(CosSinRoPE):
    """Rotates halves, so that query and key weights of a Hugging Face save need no permutation.

    Cosines and sines are those that transformers computes: frequencies and the scaling of both come from it, and
    products are taken in fp32.
    """

    @dataclass(kw_only=True, slots=True)
    class Config(CosSinRoPE.Config):
        """Args: frequencies: Inverse frequencies, ``dim / 2`` fp32 values. attention_scaling: Factor of cos and sin."""

        frequencies: tuple[float, ...]
        attention_scaling: float = 1.0

    config: Config

    @override
    def _precompute_cache(self) -> Tensor:
        frequencies = torch.tensor(self.config.frequencies, dtype=torch.float32)
        positions = torch.arange(self.config.max_seq_len, dtype=torch.float32, device=frequencies.device)
        angles = positions[:, None] * frequencies
        angles = torch.cat([angles, angles], dim=-1)
        return torch.cat([angles.cos(), angles.sin()], dim=-1) * self.config.attention_scaling


def rotary_config(hf_config: "PretrainedConfig", *, head_dim: int, max_seq_len: int) -> HFRotary.Config:
    """Read the rotary embedding of a Hugging Face configuration.

    Args:
        hf_config: The configuration; its ``rope_parameters`` are one dictionary for all layers.
        head_dim: Number of rotated dimensions of a head.
        max_seq_len: Length of the longest document.

    Raises:
        ValueError: The type of scaling is unknown or depends on the longest document, or only a part of a head is
            rotated.
    """
    frequencies, scaling = rope_frequencies(hf_config, head_dim=head_dim)
    return HFRotary.Config(
        dim=head_dim,
        max_seq_len=max_seq_len,
        theta=float(hf_config.rope_parameters["rope_theta"]),
        frequencies=tuple(frequencies.tolist()),
        attention_scaling=scaling,
    )


def rope_frequencies(hf_config: "PretrainedConfig", *, head_dim: int) -> tuple[Tensor, float]:
    """Return the inverse frequencies (fp32, ``[head_dim / 2]``) and the factor of cosines and sines.

    Raises:
        ValueError: As in :func:`rotary_config`.
    """
    from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

    parameters = hf_config.rope_parameters
    kind = _check_rope(hf_config)
    with torch.device("cpu"):
        if kind == "default":
            exponents = torch.arange(0, head_dim, 2, dtype=torch.float32) / head_dim
            frequencies, scaling = 1.0 / (parameters["rope_theta"] ** exponents), 1.0
        else:
            frequencies, scaling = ROPE_INIT_FUNCTIONS[kind](hf_config)
    if frequencies.shape != (head_dim // 2,):
        raise ValueError(
            f"rope_parameters={parameters!r} give {len(frequencies)} frequencies for heads of {head_dim} dimensions; "
            f"{head_dim // 2} work, with partial_rotary_factor=1.0."
        )
    return frequencies, float(scaling)


def _check_rope(hf_config: "PretrainedConfig") -> str:
    parameters = hf_config.rope_parameters
    if any(isinstance(item, dict) for item in parameters.values()):
        raise ValueError(
            f"rope_parameters={parameters!r} differ between kinds of layers, which is not supported by torchtitan "
            "models; one dictionary for all layers works."
        )
    kind = str(parameters.get("rope_type", "default"))
    if kind not in SUPPORTED_ROPE_TYPES:
        depends = "chooses frequencies by the longest document of a row" if kind in ("dynamic", "longrope") else ""
        raise ValueError(
            f"rope_parameters have rope_type={kind!r}, which {depends or 'is unknown here'}; torchtitan models "
            f"support {', '.join(map(repr, SUPPORTED_ROPE_TYPES))}."
        )
    factor = parameters.get("partial_rotary_factor")
    if kind != "proportional" and factor not in (None, 1.0):
        raise ValueError(
            f"rope_parameters have partial_rotary_factor={factor!r}, which is not supported by torchtitan models; "
            "partial_rotary_factor=1.0 works."
        )
    return kind
