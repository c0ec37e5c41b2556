"""The embedding of Hugging Face models: the padding token's row gets no gradient from its use as an input."""

from dataclasses import dataclass

import torch
from torch import Tensor
from torchtitan.models.common.embedding import Embedding
from typing_extensions import override


class HFEmbedding(Embedding):
    """torchtitan's embedding with ``nn.Embedding``'s ``padding_idx``, which works on a shard of the vocabulary too."""

    @dataclass(kw_only=True, slots=True)
    class Config(Embedding.Config):
        """Args: padding_token: The token without a gradient; ``None`` for none, negative counts from the end."""

        padding_token: int | None = None

    def __init__(self, config: Config) -> None:
        super().__init__(config)
        token = config.padding_token
        self.padding_token = token if token is None or token >= 0 else config.num_embeddings + token

    @override
    def forward(self, input: Tensor) -> Tensor:
        """Embed token ids ``[batch, length]``; under tensor parallelism this rank's summand."""
        embedded = super().forward(input)
        if self.padding_token is None:
            return embedded
        return torch.where((input == self.padding_token).unsqueeze(-1), embedded.detach(), embedded)
