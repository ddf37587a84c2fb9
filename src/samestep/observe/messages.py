"""How a rank tells the launcher of its progress: JSON in an escape sequence of its standard error.

The sequence is an *application program command* (APC), `ESC _ ... ESC \\`, which terminals do not show. A
rank sends it only when the launcher has said, in an environment variable, that it listens; the launcher
takes it out of the stream. The other end of the stream is never trusted: what does not parse is dropped.
"""

from __future__ import annotations

import json
import math
from dataclasses import asdict, dataclass, field

LISTENING_VARIABLE = "SAMESTEP_PROGRESS"
START = b"\x1b_samestep:"
END = b"\x1b\\"
MAX_BYTES = 4096  # PIPE_BUF: a write up to this size is never mixed with another thread's

_MAX_TEXT = 200
_MAX_FIGURES = 12


@dataclass(frozen=True)
class BarState:
    """The state of one progress bar."""

    bar: str  # names the bar among all of its run
    description: str = ""
    done: int = 0
    total: int | None = None
    elapsed_s: float = 0.0
    figures: dict[str, str] = field(default_factory=dict)
    finished: bool = False


def encode(state: BarState) -> bytes:
    """The escape sequence that carries `state`; long texts are cut to fit."""
    figures = {k[:40]: v[:40] for k, v in list(state.figures.items())[:_MAX_FIGURES]}
    payload = asdict(state) | {"description": state.description[:_MAX_TEXT], "figures": figures}
    data = START + json.dumps(payload).encode("ascii") + END  # json escapes ESC itself
    return data if len(data) <= MAX_BYTES else encode(BarState(state.bar, done=state.done))


def decode(payload: bytes) -> BarState | None:
    """The `BarState` between `START` and `END`; None if this is not one."""
    try:
        data = json.loads(payload)
    except (ValueError, RecursionError):
        return None
    if not isinstance(data, dict):
        return None
    bar, total, figures = data.get("bar"), data.get("total"), data.get("figures", {})
    done, elapsed_s = data.get("done", 0), data.get("elapsed_s", 0.0)
    if not isinstance(bar, str) or not _is_count(done) or not (total is None or _is_count(total)):
        return None
    if (
        not isinstance(elapsed_s, int | float)
        or not math.isfinite(elapsed_s)
        or not isinstance(figures, dict)
    ):
        return None
    return BarState(
        bar=bar,
        description=_clean(data.get("description", "")),
        done=done,
        total=total,
        elapsed_s=max(0.0, float(elapsed_s)),
        figures={_clean(name): _clean(value) for name, value in list(figures.items())[:_MAX_FIGURES]},
        finished=bool(data.get("finished")),
    )


def _is_count(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and 0 <= value < 2**63


def _clean(value: object) -> str:
    """Text that cannot move the cursor or break a line."""
    return "".join(c if c.isprintable() else " " for c in str(value)[:_MAX_TEXT])
