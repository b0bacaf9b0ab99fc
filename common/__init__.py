"""What all folders use: writing files, showing text, options."""

__version__ = "0.1.0"  # runs, checkpoints and exports of 0.1 stay readable
