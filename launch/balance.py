"""`python -m launch.tools.balance` under the name that it had before."""

import os
import sys

if __name__ == "__main__":
    os.environ.setdefault("DS_ACCELERATOR", "cpu")  # DeepSpeed need not look for a GPU

from common.output import outlive_output
from launch.tools.balance import run

if __name__ == "__main__":
    outlive_output()
    sys.exit(run())
