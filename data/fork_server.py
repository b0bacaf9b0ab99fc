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

# To look for garbage writes into every object, and so copies the memory that forks share: 54 MiB in
# each worker, which what the server has imported would be.
os.register_at_fork(before=gc.freeze)
