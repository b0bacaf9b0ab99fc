"""One torch extensions cache per test session, so that a killed run elsewhere cannot block the tests, nor the tests others."""

import hashlib
import os
import sys
import tempfile
from importlib.metadata import version

# one for each environment: a cache that two of them share is compiled anew each time they take turns
ENVIRONMENT = hashlib.blake2b(f"{sys.prefix} {version('torch')}".encode(), digest_size=6).hexdigest()
os.environ.setdefault(
    "TORCH_EXTENSIONS_DIR", os.path.join(tempfile.gettempdir(), f"wye-tests-{os.getuid()}", f"torch_extensions-{ENVIRONMENT}")
)
os.environ.setdefault("WYE_CACHE", os.path.join(tempfile.gettempdir(), f"wye-tests-{os.getuid()}", "costs"))
os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
