"""`python -m launch.tools.plan` under the name that it had before."""

import sys

from launch.tools.plan import run

if __name__ == "__main__":
    sys.exit(run())
