"""What comes back from an advantage function, and batches without a signal."""

from typing import Any

import pytest
import torch

from lightning_rl_engines.modules.selection import MAX_SKIPPED_BATCHES, GlobalColumns, SkippedBatches


def columns() -> GlobalColumns:
    return GlobalColumns(torch.tensor([1.0, 0.5]), torch.tensor([0, 0]), torch.tensor([3, 4]), (1, 1), 0)


@pytest.mark.parametrize(
    ("values", "words"),
    [
        ([0.1, 0.2], r"advantage returned list; return a Tensor of shape \[2\]"),
        (None, "advantage returned NoneType"),
        (torch.tensor(0.5), r"advantage returned \[\]"),
        (torch.ones(3), r"advantage returned \[3\]; return a Tensor of shape \[2\]"),
        (torch.tensor([0.0, float("nan")]), r"advantage returned nan for document 1 of 2 \(reward 0.5\)"),
    ],
)
def test_what_is_no_number_for_each_document_is_refused(values: Any, words: str) -> None:
    with pytest.raises(ValueError, match=words):
        columns().require(values)


def test_a_number_for_each_document_is_taken() -> None:
    values = torch.tensor([0.5, -0.5])
    assert columns().require(values) is values


def test_a_run_without_a_signal_is_given_up() -> None:
    skipped = SkippedBatches()
    for _ in range(2):
        skipped.clear()
        for _ in range(MAX_SKIPPED_BATCHES - 1):
            with pytest.warns(UserWarning, match="No group of this batch has .*The update is skipped"):
                skipped.add()
    with pytest.raises(RuntimeError, match=f"No group of {MAX_SKIPPED_BATCHES} batches in a row"):
        skipped.add()
