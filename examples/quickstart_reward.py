"""The reward of the quickstart, a plain function that the YAML names by its import path."""


def letters_in_place(completion: str, answer: str) -> float:
    """Share of letters that are right and in the right place; a response that is too long or too short loses some.

    Args:
        completion: The response.
        answer: The column `answer` of the prompt's row.
    """
    response = completion.strip()
    right = sum(given == wanted for given, wanted in zip(response, answer, strict=False))
    return right / max(len(response), len(answer))
