"""A script sees what plain python, or torchrun, would show it."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from launcher import launch, run, script

LOOK = """
    import json, pickle, __main__
    class Thing:
        def __eq__(self, other): return type(self) is type(other)
    def child(queue): queue.put(__name__)
    if __name__ == "__main__":
        seen = dict(
            argv=sys.argv, path=sys.path[0], name=__name__, file=__file__, package=__package__,
            spec=__spec__ and __spec__.name, doc=__doc__, loader=type(__loader__).__name__,
            cached=bool(__cached__), is_main=__main__.Thing is Thing,
            pickled=pickle.loads(pickle.dumps(Thing())) == Thing(),
            names=sorted(name for name in globals() if name.startswith("__")),
        )
        import multiprocessing
        context = multiprocessing.get_context("spawn")
        queue = context.SimpleQueue()
        if not __file__.endswith("__main__.py"):  # those cannot be spawned from, says multiprocessing
            process = context.Process(target=child, args=(queue,))
            process.start()
            seen["child"] = queue.get()
            process.join()
            seen["exitcode"] = process.exitcode
        print("seen " + json.dumps(seen))
"""


def look(text: str) -> object:
    return json.loads(text.partition("seen ")[2].partition("\n")[0])


@pytest.mark.parametrize(
    "arguments",
    [["script.py", "a"], ["sub/script.py"], ["./sub/../script.py"], ["-m", "pkg.mod", "-x"], ["-m", "pkg"]],
    ids=" ".join,
)
def test_as_under_python(tmp_path: Path, arguments: list[str]) -> None:
    for name in ("script.py", "sub/script.py", "pkg/mod.py", "pkg/__main__.py"):
        script(tmp_path, LOOK, name)
    (tmp_path / "pkg" / "__init__.py").write_text("")
    environment = {k: v for k, v in os.environ.items() if k != "PYTHONSAFEPATH"}
    plain = subprocess.run(
        [sys.executable, *arguments],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=20,
        env=environment,
    )
    launched = run(tmp_path, "run", *arguments)
    assert (launched.status, launched.stderr) == (0, "")
    assert look(launched.stdout) == look(plain.stdout)


def test_environment_is_torchruns_and_a_few_more(tmp_path: Path) -> None:
    script(tmp_path, "import json; print('seen ' + json.dumps(dict(os.environ)))")
    with launch(
        tmp_path,
        "--standalone",
        "--nproc-per-node=2",
        "--redirects=3",
        "--log-dir=torchrun",
        "script.py",
        main="launcher:torchrun",
        name="torchrun",
    ) as launched:
        assert launched.wait() == 0
    theirs = look(next(iter(tmp_path.glob("torchrun/*/attempt_0/0/stdout.log"))).read_text())
    ours_text = run(tmp_path, "run", "--nproc", "2", "script.py").stdout
    ours = look(next(line for line in ours_text.splitlines() if line.startswith("[rank 0]")))
    assert isinstance(theirs, dict)
    assert isinstance(ours, dict)
    # Which signals torchrun's own agent takes: nothing for a script.
    assert set(theirs) - set(ours) == {"TORCHELASTIC_SIGNALS_TO_HANDLE"}
    assert set(ours) - set(theirs) == {
        "GLOO_SOCKET_IFNAME",
        "MALLOC_MMAP_THRESHOLD_",
        "MALLOC_TRIM_THRESHOLD_",
        "PYTHONUNBUFFERED",
        "SAMESTEP_PROGRESS",
    }
    differing = {name for name in set(ours) & set(theirs) if ours[name] != theirs[name]}
    assert differing <= {
        "MASTER_ADDR",
        "MASTER_PORT",
        "OMP_NUM_THREADS",
        "TORCHELASTIC_ERROR_FILE",
        "TORCHELASTIC_RUN_ID",
    }
    assert ours["MASTER_ADDR"] == "127.0.0.1"
    assert ours["OMP_NUM_THREADS"] == str(max(1, len(os.sched_getaffinity(0)) // 2))


def test_the_users_variables_win(tmp_path: Path) -> None:
    script(tmp_path, "print(os.environ['OMP_NUM_THREADS'], os.environ['GLOO_SOCKET_IFNAME'])")
    launched = run(tmp_path, "run", "--nproc", "2", "script.py", OMP_NUM_THREADS="3", GLOO_SOCKET_IFNAME="x0")
    assert sorted(launched.stdout.splitlines()) == ["[rank 0] 3 x0", "[rank 1] 3 x0"]
    assert launched.stderr == ""
