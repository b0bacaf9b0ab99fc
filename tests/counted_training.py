"""train.py by a clock that counts: its seconds are the floating-point operations of a rank so far.
All machines measure the same, busy or not."""

import sys
from typing import Any

from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import flop_registry

import train
from launch.config.options import parse_options
from launch.run.failures import Run, report_and_exit

# a power of two: differences of seconds are exact, whenever a process has begun to count
FLOPS_PER_S = 2**30


class CountedWork(TorchDispatchMode):
    """Counts the matrix products, convolutions and attentions that run in here, forward and
    backward."""

    flops = 0

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        result = func(*args, **(kwargs or {}))
        count = flop_registry.get(func._overloadpacket)
        if count is not None:
            self.flops += count(*args, **(kwargs or {}), out_val=result)
        return result

    def seconds(self) -> float:
        return self.flops / FLOPS_PER_S


if __name__ == "__main__":
    run = Run()
    try:
        with CountedWork() as work:
            status = train.main(parse_options(), run, work.seconds)
    except Exception as error:
        report_and_exit("train.py", error, run)
    sys.exit(status)
