"""Preference pairs from files: documents in pairs, refusals by file and line."""

import json

import pytest
import torch

from lightning_rl_engines.data import PreferenceDataModule
from lightning_rl_engines.data.experience import RecordedDocument
from lightning_rl_engines.data.preferences import PreferencePair

TOKENIZER = "examples/quickstart"


def write(path, *rows):
    path.write_text("\n".join(json.dumps(row) for row in rows))
    return str(path)


def batches(file, **options):
    data = PreferenceDataModule(train=file, tokenizer=TOKENIZER, **{"batch_size": 2, "shuffle": False, **options})
    data.setup("fit")
    return list(data.train_dataloader())


def test_a_row_becomes_two_documents_with_one_prompt(tmp_path):
    file = write(
        tmp_path / "pairs.jsonl",
        {"prompt": [5, 6], "chosen": [7, 8], "rejected": [9]},
        {"prompt": [5], "chosen": [10], "rejected": [11, 12, 13]},
    )
    (batch,) = batches(file)
    assert [ids.tolist() for ids in batch.documents("input_ids")] == [[5, 6, 7, 8], [5, 6, 9], [5, 10], [5, 11, 12, 13]]
    assert batch.response_lengths == (2, 1, 1, 3)
    assert batch["group_ids"].tolist() == [0, 0, 1, 1]
    assert batch["preferred"].tolist() == [True, False, True, False]
    assert batch["preferred"].dtype == torch.bool
    assert "ref_log_probs" not in batch


def test_texts_and_the_last_message_of_a_conversation_end_with_the_end_token(tmp_path):
    messages = [{"role": "user", "content": "copy a\n"}, {"role": "assistant", "content": "ab"}]
    file = write(tmp_path / "pairs.jsonl", {"question": "copy a\n", "good": messages, "bad": "b"})
    columns = {"prompt_column": "question", "chosen_column": "good", "rejected_column": "bad"}
    (batch,) = batches(file, batch_size=1, **columns)
    chosen, rejected = batch.documents("input_ids")
    assert batch.response_lengths == (3, 2)
    assert chosen[-1] == rejected[-1] == 0
    (without,) = batches(file, batch_size=1, append_eos=False, **columns)
    assert without.response_lengths == (2, 1)
    assert torch.equal(without.documents("input_ids")[0], chosen[:-1])


def test_recorded_reference_log_probs_lie_on_the_response(tmp_path):
    row = {"prompt": [5, 6], "chosen": [7, 8], "rejected": [9]}
    file = write(tmp_path / "a.jsonl", {**row, "chosen_ref_log_probs": [-1, -2.0], "rejected_ref_log_probs": [-3.0]})
    (batch,) = batches(file, batch_size=1)
    assert [values.tolist() for values in batch.documents("ref_log_probs")] == [[0, 0, -1, -2], [0, 0, -3]]


def test_a_rank_without_pairs_has_the_same_columns():
    data = PreferenceDataModule(train="unused", batch_size=1)
    side = [RecordedDocument([1, 2], 1, {"group_ids": 3, "preferred": flag}) for flag in (True, False)]
    data._template = PreferencePair(*side)
    empty = data.collate([])
    assert len(empty) == 0
    assert {"group_ids", "preferred", "input_ids", "response_mask"} <= set(empty.column_names)
    assert empty["preferred"].dtype == torch.bool


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"chosen": None}, "line 2: column 'chosen' is missing"),
        ({"rejected": []}, "line 2: column 'rejected': the response is empty"),
        ({"rejected": 3.5}, "line 2: column 'rejected': the response must be text or a list of token ids"),
        ({"chosen": [{"role": "user", "content": "a"}]}, "line 2: column 'chosen': the last message must be"),
        ({"chosen_ref_log_probs": [-1.0]}, "line 1: column 'chosen_ref_log_probs' is missing"),
    ],
)
def test_a_row_that_cannot_be_used_is_named(tmp_path, change, message):
    row = {"prompt": [5], "chosen": [7], "rejected": [8]}
    file = write(tmp_path / "pairs.jsonl", row, {**row, **change})
    with pytest.raises(ValueError, match=message):
        batches(file)


def test_reference_log_probs_need_one_number_per_response_token(tmp_path):
    row = {"prompt": [5], "chosen": [7, 8], "rejected": [8], "rejected_ref_log_probs": [-1.0]}
    with pytest.raises(ValueError, match="has 1 values for a response of 2 tokens"):
        batches(write(tmp_path / "a.jsonl", {**row, "chosen_ref_log_probs": [-1.0]}), batch_size=1)
    with pytest.raises(ValueError, match="must be a list with one number per response token"):
        batches(write(tmp_path / "b.jsonl", {**row, "chosen_ref_log_probs": -1.0}), batch_size=1)
