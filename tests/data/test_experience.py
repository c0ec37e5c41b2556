import json
import math
from pathlib import Path
from typing import Any

import pytest
import torch

from lightning_rl_engines.data import ExperienceDataModule
from lightning_rl_engines.sequence.experience import Experience
from tests.rollout.stubs import character_tokenizer, save_character_tokenizer

ROWS: list[dict[str, Any]] = [
    {"prompt": [5, 6], "response": [7, 8, 2], "log_probs": [-1.0, -2.0, -3.0], "reward": 1, "group_id": "a"},
    {"prompt": [5], "response": [2], "log_probs": [-0.5], "reward": 0.5, "group_id": "a"},
    {"prompt": [9, 9, 9], "response": [4, 2], "log_probs": [-4, -5], "reward": -1.0, "group_id": "b"},
]


def _write(path: Path, rows: list[dict[str, Any]]) -> str:
    path.write_text("\n".join(map(json.dumps, rows)))
    return str(path)


def _batches(rows: list[dict[str, Any]], tmp_path: Path, **options: Any) -> list[Experience]:
    data = ExperienceDataModule(train=_write(tmp_path / "train.jsonl", rows), **options)
    data.setup("fit")
    return list(data.train_dataloader())


def test_columns_are_aligned(tmp_path: Path) -> None:
    (experience,) = _batches(ROWS, tmp_path, documents_per_batch=3)
    assert experience.lengths == (5, 2, 5)
    assert experience["input_ids"].tolist() == [5, 6, 7, 8, 2, 5, 2, 9, 9, 9, 4, 2]
    assert experience["response_mask"].int().tolist() == [0, 0, 1, 1, 1, 0, 1, 0, 0, 0, 1, 1]
    log_probs = experience["rollout_log_probs"]
    assert log_probs.dtype == torch.float32
    assert log_probs.tolist() == [0, 0, -1, -2, -3, 0, -0.5, 0, 0, 0, -4, -5]
    assert experience["rewards"].tolist() == [1.0, 0.5, -1.0]
    assert experience["group_ids"].tolist() == [0, 0, 1]


def test_mapping_text_and_optional_columns(tmp_path: Path) -> None:
    tokenizer = save_character_tokenizer(tmp_path / "tokenizer")
    ids = character_tokenizer()
    rows = [{"question": "hi", "text": "yes", "adv": [1.0, 2.0, 3.0, 4.0], "score": 2.0}]
    columns = {"prompt": "question", "response": "text", "advantages": "adv", "rewards": "score"}
    options = {"documents_per_batch": 1, "columns": columns, "tokenizer": tokenizer}
    (experience,) = _batches(rows, tmp_path, **options)
    assert experience["input_ids"].tolist() == [*ids("hi")["input_ids"], *ids("yes")["input_ids"], 2]
    assert experience["advantages"].tolist() == [0, 0, 1, 2, 3, 4]
    assert "rollout_log_probs" not in experience and "group_ids" not in experience
    with pytest.raises(ValueError, match="line 1: column 'adv' has 4 values for a response of 3 tokens"):
        _batches(rows, tmp_path, append_eos=False, **options)
    rows[0]["question"] = [{"role": "user", "content": "hi"}]
    (chat,) = _batches(rows, tmp_path, **options)
    assert chat["input_ids"].tolist()[: -len("yes") - 1] == ids("<s>uhi<s>a")["input_ids"]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"log_probs": [-1.0]}, "line 2: column 'log_probs' has 1 values for a response of 3 tokens"),
        ({"log_probs": None}, "line 2: column 'log_probs' is missing"),
        ({"log_probs": -1.0}, "line 2: column 'log_probs' is a list in some rows and a number in others"),
        ({"log_probs": [-1.0, "x", 0.0]}, "line 2: column 'log_probs' holds something that is no number"),
        ({"log_probs": [-1.0, math.nan, 0.0]}, "line 2: column 'log_probs' holds a number that is not finite"),
        ({"reward": math.inf}, "line 2: column 'reward' is inf; leave the row out"),
        ({"reward": "good"}, "line 2: column 'reward' must be a number"),
        ({"group_id": [1]}, "line 2: column 'group_id' must be a whole number or text"),
        ({"response": []}, "line 2: the response is empty"),
        ({"response": [1.5]}, "line 2: the response must be text or a list of token ids"),
        ({"prompt": 3}, "line 2: the prompt must be text"),
    ],
)
def test_bad_rows_are_named(tmp_path: Path, change: dict[str, Any], message: str) -> None:
    rows = [ROWS[1], {**ROWS[0], **change}]
    with pytest.raises(ValueError, match=message):
        _batches(rows, tmp_path, documents_per_batch=1)


def test_groups_stay_whole(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="shuffle=True"):
        _batches(ROWS, tmp_path, documents_per_batch=1, shuffle=True)
    with pytest.warns(UserWarning, match="global batch of 1 documents cuts a group"):
        _batches(ROWS, tmp_path, documents_per_batch=1)


def test_an_empty_batch_has_the_same_columns(tmp_path: Path) -> None:
    data = ExperienceDataModule(val=_write(tmp_path / "val.jsonl", ROWS), documents_per_batch=2)
    data.setup("validate")
    (loader,) = data.val_dataloader()
    full = next(iter(loader))
    empty = data.collate([])
    assert len(empty) == 0 and empty.num_tokens == 0
    assert set(empty.column_names) == set(full.column_names)
    assert all(empty[name].dtype == full[name].dtype for name in full.column_names)
    assert Experience.cat([full, empty]).lengths == full.lengths


def test_arguments() -> None:
    with pytest.raises(ValueError, match="documents_per_batch=0"):
        ExperienceDataModule(documents_per_batch=0)
    with pytest.raises(ValueError, match=r"names \['response_mask'\]"):
        ExperienceDataModule(columns={"response_mask": "mask"})
