"""Prompts from files: text, chat messages or token ids."""

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, Literal, cast

from lightning.pytorch.utilities import rank_zero_warn
from typing_extensions import override

from lightning_rl_engines.data.base import ShardedDataModule, Split
from lightning_rl_engines.data.records import Record, read_records
from lightning_rl_engines.rollout.base import Prompt

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


class PromptEncoder:
    """Turns a value of the prompt column into what the model reads.

    Args:
        tokenizer: Called when a tokenizer is needed; prompts that are token ids need none.
        apply_chat_template: Wrap text into a user message.
        system_prompt: Put a system message in front, unless the messages have one.
        chat_template_kwargs: Further arguments of the template, such as ``enable_thinking``.
    """

    def __init__(
        self,
        *,
        tokenizer: "Callable[[], PreTrainedTokenizerBase]",
        apply_chat_template: bool,
        system_prompt: str | None,
        chat_template_kwargs: dict[str, Any] | None,
    ) -> None:
        self._tokenizer = tokenizer
        self._apply_chat_template = apply_chat_template
        self._system_prompt = system_prompt
        self._chat_template_kwargs = dict(chat_template_kwargs or {})

    def __call__(self, value: Any, where: str) -> tuple[list[int], str]:
        """Return token ids and text; the text is empty for token ids.

        Args:
            value: Text, a list of messages, or a list of token ids.
            where: Names the row in errors.

        Raises:
            ValueError: The value is none of these, or gives no tokens.
        """
        if isinstance(value, list) and value and all(type(token) is int for token in value):
            if min(value) < 0:
                raise ValueError(f"{where}: the prompt holds the negative token id {min(value)}.")
            return value, ""
        if isinstance(value, str) and not self._apply_chat_template:
            if self._system_prompt is not None:
                raise ValueError(
                    f"system_prompt={self._system_prompt!r} needs a chat template, and {where} holds plain text; set "
                    "apply_chat_template=True."
                )
            text, special = value, True
        else:
            text, special = self._render(value, where), False
        ids = cast("list[int]", self._tokenizer()(text, add_special_tokens=special)["input_ids"])
        if not ids:
            raise ValueError(f"{where}: the prompt {text!r} gives no tokens; a response needs at least one before it.")
        return list(ids), text

    def _render(self, value: Any, where: str) -> str:
        messages = [{"role": "user", "content": value}] if isinstance(value, str) else value
        valid = isinstance(messages, list) and messages and all(isinstance(message, dict) for message in messages)
        if not valid or not all({"role", "content"} <= message.keys() for message in messages):
            raise ValueError(
                f"{where}: the prompt must be text, token ids or a list of messages such as "
                f"[{{'role': 'user', 'content': '2+2='}}], not {value!r}."
            )
        if messages[-1]["role"] == "assistant":
            raise ValueError(f"{where}: the last message is the assistant's; the model has nothing to answer.")
        if self._system_prompt is not None and messages[0]["role"] != "system":
            messages = [{"role": "system", "content": self._system_prompt}, *messages]
        tokenizer = self._tokenizer()
        if tokenizer.chat_template is None:
            raise ValueError(
                f"{where} needs a chat template, and the tokenizer {tokenizer.name_or_path!r} has none; use an "
                "instruction-tuned model's tokenizer, or plain text with apply_chat_template=False."
            )
        # The template writes special tokens itself, so the text is tokenized without adding any.
        text = tokenizer.apply_chat_template(
            messages, tokenize=False, add_generation_prompt=True, **self._chat_template_kwargs
        )
        return cast("str", text)


class PromptDataModule(ShardedDataModule[Record, Prompt, list[Prompt]]):
    """Prompts from JSON-lines or parquet files; a batch is this data rank's ``list[Prompt]``.

    Ranks that work on the same rows (sequence or tensor parallel peers) get the same prompts. Training drops the last
    incomplete global batch; elsewhere every prompt comes exactly once, so a batch may be empty on some ranks. The
    position is part of checkpoints, so a run that is resumed, on any number of ranks, goes on with the next prompt.

    Args:
        train: File, or files that are read one after another.
        val: File, or one file per validation data loader.
        test: As ``val``.
        predict: As ``val``.
        batch_size: Prompts per data rank and update.
        eval_batch_size: Prompts per data rank and batch elsewhere; ``None`` means ``batch_size``.
        prompt_column: Column that holds text, a list of chat messages (``role``, ``content``) or token ids. The other
            columns reach the rewards by name.
        apply_chat_template: Wrap text into a user message; messages are always rendered.
        system_prompt: System message for prompts that have none.
        chat_template_kwargs: Further arguments of the chat template.
        max_prompt_length: The most tokens of a prompt; ``None`` means no limit.
        long_prompts: ``"drop"`` leaves longer prompts out and says how many, ``"error"`` refuses them.
        shuffle: Train in another order in each epoch.
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
        batch_size: int = 8,
        eval_batch_size: int | None = None,
        prompt_column: str = "prompt",
        apply_chat_template: bool = False,
        system_prompt: str | None = None,
        chat_template_kwargs: dict[str, Any] | None = None,
        max_prompt_length: int | None = None,
        long_prompts: Literal["drop", "error"] = "drop",
        shuffle: bool = True,
        seed: int = 0,
        tokenizer: str | None = None,
    ) -> None:
        super().__init__(
            batch_size=batch_size, eval_batch_size=eval_batch_size, shuffle=shuffle, seed=seed, tokenizer=tokenizer
        )
        if max_prompt_length is not None and max_prompt_length < 1:
            raise ValueError(f"PromptDataModule(max_prompt_length={max_prompt_length}) is out of range; use 1 or more.")
        if long_prompts not in ("drop", "error"):
            raise ValueError(f"PromptDataModule(long_prompts={long_prompts!r}) is unknown; use 'drop' or 'error'.")
        self.files: dict[Split, str | list[str] | None] = {
            "train": train,
            "val": val,
            "test": test,
            "predict": predict,
        }
        self.prompt_column = prompt_column
        self.max_prompt_length = max_prompt_length
        self.long_prompts = long_prompts
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
    def encode(self, raw: Sequence[Record], split: Split) -> list[Prompt]:
        prompts = []
        for index, record in enumerate(raw):
            ids, text = self._encoder(record.get(self.prompt_column, "prompt_column"), record.where)
            if self.max_prompt_length is None or len(ids) <= self.max_prompt_length:
                columns = {name: value for name, value in record.row.items() if name != self.prompt_column}
                prompts.append(Prompt(token_ids=ids, columns=columns, index=index, text=text))
            elif self.long_prompts == "error":
                raise ValueError(
                    f"{record.where}: the prompt has {len(ids)} tokens, more than max_prompt_length="
                    f"{self.max_prompt_length}; shorten it, or use long_prompts='drop'."
                )
        dropped = len(raw) - len(prompts)
        if not prompts:
            raise ValueError(
                f"All {dropped} prompts for {split} are longer than max_prompt_length={self.max_prompt_length} tokens; "
                "use a larger one."
            )
        if dropped:
            rank_zero_warn(
                f"{dropped} of {len(raw)} prompts for {split} are longer than max_prompt_length="
                f"{self.max_prompt_length} tokens and are left out."
            )
        return prompts

    @override
    def collate(self, items: list[Prompt]) -> list[Prompt]:
        return items


def read_files(files: str | list[str] | None, split: Split) -> list[list[Record]]:
    """Read the files of a split: one data set per file, for training one of all files."""
    if files is None:
        return []
    data_sets = [read_records(path) for path in ([files] if isinstance(files, str) else files)]
    if split == "train":
        return [[record for data_set in data_sets for record in data_set]] if data_sets else []
    return data_sets
