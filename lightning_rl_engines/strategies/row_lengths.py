"""How long rows become by padding, where every further length costs something."""

from lightning_rl_engines.sequence.planner import round_up, row_capacity

_STEP = 128
_COMPILED_STEPS = 4


def padded_length(tokens: int, *, multiple_of: int, budget: int | None) -> int:
    """Round up to a multiple of 128, or to the longest row of the budget.

    For DTensor, which plans an operation anew, in milliseconds, for each shape that it has not seen.

    Args:
        tokens: Length of the row without padding.
        multiple_of: What the length has to be a multiple of.
        budget: The most tokens of a row, padding included; ``None`` for no limit.

    Returns:
        A multiple of ``multiple_of``, at least ``tokens``.
    """
    longest = row_capacity(budget, multiple_of)
    length = round_up(round_up(tokens, _STEP), multiple_of)
    return length if longest is None else min(length, longest)


def compiled_length(tokens: int, *, multiple_of: int, budget: int | None) -> int:
    """Round up to a quarter of the budget, or without one to a power of two times 128.

    For graphs that hold for one length only; arguments are those of :func:`padded_length`.
    """
    longest = row_capacity(budget, multiple_of)
    if longest is not None:
        step = round_up(-(-longest // _COMPILED_STEPS), multiple_of)
        return min(round_up(tokens, step), longest)
    length = _STEP
    while length < tokens:
        length *= 2
    return round_up(length, multiple_of)
