import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from lightning.pytorch import LightningModule

from lightning_rl_engines.data import PromptDataModule
from lightning_rl_engines.rollout import Prompt
from tests.rollout.stubs import character_tokenizer, save_character_tokenizer
from tests.support.lightning_env import make_trainer


@pytest.fixture
def tokenizer(tmp_path: Path) -> str:
    return save_character_tokenizer(tmp_path / "tokenizer")


def _write(path: Path, rows: list[Any]) -> str:
    path.write_text("\n".join(row if isinstance(row, str) else json.dumps(row) for row in rows) + "\n")
    return str(path)


def _train(file: str, **options: Any) -> list[Prompt]:
    data = PromptDataModule(train=file, batch_size=1, shuffle=False, **options)
    data.setup("fit")
    return [prompt for batch in data.train_dataloader() for prompt in batch]


def test_text_messages_and_token_ids(tmp_path: Path, tokenizer: str) -> None:
    file = _write(
        tmp_path / "train.jsonl",
        [
            {"q": "hi", "answer": "x"},
            "",
            {"q": [{"role": "user", "content": "yo"}], "level": 3},
            {"q": [5, 6, 7]},
        ],
    )
    ids = character_tokenizer()
    assert _train(file, prompt_column="q", tokenizer=tokenizer) == [
        Prompt(token_ids=ids("hi")["input_ids"], columns={"answer": "x"}, index=0, text="hi"),
        Prompt(token_ids=ids("<s>uyo<s>a")["input_ids"], columns={"level": 3}, index=1, text="<s>uyo<s>a"),
        Prompt(token_ids=[5, 6, 7], columns={}, index=2, text=""),
    ]


def test_chat_template_and_system_prompt(tmp_path: Path, tokenizer: str) -> None:
    file = _write(
        tmp_path / "train.jsonl",
        [
            {"prompt": "hi"},
            {"prompt": [{"role": "system", "content": "own"}, {"role": "user", "content": "yo"}]},
        ],
    )
    prompts = _train(file, apply_chat_template=True, system_prompt="be nice", tokenizer=tokenizer)
    assert [prompt.text for prompt in prompts] == ["<s>sbe nice<s>uhi<s>a", "<s>sown<s>uyo<s>a"]
    with pytest.raises(ValueError, match=r"train.jsonl, line 1 holds plain text; set apply_chat_template=True"):
        _train(file, system_prompt="be nice", tokenizer=tokenizer)


def test_long_prompts_are_dropped_with_their_number_or_refused(tmp_path: Path, tokenizer: str) -> None:
    file = _write(tmp_path / "train.jsonl", [{"prompt": text} for text in ("abc", "abcd", "ab", "abcde")])
    with pytest.warns(UserWarning, match="2 of 4 prompts for train"):
        prompts = _train(file, max_prompt_length=3, tokenizer=tokenizer)
    assert [(prompt.text, prompt.index) for prompt in prompts] == [("abc", 0), ("ab", 2)]
    with pytest.raises(ValueError, match="line 2: the prompt has 4 tokens, more than max_prompt_length=3"):
        _train(file, max_prompt_length=3, long_prompts="error", tokenizer=tokenizer)
    with pytest.raises(ValueError, match="All 4 prompts for train are longer"):
        _train(file, max_prompt_length=1, tokenizer=tokenizer)


@pytest.mark.parametrize(
    ("row", "message"),
    [
        ("{nope", "line 2: not valid JSON"),
        ("[1]", "line 2: list instead of an object"),
        ({"question": "x"}, r"line 2: column 'prompt' is missing; the row has \['question'\]"),
        ({"prompt": 3}, "line 2: the prompt must be text, token ids or a list of messages"),
        ({"prompt": [{"role": "user"}]}, "line 2: the prompt must be text, token ids or a list of messages"),
        ({"prompt": [{"role": "assistant", "content": "x"}]}, "line 2: the last message is the assistant's"),
        ({"prompt": ""}, "line 2: the prompt '' gives no tokens"),
        ({"prompt": [1, -1]}, "line 2: the prompt holds the negative token id -1"),
    ],
)
def test_bad_rows_are_named(tmp_path: Path, tokenizer: str, row: Any, message: str) -> None:
    file = _write(tmp_path / "train.jsonl", [{"prompt": "ok"}, row])
    with pytest.raises(ValueError, match=message):
        _train(file, tokenizer=tokenizer)


def test_missing_files_tokenizers_and_data_are_named(tmp_path: Path, tokenizer: str) -> None:
    with pytest.raises(ValueError, match=r"data file 'nowhere.jsonl' does not exist"):
        _train("nowhere.jsonl")
    with pytest.raises(ValueError, match="holds no rows"):
        _train(_write(tmp_path / "empty.jsonl", [""]))
    file = _write(tmp_path / "train.jsonl", [{"prompt": "ok"}])
    with pytest.raises(ValueError, match=r"tokenizer=None.*name the model's folder"):
        _train(file)
    data = PromptDataModule(train=file, tokenizer=tokenizer)
    data.setup("fit")
    with pytest.raises(ValueError, match=r"needs 8 items for a batch, and there are 1; use at most batch_size=1"):
        data.train_dataloader()
    data.setup("test")
    with pytest.raises(ValueError, match=r"test=None"):
        data.test_dataloader()
    with pytest.raises(ValueError, match="batch_size=0"):
        PromptDataModule(batch_size=0)
    with pytest.raises(ValueError, match="max_prompt_length=0"):
        PromptDataModule(max_prompt_length=0)


def test_parquet_and_several_files(tmp_path: Path, tokenizer: str) -> None:
    import pyarrow as pa
    from pyarrow import parquet

    table = pa.table({"prompt": ["a", "b"], "tags": [["x"], []]})
    parquet.write_table(table, tmp_path / "one.parquet")
    two = _write(tmp_path / "two.jsonl", [{"prompt": "c"}])
    one = str(tmp_path / "one.parquet")
    data = PromptDataModule(train=[one, two], val=[two, one], batch_size=1, shuffle=False, tokenizer=tokenizer)
    data.setup("fit")
    prompts = [prompt for batch in data.train_dataloader() for prompt in batch]
    assert [(prompt.text, prompt.index) for prompt in prompts] == [("a", 0), ("b", 1), ("c", 2)]
    assert prompts[0].columns == {"tags": ["x"]}
    loaders = data.val_dataloader()
    assert [[prompt.text for batch in loader for prompt in batch] for loader in loaders] == [["c"], ["a", "b"]]


def test_the_sampler_of_the_strategy_decides_the_ranks(tmp_path: Path, tokenizer: str) -> None:
    file = _write(tmp_path / "train.jsonl", [{"prompt": [token]} for token in range(10)])
    seen = []
    for rank in range(3):
        data = PromptDataModule(train=file, val=file, batch_size=1, shuffle=False)
        data.trainer = SimpleNamespace(  # type: ignore[assignment]
            distributed_sampler_kwargs={"num_replicas": 3, "rank": rank}, overfit_batches=0
        )
        data.setup("fit")
        (validation,) = data.val_dataloader()
        seen.append([[prompt.index for prompt in batch] for batch in validation])
    assert seen == [[[0], [3], [6], []], [[1], [4], [7], []], [[2], [5], [8], [9]]]


def test_another_module_encodes_with_its_own_tokenizer(tmp_path: Path) -> None:
    class Shifted:
        def __call__(self, text: str, **_: Any) -> dict[str, list[int]]:
            return {"input_ids": [token + 100 for token in character_tokenizer()(text)["input_ids"]]}

    file = _write(tmp_path / "train.jsonl", [{"prompt": "ab"}])
    data = PromptDataModule(train=file, batch_size=1)
    seen = []
    for tokenizer in (character_tokenizer(), Shifted()):
        module = SimpleNamespace(tokenizer=tokenizer)
        data.trainer = SimpleNamespace(  # type: ignore[assignment]
            lightning_module=module, distributed_sampler_kwargs=None, overfit_batches=0
        )
        data.setup("fit")
        seen += [prompt.token_ids for batch in data.train_dataloader() for prompt in batch]
    assert seen == [[3, 4], [103, 104]]


class Counting(LightningModule):
    """Counts validation batches."""

    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False
        self.layer = torch.nn.Linear(1, 1)
        self.validated = 0

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), 0.1)

    def training_step(self, batch: Any, batch_idx: int) -> None:
        pass

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.validated += 1


@pytest.mark.filterwarnings("ignore:.*LeafSpec.*:FutureWarning")
def test_without_validation_data_lightning_neither_validates_nor_warns(tmp_path: Path) -> None:
    file = _write(tmp_path / "train.jsonl", [{"prompt": [1, 2]}, {"prompt": [3]}])
    seen = []
    for val in (None, file):
        module, data = Counting(), PromptDataModule(train=file, val=val, batch_size=1)
        for _ in range(2):
            trainer = make_trainer("auto", max_epochs=1, num_sanity_val_steps=0)
            trainer.fit(module, datamodule=data)
        seen.append(module.validated)
    assert seen == [0, 4]
