"""Looking at all training data before the first step, so that a run does not end in its midst."""

from collections.abc import Iterable, Sequence

from lightning_rl_engines.models.token_model import TokenModel

Document = tuple[str, Sequence[int]]
"""Where a document is from, and its token ids."""


def check_documents(documents: Iterable[Document], model: TokenModel, budget: int | None) -> None:
    """Refuse documents that no pass of the model takes.

    Args:
        documents: All that will come, the same on every rank.
        model: The model that reads them.
        budget: ``max_tokens_per_micro_batch``.

    Raises:
        ValueError: A document has a token id beyond the vocabulary, more tokens than the budget, or more than the
            model has positions for; the message says where it is from.
    """
    vocabulary = model.config.get_text_config().vocab_size
    for where, ids in documents:
        if (largest := max(ids, default=0)) >= vocabulary:
            raise ValueError(
                f"{where}: token id {largest}, but the vocabulary ends at {vocabulary - 1}; encode it with the model's "
                "own tokenizer."
            )
        if budget is not None and len(ids) > budget:
            raise ValueError(
                f"{where}: {len(ids)} tokens, more than max_tokens_per_micro_batch={budget} allows in a row; raise it "
                f"to at least {len(ids)}, or leave the row out."
            )
        if model.longest_document is not None and len(ids) > model.longest_document:
            raise ValueError(
                f"{where}: {len(ids)} tokens, and the model has max_position_embeddings={model.longest_document}; "
                "shorten it, or leave the row out."
            )
