"""Prompts and verifiers of reasoning-gym's procedural tasks; needs ``pip install reasoning-gym``."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

from typing_extensions import override

from lightning_rl_engines.data.base import ShardedDataModule, Split
from lightning_rl_engines.data.prompts import PromptEncoder
from lightning_rl_engines.data.reward_functions import last_number_text
from lightning_rl_engines.rollout.base import Prompt

if TYPE_CHECKING:
    from types import ModuleType


class ReasoningGymDataModule(ShardedDataModule[dict[str, Any], Prompt, list[Prompt]]):
    """Questions that reasoning-gym makes up; score them with :class:`ReasoningGymReward`.

    Prompts have the columns ``answer``, ``task`` and ``entry`` (what the verifier needs). Several tasks take turns.

    Args:
        tasks: Name of a task, or several.
        task_options: Options of each task by its name, such as ``{"chain_sum": {"max_terms": 2, "max_digits": 1}}``.
        size: Number of training prompts.
        eval_size: Number of validation, test and prediction prompts, each made with a seed of its own.
        batch_size: Prompts per data rank and update.
        eval_batch_size: Prompts per data rank and batch elsewhere; ``None`` means ``batch_size``.
        apply_chat_template: Wrap the question into a user message.
        system_prompt: System message.
        chat_template_kwargs: Further arguments of the chat template.
        shuffle: Train in another order in each epoch.
        seed: Seed of the questions and of the order.
        tokenizer: Folder or hub name; ``None`` means the tokenizer of the module that is trained.

    Raises:
        ValueError: reasoning-gym is not installed or does not know a task, or an argument is out of its range.
    """

    def __init__(
        self,
        *,
        tasks: str | list[str],
        task_options: dict[str, dict[str, Any]] | None = None,
        size: int = 1000,
        eval_size: int = 100,
        batch_size: int = 8,
        eval_batch_size: int | None = None,
        apply_chat_template: bool = True,
        system_prompt: str | None = None,
        chat_template_kwargs: dict[str, Any] | None = None,
        shuffle: bool = True,
        seed: int = 0,
        tokenizer: str | None = None,
    ) -> None:
        super().__init__(
            batch_size=batch_size, eval_batch_size=eval_batch_size, shuffle=shuffle, seed=seed, tokenizer=tokenizer
        )
        self.tasks = [tasks] if isinstance(tasks, str) else list(tasks)
        self.task_options = dict(task_options or {})
        if not self.tasks or min(size, eval_size) < len(self.tasks):
            raise ValueError(
                f"ReasoningGymDataModule(tasks={tasks!r}, size={size}, eval_size={eval_size}): name at least one task, "
                "and use sizes of at least one prompt per task."
            )
        if unknown := sorted(self.task_options.keys() - set(self.tasks)):
            raise ValueError(f"ReasoningGymDataModule(task_options=...) names {unknown}, not among tasks={self.tasks}.")
        self.size = size
        self.eval_size = eval_size
        self._encoder = PromptEncoder(
            tokenizer=self.resolve_tokenizer,
            apply_chat_template=apply_chat_template,
            system_prompt=system_prompt,
            chat_template_kwargs=chat_template_kwargs,
        )

    @override
    def read(self, split: Split) -> list[list[dict[str, Any]]]:
        gym = import_reasoning_gym()
        size = self.size if split == "train" else self.eval_size
        # Splits must not share questions, so their seeds lie far apart.
        seed = self.seed + 1_000_003 * ("train", "val", "test", "predict").index(split)
        turns = len(self.tasks)
        data_sets = []
        for task in self.tasks:
            try:
                options = self.task_options.get(task, {})
                data_sets.append(gym.create_dataset(task, size=-(-size // turns), seed=seed, **options))
            except (ValueError, TypeError, AssertionError) as error:
                raise ValueError(f"reasoning-gym refuses task {task!r} with options {options}: {error}") from error
        rows = [(self.tasks[i % turns], data_sets[i % turns][i // turns]) for i in range(size)]
        return [[{"task": task, "entry": dict(entry)} for task, entry in rows]]

    @override
    def encode(self, raw: Sequence[dict[str, Any]], split: Split) -> list[Prompt]:
        prompts = []
        for index, row in enumerate(raw):
            entry = row["entry"]
            ids, text = self._encoder(entry["question"], f"{row['task']} question {index}")
            prompts.append(Prompt(token_ids=ids, columns={**row, "answer": entry["answer"]}, index=index, text=text))
        return prompts

    @override
    def collate(self, items: list[Prompt]) -> list[Prompt]:
        return items


@dataclass(kw_only=True)
class ReasoningGymReward:
    """Scores a response with the verifier of the task it answers.

    Args:
        extract: Which part of a response is the answer: its ``"last_number"``, what stands between the last
            ``<answer>`` and ``</answer>`` (``"answer_tag"``), or ``"all"`` of it.
    """

    extract: Literal["last_number", "answer_tag", "all"] = "last_number"

    def __post_init__(self) -> None:
        if self.extract not in ("last_number", "answer_tag", "all"):
            raise ValueError(
                f"ReasoningGymReward(extract={self.extract!r}) is unknown; use 'last_number', 'answer_tag' or 'all'."
            )

    def __call__(self, completion: str, task: str, entry: dict[str, Any]) -> float:
        """Return the verifier's score, from 0 to 1."""
        verify: Callable[..., float] = import_reasoning_gym().get_score_answer_fn(task)
        return float(verify(self._answer(completion), entry))

    def _answer(self, completion: str) -> str | None:
        if self.extract == "all":
            return completion.strip()
        if self.extract == "last_number":
            return last_number_text(completion)
        _, tag, after = completion.rpartition("<answer>")
        return after.partition("</answer>")[0].strip() if tag else None


def import_reasoning_gym() -> "ModuleType":
    """Import reasoning-gym.

    Raises:
        ValueError: It is not installed.
    """
    try:
        import reasoning_gym
    except ImportError as error:
        raise ValueError("reasoning-gym is not installed; `pip install reasoning-gym`.") from error
    module: ModuleType = reasoning_gym
    return module
