"""What a robot is: the one source of joint order, gains, limits and mirror symmetry.

Needs numpy only, so that a robot's computer can read it. Units are SI; angles in rad.
"""

import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from functools import cached_property
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from robots.errors import UnknownNameError, UserError

FloatArray = NDArray[np.float64]


@dataclass(frozen=True, kw_only=True)
class JointSpec:
    """One actuated hinge joint."""

    name: str
    """Joint name, equal in the MJCF, the policy file and the logs."""
    group: str
    """Body part: legs, waist, arms or wrists."""
    motor: int
    """Index on the robot's own command bus."""
    default_pos: float
    """Resting angle of the default pose [rad]."""
    stiffness: float
    """Position gain kp of the joint servo [N m/rad]."""
    damping: float
    """Velocity gain kd of the joint servo [N m s/rad]."""
    pos_limit: tuple[float, float]
    """Lower and upper angle [rad]."""
    vel_limit: float
    """Largest speed [rad/s]."""
    effort_limit: float
    """Largest torque [N m]; the servo saturates here."""
    mirror: tuple[str, float]
    """Name of the joint across the sagittal plane and the sign of its angle there."""


@dataclass(frozen=True, kw_only=True)
class RobotSpec:
    """A robot: its joints in order, its model file and the names sensors and contacts go by."""

    name: str
    """Registry name, also the folder under `robots/`."""
    mjcf: Path
    """Model file of our own."""
    joints: tuple[JointSpec, ...]
    """Actuated joints in motor order; every array over joints has this order."""
    base_body: str
    """Body that carries the floating base."""
    imu_site: str
    """Site of the inertial unit; its frame is the frame of gyro and accelerometer."""
    imu_joints: tuple[str, ...]
    """Joints between base and the body that carries the inertial unit, base first, all about z."""
    foot_bodies: tuple[str, ...]
    """Bodies that may touch the ground, left first."""
    poses: Mapping[str, Mapping[str, float]] = field(default_factory=dict)
    """Named postures: joint name to angle [rad]; joints left out are zero."""
    spawn_height: float
    """Base height above flat ground with straight soles in the default pose [m]."""

    @cached_property
    def joint_names(self) -> tuple[str, ...]:
        """Joint names in order, (J,)."""
        return tuple(j.name for j in self.joints)

    def index(self, names: Sequence[str]) -> NDArray[np.intp]:
        """Positions of `names` in the joint order, (len(names),). Raises UnknownNameError."""
        order = {n: i for i, n in enumerate(self.joint_names)}
        for n in names:
            if n not in order:
                raise UnknownNameError(f"joint of {self.name}", n, order)
        return np.array([order[n] for n in names], dtype=np.intp)

    def group(self, *groups: str) -> tuple[str, ...]:
        """Names of the joints of these groups, in joint order. Raises UnknownNameError."""
        known = {j.group for j in self.joints}
        for g in groups:
            if g not in known:
                raise UnknownNameError(f"joint group of {self.name}", g, known)
        return tuple(j.name for j in self.joints if j.group in groups)

    def joint(self, name: str) -> JointSpec:
        """The joint of this name. Raises UnknownNameError."""
        return self.joints[int(self.index([name])[0])]

    def array(self, field_name: str, names: Sequence[str] | None = None) -> FloatArray:
        """A numeric JointSpec field of `names` (all joints by default), (J,) or (J, 2) for pos_limit."""
        chosen = self.joint_names if names is None else names
        return np.array([getattr(self.joint(n), field_name) for n in chosen], dtype=np.float64)

    def pose(self, name: str, names: Sequence[str] | None = None) -> FloatArray:
        """Joint angles of a named posture, (J,) [rad]; "default" is the default pose. Raises UnknownNameError."""
        chosen = self.joint_names if names is None else names
        if name == "default":
            return self.array("default_pos", chosen)
        if name not in self.poses:
            raise UnknownNameError(f"pose of {self.name}", name, [*self.poses, "default"])
        return np.array([self.poses[name].get(n, 0.0) for n in chosen])

    def mirror(self, names: Sequence[str] | None = None) -> tuple[NDArray[np.intp], FloatArray]:
        """Permutation p and signs s, both (J,), so that `s * q[..., p]` is q seen in a mirror (y to -y).

        Raises UnknownNameError, and UserError if `names` holds a joint without its partner on the other side.
        """
        chosen = list(self.joint_names if names is None else names)
        partners = [self.joint(n).mirror for n in chosen]
        for name, (partner, _) in zip(chosen, partners, strict=True):
            if partner not in chosen:
                raise UserError(f"joint '{name}' has no mirror image here: '{partner}' is not among the chosen joints")
        return np.array([chosen.index(p) for p, _ in partners], dtype=np.intp), np.array([s for _, s in partners])

    @cached_property
    def model_hash(self) -> str:
        """SHA-256 over the model file and the joint table: what a policy file is bound to."""
        digest = hashlib.sha256(self.mjcf.read_bytes().replace(b"\r\n", b"\n"))
        digest.update(json.dumps([asdict(j) for j in self.joints], sort_keys=True).encode())
        return digest.hexdigest()
