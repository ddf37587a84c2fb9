"""What the command line shows of a checkpoint: `samestep verify` and `samestep checkpoint show|verify`."""

from __future__ import annotations

from pathlib import Path

from rich.console import Console
from rich.markup import escape
from rich.table import Table

from samestep.checkpoint.difference import compare
from samestep.checkpoint.encoding import Reference, references
from samestep.checkpoint.reader import Reader, find_checkpoint
from samestep.errors import CheckpointCorruptError

__all__ = ["print_comparison", "print_tensors", "print_verdict"]


def print_comparison(one: Path, other: Path) -> bool:
    """Say whether `one` and `other` are the same, and where they are not; True if they are.

    Raises:
        CheckpointError: one of them cannot be read.
    """
    comparison = compare(one, other)
    if comparison.first is None:
        _say(f"the same: {comparison.num_tensors} tensors, {human_bytes(comparison.num_bytes)}, bit by bit")
        return True
    more = f"\nand {comparison.num_more} more tensors or values differ" if comparison.num_more else ""
    _say(f"{comparison.first}{more}")
    return False


def print_tensors(path: Path) -> None:
    """A table of a checkpoint's tensors, from its headers: digests of tensors are not checked here.

    Raises:
        CheckpointError: there is none, or its manifest, state or headers make no sense.
    """
    reader = Reader(find_checkpoint(path))
    reader.open()
    table = Table("tensor", "dtype", "shape", title=escape(str(reader.path)))
    table.add_column("bytes", justify="right")
    total = num_tensors = 0
    plain = []
    for name, entry in reader.entries.items():
        found = references(entry["value"])
        if not found:
            plain.append(name)
            continue
        places = reader.places(name)
        seen: set[str] = set()
        for reference in found:
            dtype, shape, num_bytes = _describe(reference, places, reader)
            is_again = reference.name in seen
            seen.add(reference.name)
            total += 0 if is_again else num_bytes
            num_tensors += 1
            label = _printable("/".join((name, *reference.path)))
            size = f"{'= ' if is_again else ''}{num_bytes:,}"
            table.add_row(escape(label), dtype, escape(str(shape)), size)
    others = f"; without tensors: {', '.join(plain)}" if plain else ""
    table.caption = escape(
        f"step {reader.step}, saved by {reader.world_size} rank(s); {num_tensors} tensors, "
        f"{human_bytes(total)}{others}"
    )
    Console().print(table)


def print_verdict(path: Path) -> bool:
    """Check every digest and value of a checkpoint and say what came of it; True if all is as saved.

    Raises:
        CheckpointError: there is none to check, or it cannot be read.
    """
    reader = Reader(find_checkpoint(path))
    try:
        reader.open()
        for name in reader.entries:
            reader.read([name])
        reader.read_random()
        reader.check_other_files()
    except CheckpointCorruptError as error:
        _say(str(error))
        return False
    num_bytes = sum(record.num_bytes for record in reader.files.values())
    _say(f"{reader.path} is as it was saved: {len(reader.files)} files, {human_bytes(num_bytes)}")
    return True


def human_bytes(num_bytes: int) -> str:
    """`num_bytes` for people."""
    number, units = float(num_bytes), ["bytes", "KB", "MB", "GB", "TB"]
    while number >= 1000 and len(units) > 1:
        number, units = number / 1000, units[1:]
    return f"{num_bytes} bytes" if units[0] == "bytes" else f"{number:.1f} {units[0]}"


def _describe(
    reference: Reference, places: dict[str, tuple[str, list[int], int]], reader: Reader
) -> tuple[str, list[int], int]:
    try:
        dtype, shape, num_bytes = places[reference.name]
    except KeyError as error:
        raise CheckpointCorruptError(f"{reader.path} is altered: it lacks the tensor {error}") from None
    shape = shape if reference.shape is None else list(reference.shape)
    return reference.dtype or dtype, shape, num_bytes


def _say(text: str) -> None:
    Console(soft_wrap=True, highlight=False, markup=False).print(_printable(text, keep="\n"))


def _printable(text: str, keep: str = "") -> str:
    """`text` as a terminal may be given it: names from files could hold sequences that it obeys."""
    return "".join(c if c.isprintable() or c in keep else ascii(c)[1:-1] for c in text)
