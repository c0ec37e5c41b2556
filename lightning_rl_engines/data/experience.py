"""Recorded experience from files: prompts with responses that some policy gave."""

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, cast

from lightning.pytorch.utilities import rank_zero_warn
from typing_extensions import override

from lightning_rl_engines.data.base import ShardedDataModule, Split
from lightning_rl_engines.data.loader import ShardedLoader
from lightning_rl_engines.data.prompts import PromptEncoder, read_files
from lightning_rl_engines.data.records import Record
from lightning_rl_engines.sequence.experience import Experience

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

_DEFAULT_COLUMNS = {
    "prompt": "prompt",
    "response": "response",
    "rollout_log_probs": "log_probs",
    "rewards": "reward",
    "group_ids": "group_id",
}
_REQUIRED = ("prompt", "response")
_FIXED = ("input_ids", "response_mask")


@dataclass(frozen=True)
class RecordedDocument:
    """A prompt and its response as token ids, and its columns: a number, or one number per token of the document.

    ``where`` names its row in errors.
    """

    token_ids: list[int]
    response_length: int
    columns: dict[str, Any]
    where: str = "a document"


class ExperienceDataModule(ShardedDataModule[Record, RecordedDocument, Experience]):
    """Recorded experience from JSON-lines or parquet files; a batch is this data rank's :class:`Experience`.

    Each row is one document. Its prompt and response are token ids or text (a prompt may be chat messages). A column
    that holds a list has one number per response token and becomes a per-token column, 0 on the prompt; a column that
    holds a number becomes a per-document column. ``group_ids`` may be text.

    Args:
        train: File, or files that are read one after another.
        val: File, or one file per validation data loader.
        test: As ``val``.
        predict: As ``val``.
        documents_per_batch: Documents per data rank and batch. With groups, make the global batch a multiple of the
            group size: advantages are computed within a batch.
        columns: Column of the file for each column of the experience. ``prompt``, ``response``,
            ``rollout_log_probs`` (``log_probs``), ``rewards`` (``reward``) and ``group_ids`` (``group_id``) have the
            names in brackets, or their own, as defaults, the last three only where the file has them; further ones,
            such as ``{"advantages": "adv"}``, must be named here.
        apply_chat_template: Wrap a prompt that is text into a user message.
        system_prompt: System message for prompts that have none.
        chat_template_kwargs: Further arguments of the chat template.
        append_eos: End responses that are text with the tokenizer's end token.
        shuffle: Train in another order in each epoch; refused with groups, which it would tear apart.
        seed: Seed of the order.
        tokenizer: Folder or hub name; ``None`` means the tokenizer of the module that is trained.

    Raises:
        ValueError: An argument is out of its range; in ``setup`` and the loaders, when a row cannot be used, with
            its file and line.
    """

    def __init__(
        self,
        *,
        train: str | list[str] | None = None,
        val: str | list[str] | None = None,
        test: str | list[str] | None = None,
        predict: str | list[str] | None = None,
        documents_per_batch: int = 8,
        columns: dict[str, str] | None = None,
        apply_chat_template: bool = False,
        system_prompt: str | None = None,
        chat_template_kwargs: dict[str, Any] | None = None,
        append_eos: bool = True,
        shuffle: bool = False,
        seed: int = 0,
        tokenizer: str | None = None,
    ) -> None:
        if documents_per_batch < 1:
            raise ValueError(f"ExperienceDataModule(documents_per_batch={documents_per_batch}): use 1 or more.")
        super().__init__(
            batch_size=documents_per_batch, eval_batch_size=None, shuffle=shuffle, seed=seed, tokenizer=tokenizer
        )
        if clash := sorted(set(_FIXED) & set(columns or {})):
            raise ValueError(f"ExperienceDataModule(columns=...) names {clash}, which follow from prompt and response.")
        self.documents_per_batch = documents_per_batch
        self.columns = dict(columns or {})
        self.append_eos = append_eos
        self._template: RecordedDocument | None = None
        self.files: dict[Split, str | list[str] | None] = {
            "train": train,
            "val": val,
            "test": test,
            "predict": predict,
        }
        self._encoder = PromptEncoder(
            tokenizer=self.resolve_tokenizer,
            apply_chat_template=apply_chat_template,
            system_prompt=system_prompt,
            chat_template_kwargs=chat_template_kwargs,
        )

    @override
    def read(self, split: Split) -> list[list[Record]]:
        return read_files(self.files[split], split)

    @override
    def encode(self, raw: Sequence[Record], split: Split) -> list[RecordedDocument]:
        names = self._columns_of(raw)
        groups: dict[Any, int] = {}
        kinds: dict[str, bool] = {}
        documents = []
        for record in raw:
            prompt, _ = self._encoder(record[names["prompt"]], record.where)
            response = response_ids(
                record[names["response"]],
                record.where,
                tokenizer=self.resolve_tokenizer,
                append_eos=self.append_eos,
            )
            columns: dict[str, Any] = {}
            for name, column in names.items():
                if name in _REQUIRED:
                    continue
                value, where = record[column], f"{record.where}: column {column!r}"
                if name != "group_ids":
                    columns[name] = aligned(value, len(prompt), len(response), where)
                elif isinstance(value, int | str):
                    columns[name] = groups.setdefault(value, len(groups))
                else:
                    raise ValueError(f"{where} must be a whole number or text, not {value!r}.")
                if kinds.setdefault(name, isinstance(value, list)) != isinstance(value, list):
                    raise ValueError(
                        f"{record.where}: column {column!r} is a list in some rows and a number in others."
                    )
            documents.append(RecordedDocument([*prompt, *response], len(response), columns, record.where))
        self._template = documents[0]
        if groups and split == "train" and self.shuffle:
            raise ValueError(
                "ExperienceDataModule(shuffle=True) would tear groups apart, and the data has group ids; shuffle whole "
                "groups in the file, and use shuffle=False."
            )
        return documents

    @override
    def documents(self, split: Split) -> Iterator[tuple[RecordedDocument, ...]]:
        return ((document,) for documents in self._encoded(split) for document in documents)

    @override
    def collate(self, items: list[RecordedDocument]) -> Experience:
        if not items:
            # The same columns and types as those of ranks that have documents.
            assert self._template is not None
            return self.collate([self._template]).select([])
        return join_documents(items)

    @override
    def train_dataloader(self) -> ShardedLoader[Experience]:
        loader = super().train_dataloader()
        (documents,) = self._encoded("train")
        size = self.documents_per_batch * self._ranks()["num_replicas"]
        last: dict[int, int] = {}
        for index, document in enumerate(documents):
            group = document.columns.get("group_ids")
            if group is not None and last.setdefault(group, index // size) != index // size:
                rank_zero_warn(
                    f"The global batch of {size} documents cuts a group of the training data in two, and advantages "
                    "are computed within a batch; use documents_per_batch such that the global batch is a multiple of "
                    "the group size, and keep the rows of a group together."
                )
                break
        return loader

    def _columns_of(self, raw: Sequence[Record]) -> dict[str, str]:
        """Return the file's column for each of ours: all that were named, and the defaults that the file has."""
        defaults = {
            name: column
            for name, column in _DEFAULT_COLUMNS.items()
            if name in _REQUIRED or any(record.row.get(column) is not None for record in raw)
        }
        return {**defaults, **self.columns}


def join_documents(documents: Sequence[RecordedDocument]) -> Experience:
    """Build the experience of at least one document; all have the same columns."""
    columns = {name: [item.columns[name] for item in documents] for name in documents[0].columns}
    masks = [
        [False] * (len(item.token_ids) - item.response_length) + [True] * item.response_length for item in documents
    ]
    return Experience.from_documents(input_ids=[item.token_ids for item in documents], response_mask=masks, **columns)


def response_ids(
    value: Any, where: str, *, tokenizer: "Callable[[], PreTrainedTokenizerBase]", append_eos: bool
) -> list[int]:
    """Turn a response into token ids.

    Args:
        value: Text, or token ids, which are taken as they are.
        where: Names the row in errors.
        tokenizer: Called for text.
        append_eos: End text with the tokenizer's end token.

    Raises:
        ValueError: The value is neither, gives no tokens, or there is no end token.
    """
    if isinstance(value, str):
        loaded = tokenizer()
        ids = list(cast("list[int]", loaded(value, add_special_tokens=False)["input_ids"]))
        if append_eos:
            if loaded.eos_token_id is None:
                raise ValueError("append_eos=True, and the tokenizer has no end token; use append_eos=False.")
            ids.append(cast(int, loaded.eos_token_id))
    elif isinstance(value, list) and all(type(token) is int and token >= 0 for token in value):
        ids = value
    else:
        raise ValueError(f"{where}: the response must be text or a list of token ids, not {value!r}.")
    if not ids:
        raise ValueError(f"{where}: the response is empty; leave the row out.")
    return ids


def aligned(value: Any, prompt_length: int, response_length: int, where: str) -> float | list[float]:
    """Put values of response tokens behind zeros for the prompt; a number stays one.

    Args:
        value: A number, or a list with one per response token.
        prompt_length: Tokens of the prompt.
        response_length: Tokens of the response.
        where: Names row and column in errors.

    Raises:
        ValueError: The value is neither, or not finite.
    """
    if not isinstance(value, list):
        if not isinstance(value, int | float):
            raise ValueError(f"{where} must be a number, or a list with one per response token, not {value!r}.")
        if not math.isfinite(value):
            raise ValueError(f"{where} is {value}; leave the row out.")
        # Always float: a batch whose rewards all happen to be whole must not have another type than the next.
        return float(value)
    if len(value) != response_length:
        raise ValueError(f"{where} has {len(value)} values for a response of {response_length} tokens.")
    if not all(isinstance(number, int | float) for number in value):
        raise ValueError(f"{where} holds something that is no number.")
    if not all(math.isfinite(number) for number in value):
        raise ValueError(f"{where} holds a number that is not finite; leave the row out.")
    return [0.0] * prompt_length + [float(number) for number in value]
