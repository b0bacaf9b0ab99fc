"""Imported by the fork server, before what its workers need, and by nobody else.

What asks all processes of a run to end goes to the server, too. Its workers load on so that their
ranks can finish the step (`data/processes.py`), and a worker whose server is gone counts as gone.
The server ends with the process that asked for it.
"""

import gc
import os
import signal

for number in (signal.SIGTERM, signal.SIGUSR1):
    signal.signal(number, signal.SIG_IGN)

# A collection of garbage writes into every object that it looks through, and so copies memory that
# forks share: 54 MiB in each worker. What the server has imported is left out of them.
os.register_at_fork(before=gc.freeze)
