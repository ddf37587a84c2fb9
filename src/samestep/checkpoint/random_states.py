"""This process's random streams (torch's CPU and accelerator, numpy's, Python's) <-> JSON."""

from __future__ import annotations

import base64
import hashlib
import random
import struct
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from samestep.checkpoint.layout import dump_json
from samestep.errors import CheckpointCorruptError
from samestep.random_streams import seed_streams

__all__ = ["RandomStates", "collect", "parse", "restore", "seed_anew"]

_NUM_WORDS = 624  # of a Mersenne Twister; Python keeps the position as one more


@dataclass(frozen=True)
class RandomStates:
    """The states of the random streams of one process, in the form that each library takes."""

    python: tuple[Any, ...]
    cpu: torch.Tensor
    numpy: dict[str, Any] | None  # None: numpy's global generator was replaced by one that is not saved
    accelerator: torch.Tensor | None
    accelerator_type: str
    digest: bytes


def collect() -> dict[str, Any]:
    """The states of the random streams of this process, as JSON can hold them."""
    version, words, gauss = random.getstate()
    state: dict[str, Any] = {
        "python": {"version": version, "words": _text(struct.pack("<625I", *words)), "gauss": gauss},
        "torch": _text(torch.get_rng_state().numpy().tobytes()),
        "numpy": None,
        "accelerator": None,
    }
    legacy: Any = np.random.get_state(legacy=False)
    if legacy["bit_generator"] == "MT19937":
        state["numpy"] = {
            "key": _text(legacy["state"]["key"].astype("<u4").tobytes()),
            "position": int(legacy["state"]["pos"]),
            "has_gauss": int(legacy["has_gauss"]),
            "gauss": float(legacy["gauss"]),
        }
    accelerator = torch.accelerator.current_accelerator(check_available=True)
    if accelerator is not None:
        generator_state = torch.get_device_module(accelerator).get_rng_state()
        data = generator_state.cpu().numpy().tobytes()
        state["accelerator"] = {"device_type": accelerator.type, "words": _text(data)}
    return state


def parse(state: Any, where: str) -> RandomStates:
    """What `collect` returned, once more.

    Raises:
        CheckpointCorruptError: `state` is no such thing.
    """
    try:
        python, accelerator = state["python"], state["accelerator"] or {"device_type": "", "words": None}
        parsed = RandomStates(
            python=(python["version"], struct.unpack("<625I", _bytes(python["words"])), python["gauss"]),
            cpu=_tensor(state["torch"]),
            numpy=None if state["numpy"] is None else _numpy_state(state["numpy"]),
            accelerator=None if accelerator["words"] is None else _tensor(accelerator["words"]),
            accelerator_type=str(accelerator["device_type"]),
            digest=hashlib.sha256(dump_json(state)).digest(),
        )
        # Generators of their own say whether the states are valid, before any stream is touched.
        random.Random().setstate(parsed.python)
        torch.Generator().set_state(parsed.cpu)
    except (KeyError, TypeError, ValueError, RuntimeError, struct.error) as error:
        reason = str(error).partition("\n")[0]
        raise CheckpointCorruptError(f"{where} is altered: it holds no random states ({reason})") from None
    return parsed


def restore(states: RandomStates) -> list[str]:
    """The random streams go on where `states` were collected; what could not be restored, in words."""
    notes: list[str] = []
    random.setstate(states.python)
    torch.set_rng_state(states.cpu)
    if states.numpy is not None:
        np.random.set_state(states.numpy)
    if states.accelerator is not None:
        accelerator = torch.accelerator.current_accelerator(check_available=True)
        if accelerator is not None and accelerator.type == states.accelerator_type:
            torch.get_device_module(accelerator).set_rng_state(states.accelerator)
        else:
            notes.append(
                f"the random stream of the {states.accelerator_type} device was not restored: there is no "
                "such device here"
            )
    return notes


def seed_anew(states: list[RandomStates], rank: int, world_size: int) -> None:
    """Random streams for a world of another size: they depend on all of `states` and on the rank."""
    digest = hashlib.sha256(b"".join(state.digest for state in states)).digest()
    sequence = np.random.SeedSequence(int.from_bytes(digest, "little"), spawn_key=(world_size, rank))
    seed_streams(sequence)


def _numpy_state(state: Any) -> dict[str, Any]:
    key = np.frombuffer(_bytes(state["key"]), dtype="<u4").astype(np.uint32)
    position, has_gauss, gauss = state["position"], state["has_gauss"], state["gauss"]
    if key.size != _NUM_WORDS or not 0 <= position <= _NUM_WORDS or has_gauss not in (0, 1):
        raise ValueError("not a Mersenne Twister's state")
    return {
        "bit_generator": "MT19937",
        "state": {"key": key, "pos": int(position)},
        "has_gauss": int(has_gauss),
        "gauss": float(gauss),
    }


def _tensor(text: str) -> torch.Tensor:
    return torch.frombuffer(bytearray(_bytes(text)), dtype=torch.uint8)


def _text(data: bytes) -> str:
    return base64.b64encode(data).decode("ascii")


def _bytes(text: str) -> bytes:
    return base64.b64decode(text, validate=True)
