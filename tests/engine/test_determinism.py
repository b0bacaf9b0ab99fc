"""--deterministic: what torch refuses then is one message. That runs are equal bit for bit on a
GPU: tests/test_gpu.py."""

import determinism_cases
from ranks import run_ranks


def test_an_operation_that_is_not_deterministic_is_refused_with_what_to_do():
    ((kind, text, others_stay),) = run_ranks(1, determinism_cases.refused)
    assert kind == "ValueError" and others_stay
    assert text.startswith("--deterministic: put_ has no deterministic implementation")
