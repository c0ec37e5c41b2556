"""Looking at all training data before the first step, so that a run does not end in its midst."""

from collections.abc import Iterable, Sequence

from lightning_rl_engines.models.token_model import TokenModel

Unit = tuple[str, Sequence[Sequence[int]]]
"""Where documents that share a row are from, and their token ids."""


def check_documents(units: Iterable[Unit], model: TokenModel, capacity: int | None) -> None:
    """Refuse documents that no pass of the model takes.

    Args:
        units: All that will come, the same on every rank.
        model: The model that reads them.
        capacity: The most tokens of a row; ``None`` for no limit.

    Raises:
        ValueError: A document has a token id beyond the vocabulary, or more tokens than the model has positions for, or
            a unit does not fit into a row; the message says where it is from.
    """
    vocabulary = model.config.get_text_config().vocab_size
    for where, documents in units:
        if (largest := max((max(ids, default=0) for ids in documents), default=0)) >= vocabulary:
            raise ValueError(
                f"{where}: token id {largest}, but the vocabulary ends at {vocabulary - 1}; encode it with the model's "
                "own tokenizer."
            )
        longest = max(map(len, documents), default=0)
        if model.longest_document is not None and longest > model.longest_document:
            raise ValueError(
                f"{where}: {longest} tokens, and the model has max_position_embeddings={model.longest_document}; "
                "shorten it, or leave the row out."
            )
        if capacity is not None and (total := sum(map(len, documents))) > capacity:
            raise ValueError(
                f"{where}: {total} tokens in a row, more than the {capacity} that max_tokens_per_micro_batch allows; "
                f"raise it to at least {total}, or leave the row out."
            )
