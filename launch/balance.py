"""`python -m launch.tools.balance` under the name that it had before."""

import sys

from launch.tools.balance import run

if __name__ == "__main__":
    sys.exit(run())
