"""Ready-made reward functions."""

import re
from dataclasses import dataclass
from typing import Any

_NUMBER = re.compile(r"-?(?:\d{1,3}(?:,\d{3})+|\d+)(?:\.\d+)?|-?\.\d+")


def exact_match(completion: str, answer: Any) -> float | None:
    """1 when the completion is the answer, 0 otherwise; white space around either does not count.

    Args:
        completion: The response.
        answer: Column of the data set; ``None`` means that the reward does not apply.
    """
    if answer is None:
        return None
    return float(completion.strip() == str(answer).strip())


def last_number_match(completion: str, answer: Any) -> float | None:
    """1 when the last number in the completion equals the last number in the answer, 0 otherwise.

    Numbers may have thousands separators and decimals: ``1,000.50`` is ``1000.5``. A minus sign right after a digit is
    read as one between two numbers.

    Args:
        completion: The response.
        answer: Column of the data set, a number or text such as ``"#### 42"``; ``None`` means not applicable.

    Raises:
        ValueError: The answer holds no number.
    """
    if answer is None:
        return None
    expected = last_number(str(answer))
    if expected is None:
        raise ValueError(f"the answer {answer!r} holds no number; use exact_match for texts.")
    return float(last_number(completion) == expected)


def last_number(text: str) -> float | None:
    """Return the last number in a text, ``None`` when it holds none."""
    found = last_number_text(text)
    return None if found is None else float(found)


def last_number_text(text: str) -> str | None:
    """Return the last number in a text as it is written, without thousands separators; ``None`` when it holds none."""
    found = None
    for match in _NUMBER.finditer(text):
        found = match.group().replace(",", "")
        # In "5-3" the minus is an operator.
        if found[0] == "-" and match.start() > 0 and text[match.start() - 1].isdigit():
            found = found[1:]
    return found


@dataclass(kw_only=True)
class LengthPenalty:
    """0 up to ``max_length`` tokens, then falling linearly to -1 at twice that.

    Args:
        max_length: Tokens of a response that cost nothing.
    """

    max_length: int

    def __post_init__(self) -> None:
        _require_at_least("LengthPenalty", "max_length", self.max_length, 1)

    def __call__(self, completion: str, completion_ids: list[int]) -> float:
        """Return the penalty of one response, in [-1, 0]."""
        excess = max(0, len(completion_ids) - self.max_length)
        return -min(1.0, excess / self.max_length)


@dataclass(kw_only=True)
class OverlongPenalty:
    """DAPO's soft punishment: 0 up to ``max_length - buffer`` tokens, falling linearly to -1 at ``max_length``.

    Args:
        max_length: Tokens from which the whole penalty applies; usually the rollout's ``max_new_tokens``.
        buffer: Tokens over which it grows.
    """

    max_length: int
    buffer: int

    def __post_init__(self) -> None:
        _require_at_least("OverlongPenalty", "buffer", self.buffer, 1)
        _require_at_least("OverlongPenalty", "max_length", self.max_length, self.buffer)

    def __call__(self, completion: str, completion_ids: list[int]) -> float:
        """Return the penalty of one response, in [-1, 0]."""
        excess = max(0, len(completion_ids) - (self.max_length - self.buffer))
        return -min(1.0, excess / self.buffer)


def _require_at_least(owner: str, name: str, value: int, least: int) -> None:
    if value < least:
        raise ValueError(f"{owner}({name}={value}) is out of range; use {least} or more.")
