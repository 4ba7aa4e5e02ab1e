"""Where a call is carried out: on the host, or on the GPU by a device transport (device_lane.py)."""

from typing import Any

import numpy as np

from minidist.comm.calls.buffers import OutputArray, Place, device_of
from minidist.comm.calls.call import Call
from minidist.comm.calls.members import Members
from minidist.comm.device_lane import SideStream
from minidist.errors import ConfigError


def working_device(group: Members, algorithm: str, *arrays: Any, op: str | None = None) -> str:
    """Where the algorithm works: "cuda" if this rank's arrays are on the GPU and can be dealt with there."""
    if device_of(*arrays) != "cuda" or algorithm not in ("auto", "native"):
        return "cpu"
    if group.size == 1:
        return "cuda"
    dtype = None if op is None else arrays[0].dtype
    refusal = _refusal(group, op, dtype)
    if refusal is not None and algorithm == "native" and group.transport.device is not None:
        raise ConfigError(f"algorithm native: {refusal}; choose auto, or another, by way of the host")
    return "cpu" if refusal else "cuda"


def _refusal(group: Members, op: str | None = None, dtype: np.dtype | None = None) -> str | None:
    device = group.transport.device
    return "no device" if device is None else device.refusal(group.world_ranks, op, dtype)


def side_of(group: Members, where: str) -> SideStream | None:
    """What carries the call out on the GPU."""
    if where == "cpu" or group.size == 1:
        return None
    device = group.transport.device
    return None if device is None else device.side(group.id)


def side_for_root(group: Members, algorithm: str) -> SideStream | None:
    """The same where only the root knows whether its array is on the GPU: all ranks prepare for it."""
    if algorithm not in ("auto", "native") or _refusal(group) is not None:
        return None
    return side_of(group, "cuda")


def place_told(result: OutputArray, call: Call) -> Place:
    """Where the root's array goes: on whatever device the root has it."""
    def place(shape: tuple[int, ...], dtype: np.dtype) -> np.ndarray:
        if call.side is not None:
            result.device = call.origin or "cpu"
        return result.array(shape, dtype)

    return place
