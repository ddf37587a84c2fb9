"""Start of every rank: run the user's script as `__main__`, and leave word of an exception for the launcher.

    python -m samestep.launch.worker LAUNCHER_PID script train.py args...
    python -m samestep.launch.worker LAUNCHER_PID module package.train args...

The script sees what plain `python train.py args...` would show it. An exception that it does not catch is
written to the file that TORCHELASTIC_ERROR_FILE names, in torchelastic's layout, so no decorator is
needed; the launcher prints it. Only the standard library is imported here, and as little as can be.
"""

from __future__ import annotations

import atexit
import contextlib
import importlib.machinery
import importlib.util
import io
import json
import os
import signal
import sys
import time
import traceback
from types import CodeType, ModuleType, TracebackType
from typing import Any, NoReturn

_PR_SET_PDEATHSIG = 1


def main() -> None:
    """Run the script or module that the command line names; return only if it succeeded."""
    launcher_pid, kind, target, *arguments = sys.argv[1:]
    _end_with(int(launcher_pid))
    try:
        signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGINT})
        code = _become_module(target, arguments) if kind == "module" else _become_script(target, arguments)
        exec(code, sys.modules["__main__"].__dict__)
    except SystemExit as request:
        exit_code = _exit_code_of(request)
        if exit_code == 0:
            raise
        _record(request, exit_code)
        if not isinstance(request.code, int):
            print(request.code, file=sys.stderr)  # noqa: T201  # as the interpreter does
        _leave(exit_code)
    except KeyboardInterrupt as interrupt:
        _record(interrupt, -signal.SIGINT)
        _run_exit_functions()
        signal.signal(signal.SIGINT, signal.SIG_DFL)
        os.kill(os.getpid(), signal.SIGINT)
    except BaseException as error:
        _record(error, 1)
        _call_users_hook(error)
        _leave(1)


def _end_with(launcher_pid: int) -> None:
    """This process is killed when the launcher dies, even by SIGKILL (Linux only)."""
    if sys.platform == "linux":
        import ctypes

        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
        if os.getppid() != launcher_pid:  # it died before the line above
            os.kill(os.getpid(), signal.SIGKILL)


def _become_script(path: str, arguments: list[str]) -> CodeType:
    sys.argv = [path, *arguments]
    path = os.path.join(os.getcwd(), path)  # noqa: PTH109, PTH118  # pathlib: 10 ms
    _set_first_path(os.path.dirname(os.path.realpath(path)))  # noqa: PTH120
    main_module = _new_main()
    main_module.__file__ = path
    main_module.__loader__ = importlib.machinery.SourceFileLoader("__main__", path)
    with io.open_code(path) as file:
        source = file.read()
    return compile(source, path, "exec", dont_inherit=True)


def _become_module(name: str, arguments: list[str]) -> CodeType:
    sys.argv = ["-m", *arguments]
    _set_first_path(os.getcwd())  # noqa: PTH109
    spec = importlib.util.find_spec(name)
    if spec is not None and spec.submodule_search_locations is not None:
        name = f"{name}.__main__"
        spec = importlib.util.find_spec(name)
    get_code = getattr(spec.loader, "get_code", None) if spec is not None else None
    code = get_code(name) if get_code is not None else None
    if spec is None or code is None:
        raise ModuleNotFoundError(f"no module named {name!r} that can be run", name=name)
    main_module = _new_main()
    main_module.__spec__ = spec
    main_module.__package__ = spec.parent
    main_module.__loader__ = spec.loader
    main_module.__file__ = spec.origin
    main_module.__dict__["__cached__"] = spec.cached
    sys.argv[0] = spec.origin or name
    assert isinstance(code, CodeType)
    return code


def _new_main() -> ModuleType:
    """A fresh `__main__` in place of this file, so that pickling and multiprocessing find the script."""
    module = ModuleType("__main__")
    module.__dict__.update(__builtins__=sys.modules["builtins"], __annotations__={}, __cached__=None)
    sys.modules["__main__"] = module
    return module


def _set_first_path(folder: str) -> None:
    # `python -m` put the working directory first, where a script has its own folder.
    if not getattr(sys.flags, "safe_path", False):
        sys.path[0] = folder


def _exit_code_of(request: SystemExit) -> int:
    if request.code is None:
        return 0
    if isinstance(request.code, int):
        return request.code & 0xFF
    return 1


def _record(error: BaseException, exit_code: int) -> None:
    """Write the error file, whole or not at all: the launcher may read it at any moment."""
    path = os.environ.get("TORCHELASTIC_ERROR_FILE")
    if not path:
        return
    now_s = time.time()
    error.__traceback__ = _users_part(error.__traceback__)
    try:
        text = "".join(traceback.format_exception(type(error), error, error.__traceback__))
        last_line = "".join(traceback.format_exception_only(type(error), error)).rstrip().rpartition("\n")[2]
    except Exception:  # a __str__ or __repr__ that fails must not hide the failure itself
        last_line = type(error).__name__
        text = "".join(traceback.format_tb(error.__traceback__)) + last_line + "\n"
    data = {
        "message": {
            "message": last_line,
            "extraInfo": {"py_callstack": text, "timestamp": str(int(now_s))},
        },
        "samestep": {"time_s": now_s, "exit_code": exit_code, "exception": type(error).__name__},
    }
    with contextlib.suppress(OSError):
        with open(f"{path}.part", "w", encoding="utf-8", errors="backslashreplace") as file:  # noqa: PTH123
            json.dump(data, file)
        os.replace(f"{path}.part", path)  # noqa: PTH105


def _users_part(frames: TracebackType | None) -> TracebackType | None:
    while frames is not None and frames.tb_frame.f_code.co_filename == __file__:
        frames = frames.tb_next
    return frames


def _call_users_hook(error: BaseException) -> None:
    """Call `sys.excepthook` if the script set one; the interpreter's and torch's only print."""
    hook: Any = sys.excepthook
    while getattr(hook, "__module__", None) == "torch.distributed.distributed_c10d":
        # torch's only puts the rank before each line of what the hook before it prints.
        kept = dict(zip(hook.__code__.co_freevars, hook.__closure__ or (), strict=False))
        hook = kept["old_hook"].cell_contents if "old_hook" in kept else None
    if hook is None or hook is sys.__excepthook__:
        return
    try:
        hook(type(error), error, error.__traceback__)
    except BaseException:
        print("Error in sys.excepthook:", file=sys.stderr)  # noqa: T201
        traceback.print_exc()


def _run_exit_functions() -> None:
    with contextlib.suppress(BaseException):
        atexit._run_exitfuncs()
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(BaseException):
            stream.flush()


def _leave(exit_code: int) -> NoReturn:
    # An exiting interpreter can block for minutes: it joins threads, and Gloo's destructor waits for
    # collectives in flight. The other ranks wait for this one to be gone.
    _run_exit_functions()
    os._exit(exit_code)


if __name__ == "__main__":
    main()
