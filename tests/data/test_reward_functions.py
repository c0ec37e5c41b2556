import pytest

from lightning_rl_engines.data import LengthPenalty, OverlongPenalty, exact_match, last_number_match


def test_exact_match() -> None:
    assert exact_match(" 42\n", 42) == 1.0
    assert exact_match("42.", "42") == 0.0
    assert exact_match("42", None) is None


@pytest.mark.parametrize(
    ("completion", "answer", "expected"),
    [
        ("7 + 5 = 12.", "12", 1.0),
        ("The result is 1,234.50", 1234.5, 1.0),
        ("it is -3", "#### -3", 1.0),
        ("10-3", "3", 1.0),
        ("10 -3", "-3", 1.0),
        ("12 and then 13", "12", 0.0),
        ("1,2", "2", 1.0),
        (".5", 0.5, 1.0),
        ("none", "0", 0.0),
        ("12", None, None),
    ],
)
def test_last_number_match(completion: str, answer: object, expected: float | None) -> None:
    assert last_number_match(completion, answer) == expected


def test_last_number_match_refuses_answers_without_a_number() -> None:
    with pytest.raises(ValueError, match="holds no number"):
        last_number_match("3", "three")


@pytest.mark.parametrize(("length", "expected"), [(0, 0.0), (10, 0.0), (15, -0.5), (20, -1.0), (99, -1.0)])
def test_length_penalty(length: int, expected: float) -> None:
    assert LengthPenalty(max_length=10)("", [0] * length) == expected


@pytest.mark.parametrize(("length", "expected"), [(0, 0.0), (16, 0.0), (17, -0.25), (20, -1.0), (99, -1.0)])
def test_overlong_penalty(length: int, expected: float) -> None:
    assert OverlongPenalty(max_length=20, buffer=4)("", [0] * length) == expected


def test_arguments_out_of_range() -> None:
    with pytest.raises(ValueError, match=r"LengthPenalty\(max_length=0\)"):
        LengthPenalty(max_length=0)
    with pytest.raises(ValueError, match=r"OverlongPenalty\(max_length=3\) is out of range; use 4"):
        OverlongPenalty(max_length=3, buffer=4)
