"""How long rows become by padding, where every further length costs something."""

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
    longest = _longest(multiple_of, budget)
    length = _round_up(_round_up(tokens, _STEP), multiple_of)
    return length if longest is None else min(length, longest)


def compiled_length(tokens: int, *, multiple_of: int, budget: int | None) -> int:
    """Round up to a quarter of the budget, or without one to a power of two times 128.

    For graphs that hold for one length only; arguments are those of :func:`padded_length`.
    """
    longest = _longest(multiple_of, budget)
    if longest is not None:
        step = _round_up(-(-longest // _COMPILED_STEPS), multiple_of)
        return min(_round_up(tokens, step), longest)
    length = _STEP
    while length < tokens:
        length *= 2
    return _round_up(length, multiple_of)


def _longest(multiple_of: int, budget: int | None) -> int | None:
    return None if budget is None else budget // multiple_of * multiple_of


def _round_up(tokens: int, step: int) -> int:
    return -(-tokens // step) * step
