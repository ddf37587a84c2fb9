"""Which tests of the suite concern data parallelism, found by reading its source."""

from __future__ import annotations

import ast
from dataclasses import dataclass
from functools import cache

from tests.conformance.ddp_suite.shim import suite_path

GROUPS = ("DistributedDataParallel", "join", "SyncBatchNorm")
_SKIPS = ("unittest.skip(", "skip_but_pass_in_sandcastle(", "skip_but_pass_in_sandcastle_if(True")


@dataclass(frozen=True)
class SuiteTest:
    """One test of the suite."""

    name: str
    group: str
    is_skipped_upstream: bool  # torch's own CI never runs it on Linux


@cache
def select_tests() -> tuple[SuiteTest, ...]:
    """The tests that use DistributedDataParallel or SyncBatchNorm, themselves or in helpers they call."""
    functions = _functions_of_the_suite()
    tests = []
    for name, function in functions.items():
        words = _words(name, functions) if name.startswith("test_") else set()
        if not words & {"DistributedDataParallel", "SyncBatchNorm"}:
            continue
        group = next(group for group in reversed(GROUPS) if group in words)
        decorators = [ast.unparse(decorator) for decorator in function.decorator_list]
        is_skipped = any(text.startswith(_SKIPS) or "IS_LINUX" in text for text in decorators)
        tests.append(SuiteTest(name, group, is_skipped))
    return tuple(tests)


def _functions_of_the_suite() -> dict[str, ast.FunctionDef]:
    tree = ast.parse(suite_path().read_text(encoding="utf-8"))
    classes = {node.name: node for node in tree.body if isinstance(node, ast.ClassDef)}
    base = next(node for node in classes["DistributedTest"].body if isinstance(node, ast.ClassDef))
    return {node.name: node for node in base.body if isinstance(node, ast.FunctionDef)}


def _words(name: str, functions: dict[str, ast.FunctionDef], seen: frozenset[str] = frozenset()) -> set[str]:
    """Names and attributes in the body of the function `name` and of the suite's functions that it calls."""
    words: set[str] = set()
    for statement in functions[name].body:
        for node in ast.walk(statement):
            if isinstance(node, ast.Name):
                words.add(node.id)
            elif isinstance(node, ast.Attribute) and not isinstance(node.value, ast.Constant):  # not "".join
                words.add(node.attr)
    for called in sorted((words & functions.keys()) - seen - {name}):
        words |= _words(called, functions, seen | {name, called})
    return words
