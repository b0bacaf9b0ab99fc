"""How far float32 results that are equal but for rounding may lie apart."""

import torch

# Kernels add the terms of a product in an order that depends on the machine, the batch and the
# library. One sum of D terms is off by up to about sqrt(D) * 6e-8 of its size, and a tower of some
# layers by several times that: up to a few 1e-6 of the norm of an embedding. What is computed
# otherwise, such as another mask, pixel or weight, is seen at 1e-3 and more.
RELATIVE = 1e-5


def assert_equal_rows(found, expected, relative=RELATIVE, where="rows"):
    """Rows [..., D] whose difference has at most `relative` of the norm of the expected row. An
    absolute tolerance per element would depend on D and on the machine."""
    found, expected = (torch.as_tensor(each).double() for each in (found, expected))
    assert found.shape == expected.shape
    size, off = expected.norm(dim=-1), (found - expected).norm(dim=-1)
    assert bool((off <= relative * size).all()), (
        f"{where} differ by up to {float((off / size).nan_to_num(0).max()):.2e} of their norm"
    )
