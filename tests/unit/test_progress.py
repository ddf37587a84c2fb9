"""`samestep.progress`: what a person writes, and what they see where nobody draws for them."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

import samestep
from samestep.observe import messages
from samestep.observe.messages import BarState
from samestep.observe.render import bar_table, plain_line


@pytest.fixture(autouse=True)
def _no_launcher(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("RANK", "WORLD_SIZE", messages.LISTENING_VARIABLE):
        monkeypatch.delenv(name, raising=False)


def test_items_pass_and_the_last_state_is_printed(capsys: pytest.CaptureFixture[str]) -> None:
    bar = samestep.progress([10, 20, 30], description="epoch 1")
    assert len(bar) == 3
    seen = []
    for item in bar:
        seen.append(item)
        bar.show(loss=torch.tensor(0.123456), note="ok", count=3)
    assert seen == [10, 20, 30]
    out, err = capsys.readouterr()
    assert out == ""
    assert err.startswith("epoch 1: 3/3 (100 %), loss 0.1235, note ok, count 3, 0:00")
    assert err.count("\n") == 1


def test_other_ranks_are_silent(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in {"RANK": "1", "WORLD_SIZE": "2", "MASTER_PORT": "1"}.items():
        monkeypatch.setenv(name, value)
    bar = samestep.progress(range(5))
    for _ in bar:
        bar.show(loss=object())
    assert bar.done == 5
    assert capsys.readouterr() == ("", "")


def test_length_is_found_where_there_is_one() -> None:
    class Stream:
        def __iter__(self) -> Iterator[int]:
            return iter(range(3))

        def __len__(self) -> int:
            raise TypeError("a stream has no length")

    assert samestep.progress(range(7)).total == 7
    assert samestep.progress(iter([1, 2])).total == 2
    assert samestep.progress(i for i in range(3)).total is None
    assert list(samestep.progress(Stream())) == [0, 1, 2]
    assert samestep.progress(range(7), total=3).total == 3
    with pytest.raises(TypeError, match="does not know its length"):
        len(samestep.progress(i for i in range(3)))


def test_by_hand(capsys: pytest.CaptureFixture[str]) -> None:
    with samestep.progress(total=10, description="files") as bar:
        bar.advance(4)
        bar.advance()
    bar.advance()  # after the end: nothing is shown
    assert "files: 5/10 (50 %)" in capsys.readouterr().err


def test_a_loop_that_is_left_shows_how_far_it_came(capsys: pytest.CaptureFixture[str]) -> None:
    bar = samestep.progress(range(10))
    for item in bar:
        if item == 4:
            break
    bar.close()
    assert "4/10 (40 %)" in capsys.readouterr().err


def test_a_listening_launcher_is_sent_messages(
    capfdbinary: pytest.CaptureFixture[bytes], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(messages.LISTENING_VARIABLE, "1")
    for _ in samestep.progress(range(1000), description="d"):
        pass
    sent = capfdbinary.readouterr().err.split(messages.END)
    states = [messages.decode(message.removeprefix(messages.START)) for message in sent if message]
    assert len(states) < 100  # ten a second, however fast the loop
    last = states[-1]
    assert last is not None
    assert (last.done, last.total, last.finished, last.description) == (1000, 1000, True, "d")


def test_looks() -> None:
    from rich.console import Console

    state = BarState("b", "epoch 2", done=30, total=120, elapsed_s=60.0, figures={"loss": "0.5"})
    assert plain_line(state) == "epoch 2: 30/120 (25 %), loss 0.5, 1:00, 3:00 to go, 0.5 a second"
    assert plain_line(BarState("b", done=7)) == "7, 0:00"
    assert plain_line(BarState("b", done=0, total=0, elapsed_s=3700.0)) == "0/0, 1:01:40"
    console = Console(width=120, record=True, file=None, quiet=False)
    with console.capture() as capture:
        console.print(bar_table([state, BarState("c", "[red]not markup", done=1)]))
    shown = capture.get()
    assert "epoch 2" in shown
    assert "30/120" in shown
    assert "[red]not markup" in shown
