"""What a test file has that another one needs: pytest imports each by its path alone."""

import importlib.util
from functools import cache
from pathlib import Path
from types import ModuleType


@cache
def neighbour(name: str) -> ModuleType:
    """The file below tests/ as a module, such as models/conftest.py."""
    file = Path(__file__).parent / name
    spec = importlib.util.spec_from_file_location(f"neighbour_{file.stem}", file)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module
