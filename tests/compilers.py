"""Whether this machine can compile what torch makes of a layer."""

import pytest
import torch

from engine.compiling import compiling


def needs_a_compiler():
    try:
        with compiling():
            torch.compile(lambda x: x.sin() + 1)(torch.ones(3))
    except RuntimeError as error:
        pytest.skip(f"torch cannot compile here: {error}")
