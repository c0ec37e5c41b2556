import pickle

import numpy as np
import pytest
import torch

from lightning_rl_engines.sequence import Experience


def make(**columns):
    return Experience.from_documents(
        input_ids=[[1, 2, 3], [4, 5], [6]], response_mask=[[0, 1, 1], [1, 1], torch.tensor([True])], **columns
    )


def assert_same(left: Experience, right: Experience) -> None:
    assert left.lengths == right.lengths
    assert left.response_lengths == right.response_lengths
    assert left.token_columns.keys() == right.token_columns.keys()
    assert left.document_columns.keys() == right.document_columns.keys()
    for name in left.column_names:
        torch.testing.assert_close(left[name], right[name], rtol=0, atol=0, equal_nan=True)
    assert torch.equal(left.response_mask_host, right.response_mask_host)


def test_columns_are_flat_and_keep_their_kind_and_dtype():
    experience = make(
        advantages=[[0.1, 0.2, 0.3], [0.4, 0.5], [0.6]],
        counts=[[1, 2, 3], np.array([4, 5]), (6,)],
        half=[torch.ones(n, dtype=torch.bfloat16) for n in (3, 2, 1)],
        rewards=[1, 0.5, 2],
        group_ids=[7, 7, 8],
        done=[True, False, True],
        double=torch.tensor([1.0, 2.0, 3.0], dtype=torch.float64),
        scalars=[torch.tensor(1.0), torch.tensor(2.0), torch.tensor(3.0)],
    )
    assert experience.lengths == (3, 2, 1)
    assert experience.num_tokens == 6
    assert len(experience) == 3
    assert experience["input_ids"].tolist() == [1, 2, 3, 4, 5, 6]
    # The first token of a document has no prediction, whatever the mask says.
    assert experience["response_mask"].tolist() == [False, True, True, False, True, False]
    assert experience.response_lengths == (2, 1, 0)
    assert torch.equal(experience["advantages"], torch.tensor([0.1, 0.2, 0.3, 0.4, 0.5, 0.6]))
    assert experience["rewards"].tolist() == [1.0, 0.5, 2.0]
    assert {name: column.dtype for name, column in experience.token_columns.items()} == {
        "input_ids": torch.int64,
        "response_mask": torch.bool,
        "advantages": torch.float32,
        "counts": torch.int64,
        "half": torch.bfloat16,
    }
    assert {name: column.dtype for name, column in experience.document_columns.items()} == {
        "rewards": torch.float32,
        "group_ids": torch.int64,
        "done": torch.bool,
        "double": torch.float64,
        "scalars": torch.float32,
    }
    assert "done" in experience
    assert "other" not in experience


def test_python_floats_become_float32_under_another_default_dtype():
    torch.set_default_dtype(torch.bfloat16)
    try:
        rewards = make(rewards=[0.1, 0.2, 0.3])["rewards"]
    finally:
        torch.set_default_dtype(torch.float32)
    assert torch.equal(rewards, torch.tensor([0.1, 0.2, 0.3]))


def test_a_list_with_one_value_per_one_token_document_is_per_token():
    experience = Experience.from_documents(input_ids=[[1], [2]], response_mask=[[0], [0]], x=[[1.0], [2.0]], y=[1, 2])
    assert list(experience.token_columns) == ["input_ids", "response_mask", "x"]
    assert list(experience.document_columns) == ["y"]


@pytest.mark.parametrize(
    ("columns", "words"),
    [
        ({"input_ids": [[1], []], "response_mask": [[0], []]}, ["input_ids", "document 1", "[0]"]),
        (
            {"input_ids": [[1, 2], [3]], "response_mask": [[0, 1], [0, 1]]},
            ["response_mask", "document 1", "[2]", "1 tok"],
        ),
        ({"input_ids": [[1, 2], [3]], "response_mask": [[0, 1]]}, ["response_mask", "1 entries", "2 documents"]),
        ({"input_ids": [[1, 2]], "response_mask": [[0, 2]]}, ["response_mask", "document 0", "holds 2", "token 1"]),
        (
            {"input_ids": [[1, 2], [3, -4]], "response_mask": [[0, 1]] * 2},
            ["input_ids", "document 1", "-4", "token 1 of 2"],
        ),
        ({"input_ids": [[1.5]], "response_mask": [[0]]}, ["input_ids", "float"]),
        ({"rewards": [0.0, float("nan"), 1.0]}, ["rewards", "document 1", "nan"]),
        ({"rewards": [[0, 0, 0.0], [0, float("inf")], [0.0]]}, ["rewards", "document 1", "inf"]),
        ({"advantages": [[1.0, 2.0, 3.0], [1.0], [1.0]]}, ["advantages", "document 1", "[1]", "2 tokens"]),
        ({"advantages": [[1.0, 2.0, 3.0], 1.0, 2.0]}, ["advantages", "mixes", "document 1"]),
        ({"advantages": [1.0, 2.0]}, ["advantages", "2 entries", "3 documents"]),
        ({"advantages": torch.zeros(6)}, ["advantages", "6 entries", "with_token_columns"]),
        ({"names": ["a", "b", "c"]}, ["names", "document 0"]),
        ({"scores": [1.0, None, 2.0]}, ["scores", "mixes", "document 1", "None"]),
        ({"text": "abc"}, ["text", "abc"]),
    ],
)
def test_bad_columns_are_named(columns, words):
    documents = {"input_ids": [[1, 2, 3], [4, 5], [6]], "response_mask": [[0, 1, 1], [0, 1], [0]]}
    with pytest.raises(ValueError) as error:
        Experience.from_documents(**{**documents, **columns})
    for word in words:
        assert word in str(error.value)


def test_select_takes_documents_in_any_order_and_again():
    experience = make(rewards=[1.0, 2.0, 3.0])
    chosen = experience.select([2, 0, 0])
    assert chosen.lengths == (1, 3, 3)
    assert chosen["input_ids"].tolist() == [6, 1, 2, 3, 1, 2, 3]
    assert chosen["rewards"].tolist() == [3.0, 1.0, 1.0]
    assert chosen.response_lengths == (0, 2, 2)
    assert chosen.response_mask_host.tolist() == chosen["response_mask"].tolist()
    with pytest.raises(ValueError, match="3"):
        experience.select([3])
    with pytest.raises(ValueError, match="-1"):
        experience.select([-1])


def test_documents_are_views():
    experience = make()
    parts = experience.documents("input_ids")
    assert [part.tolist() for part in parts] == [[1, 2, 3], [4, 5], [6]]
    assert parts[1].untyped_storage().data_ptr() == experience["input_ids"].untyped_storage().data_ptr()


def test_columns_are_added_replaced_and_dropped_without_a_change_to_the_original():
    experience = make(rewards=[1.0, 2.0, 3.0])
    new = experience.with_token_columns(values=torch.arange(6.0)).with_document_columns(rewards=torch.zeros(3))
    new = new.with_columns(returns=[[1, 2, 3], [4, 5], [6]], temperature=[0.5, 1.0, 1.5])
    assert new["values"].tolist() == [0, 1, 2, 3, 4, 5]
    assert new["rewards"].tolist() == [0, 0, 0]
    assert new["returns"].tolist() == [1, 2, 3, 4, 5, 6]
    assert "temperature" in new.document_columns
    assert experience.column_names == ("input_ids", "response_mask", "rewards")
    assert experience["rewards"].tolist() == [1, 2, 3]
    assert new.drop("values", "rewards").column_names == ("input_ids", "response_mask", "returns", "temperature")
    # A column may change its kind; it never exists twice.
    assert new.with_columns(rewards=[[1, 2, 3], [4, 5], [6]]).document_columns.keys() == {"temperature"}


def test_a_new_response_mask_is_counted_again():
    new = make().with_token_columns(response_mask=torch.tensor([1, 0, 1, 1, 0, 0]))
    assert new["response_mask"].tolist() == [False, False, True, False, False, False]
    assert new.response_lengths == (1, 0, 0)
    assert new.response_mask_host.tolist() == new["response_mask"].tolist()


@pytest.mark.parametrize(
    "change",
    [
        lambda e: e.with_token_columns(values=torch.zeros(5)),
        lambda e: e.with_token_columns(values=torch.zeros(6, 1)),
        lambda e: e.with_document_columns(values=torch.zeros(6)),
        lambda e: e.with_document_columns(rewards=torch.tensor([0, 0, float("nan")])),
        lambda e: e.with_document_columns(input_ids=torch.zeros(3)),
        lambda e: e.with_token_columns(input_ids=torch.tensor([1, 2, 3, 4, 5, -6])),
        lambda e: e.drop("input_ids"),
        lambda e: e.drop("nothing"),
        lambda e: e.mini_batches(0),
        lambda e: Experience.cat([]),
    ],
)
def test_bad_changes_are_refused(change):
    with pytest.raises(ValueError):
        change(make())


def test_nothing_can_be_assigned():
    experience = make()
    with pytest.raises(TypeError):
        experience.token_columns["x"] = torch.zeros(6)
    with pytest.raises(TypeError):
        experience.document_columns["x"] = torch.zeros(3)
    with pytest.raises(AttributeError):
        experience.lengths = (1,)
    with pytest.raises(AttributeError):
        experience.other = 1
    with pytest.raises(TypeError):
        iter(experience)


def test_unknown_names_are_key_errors_that_list_the_columns():
    with pytest.raises(KeyError, match="response_mask"):
        make()["advantages"]
    with pytest.raises(KeyError, match="response_mask"):
        make(rewards=[1, 2, 3]).documents("rewards")


def test_cat_joins_in_order_and_undoes_a_split():
    experience = make(rewards=[1.0, 2.0, 3.0], advantages=[[1, 2, 3], [4, 5], [6]])
    assert_same(Experience.cat(experience.mini_batches(5)), experience)
    assert_same(Experience.cat([experience.select([0]), experience.select([1, 2])]), experience)


def test_cat_leaves_out_experiences_without_documents():
    empty = Experience.from_documents(input_ids=[], response_mask=[])
    experience = make(rewards=[1.0, 2.0, 3.0])
    assert_same(Experience.cat([empty, experience, empty]), experience)
    assert len(Experience.cat([empty, empty])) == 0


@pytest.mark.parametrize(
    ("other", "words"),
    [
        ({}, ["rewards", "missing", "experience 1"]),
        ({"rewards": [1, 2, 3]}, ["rewards", "int64", "float32"]),
        ({"rewards": [[1.0, 2, 3], [4, 5], [6]]}, ["rewards", "per token", "per document"]),
        ({"rewards": [1.0, 2, 3], "more": [1, 2, 3]}, ["more", "missing"]),
    ],
)
def test_cat_refuses_other_columns(other, words):
    with pytest.raises(ValueError) as error:
        Experience.cat([make(rewards=[1.0, 2.0, 3.0]), make(**other)])
    for word in words:
        assert word in str(error.value)


@pytest.mark.parametrize("count", [1, 2, 3, 4, 7, 12])
@pytest.mark.parametrize("shuffled", [False, True])
def test_mini_batches_are_nearly_equal_and_hold_every_document_once(count, shuffled):
    ids = [[index] * (1 + index % 3) for index in range(7)]
    experience = Experience.from_documents(input_ids=ids, response_mask=[[1] * len(i) for i in ids], number=range(7))
    generator = torch.Generator().manual_seed(3) if shuffled else None
    parts = experience.mini_batches(count, generator)
    sizes = [len(part) for part in parts]
    assert len(parts) == count
    assert max(sizes) - min(sizes) <= 1
    numbers = [number for part in parts for number in part["number"].tolist()]
    assert sorted(numbers) == list(range(7))
    if shuffled:
        again = experience.mini_batches(count, torch.Generator().manual_seed(3))
        assert numbers == [number for part in again for number in part["number"].tolist()]
        assert numbers != list(range(7))
    else:
        assert numbers == list(range(7))
    for part in parts:
        assert [set(document.tolist()) for document in part.documents("input_ids")] == [
            {number} for number in part["number"].tolist()
        ]


def test_empty_experiences_work_everywhere():
    empty = Experience.from_documents(input_ids=[], response_mask=[], rewards=[])
    assert (len(empty), empty.num_tokens, empty.lengths, empty.response_lengths) == (0, 0, (), ())
    assert empty["input_ids"].dtype == torch.int64
    assert empty["response_mask"].dtype == torch.bool
    assert empty.documents("input_ids") == []
    assert_same(empty.select([]), empty)
    assert_same(empty.with_columns(response_mask=[]), empty)
    assert [len(part) for part in empty.mini_batches(2)] == [0, 0]
    assert len(make().select([])) == 0
    assert len(empty.with_token_columns(values=torch.zeros(0)).with_document_columns(x=torch.zeros(0)).drop("x")) == 0
    assert_same(pickle.loads(pickle.dumps(empty)), empty)


def test_pickle_and_to_keep_everything():
    experience = make(rewards=[1.0, 2.0, 3.0], half=[torch.ones(n, dtype=torch.bfloat16) for n in (3, 2, 1)])
    assert_same(pickle.loads(pickle.dumps(experience)), experience)
    assert_same(experience.to("cpu"), experience)
    moved = experience.to("meta")
    assert {moved[name].device.type for name in moved.column_names} == {"meta"}
    assert moved.lengths == experience.lengths
    # What the host needs stays on the host.
    assert torch.equal(moved.response_mask_host, experience["response_mask"])


def test_repr_is_short_and_says_what_is_inside():
    assert repr(make(rewards=[1.0, 2.0, 3.0])) == (
        "Experience(3 documents, 6 tokens on cpu: input_ids, response_mask, rewards)"
    )
