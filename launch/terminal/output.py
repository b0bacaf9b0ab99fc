"""A terminal or pipe that is gone ends no run: what is said from then on is said to nobody.

`train.py … | tee log` loses its reader at Ctrl-C, before the run has saved; over ssh, with the
connection.
"""

from __future__ import annotations

import errno
import io
import os
import sys

GONE = (errno.EPIPE, errno.EIO)  # a pipe, a terminal


class _Outliving(io.TextIOWrapper):
    def write(self, text: str) -> int:
        try:
            return super().write(text)
        except OSError as error:
            self._let_go(error)
            return len(text)

    def flush(self) -> None:
        try:
            super().flush()
        except OSError as error:
            self._let_go(error)

    def _let_go(self, error: OSError) -> None:
        if error.errno not in GONE:
            raise error
        nobody = os.open(os.devnull, os.O_WRONLY)
        os.dup2(nobody, self.fileno())  # for what libraries write, too
        os.close(nobody)


def outlive_output() -> None:
    """From now on, for this process's stdout and stderr."""
    for name in ("stdout", "stderr"):
        stream = getattr(sys, name)
        if isinstance(stream, io.TextIOWrapper):
            outliving = _Outliving(
                stream.buffer,
                encoding=stream.encoding,
                errors=stream.errors,
                line_buffering=stream.line_buffering,
                write_through=stream.write_through,
            )
            setattr(sys, name, outliving)
