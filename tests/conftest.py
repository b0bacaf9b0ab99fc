"""One torch extensions cache per test session, so that a killed run elsewhere cannot block the tests, nor the tests others."""

import os
import tempfile

os.environ.setdefault("TORCH_EXTENSIONS_DIR", os.path.join(tempfile.gettempdir(), f"wye-tests-{os.getuid()}", "torch_extensions"))
os.environ.setdefault("WYE_CACHE", os.path.join(tempfile.gettempdir(), f"wye-tests-{os.getuid()}", "costs"))
os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
