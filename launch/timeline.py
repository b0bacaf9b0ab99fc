"""`python -m launch.tools.timeline` under the name that it had before."""

import sys

from launch.tools.timeline import run

if __name__ == "__main__":
    sys.exit(run())
