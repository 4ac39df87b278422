"""Signals: the named physical quantities that cross the border between a robot (real or simulated) and a policy.

Every simulation backend and every driver produces the same ones, under these names, in the robot's joint order.
Needs numpy only.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from robots.errors import UnknownNameError
from robots.spec import RobotSpec


@dataclass(frozen=True, kw_only=True)
class Signal:
    """One named quantity at one instant."""

    name: str
    """Signal name, also the input name in the policy file."""
    shape: tuple[int, ...]
    """Shape without the batch axis."""
    unit: str
    """SI unit, "1" for none."""
    frame: str
    """Frame it is expressed in: joint, imu, base, world, ..."""
    order: tuple[str, ...]
    """Meaning of each element of the last axis: joint names or components. Quaternions are (w, x, y, z)."""
    max_age: float = 0.02
    """A policy must not be fed a value older than this [s]."""
    dtype: str = "float32"
    """Element type."""


def robot_signals(spec: RobotSpec) -> dict[str, Signal]:
    """The signals every robot of this spec produces, by name. Joint signals cover all joints in spec order.

    A policy that uses fewer joints picks them inside its own graph, so that no one re-orders anything.
    """
    joints = spec.joint_names
    xyz = ("x", "y", "z")
    table = (
        Signal(name="joint_pos", shape=(len(joints),), unit="rad", frame="joint", order=joints),
        Signal(name="joint_vel", shape=(len(joints),), unit="rad/s", frame="joint", order=joints),
        Signal(name="joint_effort", shape=(len(joints),), unit="N m", frame="joint", order=joints),
        Signal(name="imu_quat", shape=(4,), unit="1", frame="world", order=("w", "x", "y", "z")),
        Signal(name="imu_gyro", shape=(3,), unit="rad/s", frame="imu", order=xyz),
        Signal(name="imu_accel", shape=(3,), unit="m/s^2", frame="imu", order=xyz),
        Signal(
            name="command",
            shape=(3,),
            unit="m/s, m/s, rad/s",
            frame="base",
            order=("forward", "left", "turn_left"),
            max_age=0.5,
        ),
    )
    return {s.name: s for s in table}


def select(signals: dict[str, Signal], names: Sequence[str]) -> tuple[Signal, ...]:
    """The signals of these names, in this order. Raises UnknownNameError."""
    for n in names:
        if n not in signals:
            raise UnknownNameError("signal", n, signals)
    return tuple(signals[n] for n in names)
