"""What a checkpoint directory contains: names and the manifest (docs/checkpoint-format.md). Pure."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from samestep.errors import CheckpointCorruptError, CheckpointError

__all__ = [
    "MANIFEST",
    "MAX_MANIFEST_BYTES",
    "RANDOM",
    "STATE",
    "CheckpointName",
    "FileRecord",
    "Manifest",
    "check_entry_names",
    "dump_json",
    "parse_json",
    "tensors_file",
]

FORMAT = "samestep-checkpoint"
VERSION = 1
MANIFEST = "manifest.json"
STATE = "state.json"
RANDOM = "random.json"
MAX_MANIFEST_BYTES = 16 << 20

_CHECKPOINT_NAME = re.compile(r"step-([0-9]{9,18})(?:\.([0-9]{1,9}))?")
_FILE_NAME = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.-]{0,127}")
_ENTRY_NAME = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.-]{0,63}")
_SHA256 = re.compile(r"[0-9a-f]{64}")


@dataclass(frozen=True, order=True)
class CheckpointName:
    """`step-000000042`; saved again at the same step, `step-000000042.2`. Sorts by step, then revision."""

    step: int
    revision: int = 1

    def __str__(self) -> str:
        suffix = "" if self.revision == 1 else f".{self.revision}"
        return f"step-{self.step:09d}{suffix}"

    @classmethod
    def parse(cls, name: str) -> CheckpointName | None:
        """The checkpoint that `name` names; None if it names none."""
        match = _CHECKPOINT_NAME.fullmatch(name)
        if match is None:
            return None
        parsed = cls(int(match[1]), int(match[2] or 1))
        return parsed if str(parsed) == name else None


@dataclass(frozen=True)
class FileRecord:
    """What one file of a checkpoint must be."""

    num_bytes: int
    sha256: str


@dataclass(frozen=True)
class Manifest:
    """The files of a checkpoint, by name. It is written last, and holds nothing that it does not check."""

    files: Mapping[str, FileRecord]

    def to_json(self) -> bytes:
        files = {name: {"bytes": r.num_bytes, "sha256": r.sha256} for name, r in self.files.items()}
        return dump_json({"format": FORMAT, "version": VERSION, "files": files}, indent=1)

    @classmethod
    def from_json(cls, data: bytes, where: str) -> Manifest:
        """The manifest that `data` is.

        Raises:
            CheckpointCorruptError: it is none, is of another version, or names a file that cannot be one.
        """
        content = parse_json(data, where)
        if not isinstance(content, dict) or content.get("format") != FORMAT:
            raise CheckpointCorruptError(f"{where} is not the manifest of a samestep checkpoint")
        version = content.get("version")
        if version != VERSION or isinstance(version, bool):
            raise CheckpointCorruptError(
                f"{where} is of version {version!r} and this samestep reads version {VERSION}: load it with "
                "the samestep that wrote it"
            )
        files = content.get("files")
        if set(content) != {"format", "version", "files"} or not isinstance(files, dict):
            raise CheckpointCorruptError(f"{where} is altered: its fields are not format, version and files")
        records = {name: _record(name, value, where) for name, value in files.items()}
        if STATE not in records:
            raise CheckpointCorruptError(f"{where} is altered: it does not list {STATE}")
        return cls(records)


def _record(name: str, value: Any, where: str) -> FileRecord:
    if _FILE_NAME.fullmatch(name) is None or name == MANIFEST:
        raise CheckpointCorruptError(f"{where} lists {name!r}, which is not the name of a checkpoint's file")
    if isinstance(value, dict) and set(value) == {"bytes", "sha256"}:
        num_bytes, sha256 = value["bytes"], value["sha256"]
        if (
            type(num_bytes) is int
            and num_bytes >= 0
            and isinstance(sha256, str)
            and _SHA256.fullmatch(sha256) is not None
        ):
            return FileRecord(num_bytes, sha256)
    raise CheckpointCorruptError(f"{where} is altered: the record of {name!r} is not a size and a sha256")


def tensors_file(entry: str) -> str:
    """The name of the file that holds an entry's tensors."""
    return f"{entry}.safetensors"


def check_entry_names(names: list[object]) -> None:
    """Raise a `CheckpointError` unless each of `names` can name a file, also where case does not count."""
    seen: dict[str, object] = {}
    for name in names:
        if not isinstance(name, str) or _ENTRY_NAME.fullmatch(name) is None:
            raise CheckpointError(
                f"state has an entry {name!r}: names are 1 to 64 letters, digits, '_', '-' and '.', and "
                "start with a letter, a digit or '_'"
            )
        other = seen.setdefault(name.lower(), name)
        if other != name:
            raise CheckpointError(
                f"state has entries {other!r} and {name!r}, which differ only in case: rename one of them"
            )


def dump_json(value: Any, *, indent: int | None = None) -> bytes:
    """`value` as JSON in ASCII."""
    separators = (",", ":") if indent is None else None
    return json.dumps(value, allow_nan=False, indent=indent, separators=separators).encode("ascii")


def parse_json(data: bytes, where: str) -> Any:
    """What `data` says; keys that come twice, NaN and Infinity are refused.

    Raises:
        CheckpointCorruptError: it is not such JSON.
    """
    try:
        return json.loads(data.decode("utf-8"), object_pairs_hook=_no_duplicates, parse_constant=_no_constant)
    except (ValueError, RecursionError) as error:
        reason = "nested too deeply" if isinstance(error, RecursionError) else error
        raise CheckpointCorruptError(f"{where} is truncated or altered: not valid JSON ({reason})") from None


def _no_duplicates(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    result = dict(pairs)
    if len(result) != len(pairs):
        raise ValueError("a key comes twice")
    return result


def _no_constant(text: str) -> None:
    raise ValueError(f"{text} is not JSON")
