"""The tokenizer that belongs to a model configuration."""

from pathlib import Path
from typing import TYPE_CHECKING

from lightning_rl_engines.models.config import ModelConfig

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

_FILES = ("tokenizer_config.json", "tokenizer.json")


def load_tokenizer(config: ModelConfig) -> "PreTrainedTokenizerBase | None":
    """Load the tokenizer of a model.

    Args:
        config: Names the tokenizer, or the model whose own it is.

    Returns:
        The tokenizer; ``None`` when the model has none: it comes from a dictionary, or from a folder without tokenizer
        files. A ``tokenizer`` that is named has to exist.
    """
    if config.tokenizer is not None:
        return _load(config.tokenizer, config.trust_remote_code, None)
    source = config.path or config.from_config
    if not isinstance(source, str):
        return None
    folder = Path(source).parent if Path(source).is_file() else Path(source)
    if folder.is_dir() and not any((folder / name).exists() for name in _FILES):
        return None
    return _load(str(folder), config.trust_remote_code, config.revision)


def _load(source: str, trust_remote_code: bool, revision: str | None) -> "PreTrainedTokenizerBase":
    from transformers import AutoTokenizer

    tokenizer: PreTrainedTokenizerBase = AutoTokenizer.from_pretrained(
        source, trust_remote_code=trust_remote_code, revision=revision
    )
    return tokenizer


def require_tokenizer(config: ModelConfig) -> "PreTrainedTokenizerBase":
    """Load the tokenizer of a model.

    Raises:
        ValueError: The model has none.
    """
    tokenizer = load_tokenizer(config)
    if tokenizer is None:
        raise ValueError(
            f"{config.source} has no tokenizer; name its folder, as in "
            "ModelConfig(..., tokenizer='examples/tokenizer')."
        )
    return tokenizer
