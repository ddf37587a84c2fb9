"""What `samestep run` was asked for, checked before anything is started. No torch here."""

from __future__ import annotations

import importlib.util
import math
import re
import sys
import uuid
from dataclasses import dataclass
from pathlib import Path

from samestep.errors import LaunchError

DEFAULT_PORT = 29400  # torchelastic's own

# Device files of accelerators. Only when there are some is it worth asking torch, which costs its import.
_DEVICE_FILES = ("nvidia[0-9]*", "kfd", "dxg", "dri/renderD*", "accel*", "davinci[0-9]*", "habana*")


@dataclass(frozen=True)
class RunOptions:
    """One launcher's part of a run."""

    target: str  # the script's path or the module's name
    arguments: tuple[str, ...] = ()
    is_module: bool = False
    num_ranks: int = 1  # on this host
    min_hosts: int = 1
    max_hosts: int = 1
    rdzv_endpoint: str | None = None  # HOST:PORT
    rdzv_id: str | None = None
    max_restarts: int = 0
    log_dir: Path | None = None
    grace_s: float = 30.0  # between SIGTERM and SIGKILL

    def __post_init__(self) -> None:
        if self.num_ranks < 1:
            raise LaunchError(f"--nproc {self.num_ranks}: at least one process is needed")
        if self.max_restarts < 0:
            raise LaunchError(f"--max-restarts {self.max_restarts}: give 0 or more")
        if not 0 <= self.grace_s < math.inf:
            raise LaunchError(f"--grace {self.grace_s}: give a number of seconds from 0")
        if self.max_hosts > 1 and self.rdzv_endpoint is None:
            raise LaunchError(
                "--nnodes needs --rdzv-endpoint HOST:PORT, the same on every host: "
                "one of the hosts and a free port on it"
            )
        if self.rdzv_id == "":
            raise LaunchError("--rdzv-id is empty: give a name that all hosts of the run share")
        check_target(self.target, is_module=self.is_module)
        if self.log_dir is not None and self.log_dir.exists() and not self.log_dir.is_dir():
            raise LaunchError(f"--log-dir {self.log_dir} is not a directory")

    @property
    def is_one_host(self) -> bool:
        """Whether no other host can take part."""
        return self.rdzv_endpoint is None

    @property
    def run_id(self) -> str:
        """The run's name: `rdzv_id`, or one that all hosts take, or on one host a new one each time."""
        return self.rdzv_id or (uuid.uuid4().hex if self.is_one_host else "samestep")

    @property
    def command(self) -> tuple[str, ...]:
        """What `samestep.launch.worker` needs to know: kind, target, arguments."""
        return ("module" if self.is_module else "script", self.target, *self.arguments)


def check_target(target: str, *, is_module: bool) -> None:
    """Return if there is such a script or module; a module's parent packages are not imported for it.

    Raises:
        LaunchError: there is none, or it cannot be one.
    """
    if is_module:
        top = target.partition(".")[0]
        if not all(part.isidentifier() for part in target.split(".")):
            raise LaunchError(f"-m {target}: this is not a module's name, such as package.train")
        if top not in sys.modules and not (Path(top).is_dir() or Path(f"{top}.py").is_file()):
            try:
                found = importlib.util.find_spec(top) is not None
            except (ImportError, ValueError):
                found = False
            if not found:
                raise LaunchError(f"-m {target}: there is no module {top!r} here or among those installed")
        return
    path = Path(target)
    if path.is_dir():
        raise LaunchError(f"{target} is a directory: name the script in it, or use -m for a package")
    if not path.exists():
        raise LaunchError(f"there is no script {target}")
    try:
        path.open("rb").close()
    except OSError as error:
        raise LaunchError(f"the script {target} cannot be read: {error.strerror}") from None


def parse_nnodes(text: str) -> tuple[int, int]:
    """(fewest, most) hosts of `MIN` or `MIN:MAX`.

    Raises:
        LaunchError: the text is neither, or MIN is not in 1..MAX.
    """
    match = re.fullmatch(r"([0-9]{1,9})(?::([0-9]{1,9}))?", text)
    fewest, most = (int(match[1]), int(match[2] or match[1])) if match else (0, 0)
    if not 1 <= fewest <= most:
        raise LaunchError(f"--nnodes {text}: give a number of hosts such as 2, or a range such as 2:4")
    return fewest, most


def parse_endpoint(text: str) -> tuple[str, int]:
    """(host, port) of `HOST`, `HOST:PORT` or `[IPV6]:PORT`; the port is 29400 when it is not given.

    Raises:
        LaunchError: the host is missing or the port is not in 1..65535.
    """
    match = re.fullmatch(r"(?:\[([^\[\]]+)\]|([^:\[\]\s]+))(?::([0-9]{1,5}))?", text)
    port = int(match[3] or DEFAULT_PORT) if match else 0
    if match is None or not 1 <= port <= 65535:
        raise LaunchError(f"--rdzv-endpoint {text}: give HOST:PORT, such as node01:29400")
    return match[1] or match[2], port


def resolve_nproc(text: str) -> int:
    """The number of ranks on this host that `--nproc` asks for.

    `auto` is one per GPU; a host without any is one device, the CPU, and gets one rank, which uses all of
    its cores. `cpu` is one per core that this process may use, `gpu` is one per GPU.

    Raises:
        LaunchError: it is neither a number from 1 nor one of these words, or `gpu` finds none.
    """
    if text == "cpu":
        from samestep.environment import num_usable_cores

        return num_usable_cores()
    if text == "auto":
        return max(1, _num_gpus())
    if text == "gpu":
        count = _num_gpus()
        if count == 0:
            raise LaunchError(
                "--nproc gpu: no GPU is visible to torch here; use --nproc N to train on the CPU"
            )
        return count
    if not re.fullmatch(r"[0-9]{1,6}", text) or int(text) < 1:
        raise LaunchError(f"--nproc {text}: give a number from 1, or one of auto, gpu and cpu")
    return int(text)


def _num_gpus() -> int:
    devices = Path("/dev")
    if sys.platform == "linux" and not any(next(devices.glob(p), None) for p in _DEVICE_FILES):
        return 0
    import torch

    if torch.accelerator.current_accelerator(check_available=True) is None:
        return 0
    return torch.accelerator.device_count()
