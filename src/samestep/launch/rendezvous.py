"""How the launchers of a run find each other: torchelastic's c10d rendezvous, or, on one host, not at all."""

from __future__ import annotations

import socket
import time
from datetime import timedelta
from typing import Any

from torch.distributed import TCPStore
from torch.distributed.elastic.rendezvous import RendezvousError, RendezvousHandler, RendezvousParameters
from torch.distributed.elastic.rendezvous.api import RendezvousInfo, RendezvousStoreInfo
from torch.distributed.elastic.rendezvous.c10d_rendezvous_backend import create_backend
from torch.distributed.elastic.rendezvous.dynamic_rendezvous import DynamicRendezvousHandler

from samestep.errors import LaunchError
from samestep.launch.loopback import LOOPBACK, listen
from samestep.launch.options import RunOptions, parse_endpoint

_ENDPOINT_PATIENCE_S = 600.0  # as long as torchelastic waits for hosts to join


class OneHost(RendezvousHandler):
    """A world of one host: nobody to wait for, only a store for the ranks, which listens on loopback."""

    def __init__(self, run_id: str, listener: socket.socket) -> None:
        self._run_id = run_id
        self._listener: socket.socket | None = listener
        self._is_closed = False

    def next_rendezvous(self) -> RendezvousInfo:
        """A new store for each attempt: what an earlier one left in it would mislead the ranks."""
        listener, self._listener = self._listener or listen(), None
        port = listener.getsockname()[1]
        store = TCPStore(
            LOOPBACK,
            port,
            is_master=True,
            wait_for_workers=False,
            timeout=timedelta(minutes=1),
            master_listen_fd=listener.detach(),
        )
        return RendezvousInfo(store, 0, 1, RendezvousStoreInfo(LOOPBACK, port))

    @property
    def use_agent_store(self) -> bool:
        """Whether the ranks are clients of this store."""
        return True

    def get_backend(self) -> str:
        """The name of the mechanism."""
        return "loopback"

    def is_closed(self) -> bool:
        """Whether the run is over."""
        return self._is_closed

    def set_closed(self) -> None:
        """The run is over."""
        self._is_closed = True

    def num_nodes_waiting(self) -> int:
        """Hosts that would join if the ranks were started anew."""
        return 0

    def get_run_id(self) -> str:
        """The run's name."""
        return self._run_id

    def shutdown(self) -> bool:
        """Close; nothing is left open."""
        if self._listener is not None:
            self._listener.close()
            self._listener = None
        self._is_closed = True
        return True


class ManyHosts(DynamicRendezvousHandler):
    """torchelastic's own, with a new store for each attempt."""

    holds_store = False  # whether the store at the endpoint is this launcher's: then it leaves last

    def next_rendezvous(self) -> RendezvousInfo:
        """As torchelastic's. It would keep the first attempt's store, whose keys mislead the next ranks."""
        self._shared_tcp_store_server = None
        self._bootstrap_store_info = None
        return super().next_rendezvous()


def many_hosts(options: RunOptions, run_id: str) -> ManyHosts:
    """The rendezvous at `options.rdzv_endpoint`; a launcher on that host holds its store.

    Raises:
        LaunchError: the endpoint cannot be reached.
    """
    assert options.rdzv_endpoint is not None
    host, port = parse_endpoint(options.rdzv_endpoint)
    own_address, is_here = _own_address(host, port)
    fewest, most = options.min_hosts, options.max_hosts
    for is_host in [True, False] if is_here else [False]:
        if not is_host:
            _wait_until_it_answers(host, port)
        parameters: dict[str, Any] = {"run_id": run_id, "min_nodes": fewest, "max_nodes": most}
        try:
            backend, store = create_backend(
                RendezvousParameters("c10d", f"{host}:{port}", is_host=is_host, **parameters)
            )
            break
        except RendezvousError as error:
            if is_host:  # another launcher of this host was faster
                continue
            reason = str(error.__cause__ or error).splitlines()[0]
            raise LaunchError(f"--rdzv-endpoint {options.rdzv_endpoint}: {reason}") from None
    handler = ManyHosts.from_backend(run_id, store, backend, fewest, most, local_addr=own_address)
    assert isinstance(handler, ManyHosts)
    handler.holds_store = is_host
    return handler


def _own_address(endpoint_host: str, port: int) -> tuple[str, bool]:
    """The address at which the other hosts reach this one, and whether the endpoint is on this host."""
    try:
        family, kind, _, _, address = socket.getaddrinfo(endpoint_host, port, type=socket.SOCK_DGRAM)[0]
        with socket.socket(family, kind) as probe:
            probe.connect(address)  # of a datagram socket: only picks the interface, sends nothing
            own = str(probe.getsockname()[0])
    except socket.gaierror as error:
        raise LaunchError(f"--rdzv-endpoint {endpoint_host}: no such host ({error.strerror})") from None
    except OSError:
        return socket.getfqdn(), False
    is_here = own == address[0]
    # The endpoint's own host may know itself by a loopback address; the others know it by the endpoint's.
    return (endpoint_host if is_here else own), is_here


def _wait_until_it_answers(host: str, port: int) -> None:
    """Return when the launcher that holds the store has started; torch would wait too, but not in silence."""
    deadline = time.monotonic() + _ENDPOINT_PATIENCE_S
    while True:
        try:
            socket.create_connection((host, port), timeout=5.0).close()
            return
        except OSError as error:
            if time.monotonic() > deadline:
                raise LaunchError(
                    f"--rdzv-endpoint {host}:{port} does not answer ({error.strerror}): "
                    "is the run started on that host too?"
                ) from None
        time.sleep(0.1)
