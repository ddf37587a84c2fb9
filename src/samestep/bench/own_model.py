"""A user's own model to time: `FILE.py:FUNCTION`. Checked without running it; no torch until then."""

from __future__ import annotations

import ast
import importlib.util
import sys
from pathlib import Path
from typing import TYPE_CHECKING

from samestep.errors import LaunchError

if TYPE_CHECKING:
    from samestep.bench.models import Maker

_WANTED = (
    "name FILE.py:FUNCTION, a function that takes a torch.device and returns a model on it, and a function "
    "from that model to the loss of one batch"
)


def check(name: str) -> None:
    """Return if the file that `name` means defines such a function.

    Raises:
        LaunchError: it does not, or cannot be read.
    """
    path, function = _parts(name)
    try:
        tree = ast.parse(path.read_bytes(), filename=str(path))
    except OSError as error:
        raise LaunchError(f"--model {name}: {path} cannot be read: {error.strerror}") from None
    except (SyntaxError, ValueError) as error:
        raise LaunchError(f"--model {name}: {path} is not Python: {error}") from None
    if not any(isinstance(node, ast.FunctionDef) and node.name == function for node in tree.body):
        raise LaunchError(f"--model {name}: {path} defines no function {function!r}: {_WANTED}")


def load(name: str) -> Maker:
    """The function that `name` means; its file is run for that, its folder being importable."""
    path, function = _parts(name)
    sys.path.insert(0, str(path.resolve().parent))
    spec = importlib.util.spec_from_file_location(path.stem, path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[path.stem] = module
    spec.loader.exec_module(module)
    maker: Maker = getattr(module, function)
    return maker


def _parts(name: str) -> tuple[Path, str]:
    path, _, function = name.rpartition(":")
    if not path.endswith(".py") or not function.isidentifier():
        raise LaunchError(f"--model {name}: there is no such model; {_WANTED}")
    return Path(path), function
