"""What a rank does in the tests of deterministic algorithms, which are a setting of the process."""

import torch

from engine.processes.determinism import compute_deterministically, refused_in_words


def refused() -> tuple[str, str, bool]:
    """(the class of the error of an operation that torch refuses, its text, whether another error
    stays as it is)."""
    compute_deterministically()
    other = RuntimeError("another")
    try:
        torch.zeros(3).put_(torch.tensor([0, 0]), torch.ones(2))
    except RuntimeError as error:
        explained = refused_in_words(error)
        return type(explained).__name__, str(explained), refused_in_words(other) is other
    return "", "", False
