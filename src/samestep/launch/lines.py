"""A rank's byte stream -> whole lines and progress messages (pure)."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass

from samestep.observe import messages

MAX_LINE_BYTES = 16 * 2**20

_STOP = re.compile(rb"[\r\n]|" + re.escape(messages.START))


@dataclass(frozen=True)
class Line:
    """One line without its end. If `is_overwritten`, a terminal shows the next line in its place."""

    text: bytes
    is_overwritten: bool = False


class LineCutter:
    """Cuts what a stream delivers, in whatever pieces, into lines and progress messages.

    Bytes are kept as they are, valid UTF-8 or not. A line longer than `MAX_LINE_BYTES` comes in parts.
    """

    def __init__(self) -> None:
        self._held = bytearray()  # the line whose end has not come yet
        self._searched = 0  # no stop begins before this place in it

    def feed(self, data: bytes) -> Iterator[Line | messages.BarState]:
        """The lines and messages that `data` completes."""
        self._held += data
        while (stop := _STOP.search(self._held, self._searched)) is not None:
            self._searched = stop.start()
            if stop.group() == messages.START:
                end = self._message_end(stop.end())
                if end is None:
                    break
                message = messages.decode(bytes(self._held[stop.end() : end]))
                if end == stop.end():  # text that only looked like a message
                    self._searched = end
                    continue
                del self._held[stop.start() : end + len(messages.END)]
                if message is not None:
                    yield message
            elif stop.group() == b"\n":
                yield self._cut(stop.start(), 1)
            elif stop.end() == len(self._held):  # is a line feed to come, or an overwriting line?
                break
            elif self._held[stop.end()] == 0x0A:
                yield self._cut(stop.start(), 2)
            else:
                yield self._cut(stop.start(), 1, is_overwritten=True)
        else:
            # What is left may end with the first bytes of a message.
            self._searched = max(self._searched, len(self._held) - len(messages.START) + 1)
        while len(self._held) > MAX_LINE_BYTES:
            yield self._cut(MAX_LINE_BYTES, 0)

    def flush(self) -> Iterator[Line]:
        """The last line if it has no end; call it when the stream has ended."""
        text = bytes(self._held).removesuffix(b"\r")
        self._held.clear()
        self._searched = 0
        if text:
            yield Line(text)

    def _cut(self, end: int, num_end_bytes: int, *, is_overwritten: bool = False) -> Line:
        text = bytes(self._held[:end])
        del self._held[: end + num_end_bytes]
        self._searched = 0
        return Line(text, is_overwritten)

    def _message_end(self, start: int) -> int | None:
        """Where the message that starts at `start` ends; None: not here yet; `start`: it is none."""
        end = self._held.find(messages.END, start, start + messages.MAX_BYTES)
        newline = self._held.find(b"\n", start, end if end >= 0 else start + messages.MAX_BYTES)
        if newline >= 0:
            return start
        if end >= 0:
            return max(start, end)
        return None if len(self._held) - start < messages.MAX_BYTES else start
