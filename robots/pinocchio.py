"""A robot's Pinocchio model: inverse dynamics, mass matrix, regressors and Jacobians, without MuJoCo.

Our layout of a state, the same as MuJoCo's, with the joints in the order of `PinocchioModel.joints`:

    qpos (nq) = base position in the world [m], base quaternion (w, x, y, z), joint angles [rad]
    qvel (nv) = base velocity in the world [m/s], base angular velocity in the base frame [rad/s], joint speeds [rad/s]

Without a floating base only the joint part is there. Pinocchio's layout differs: its quaternion is (x, y, z, w), its
base velocity is expressed in the base frame, and its joints have an order of their own. Accelerations carry a trap:
the base acceleration of Pinocchio is spatial, that of MuJoCo the derivative of the world velocity, and they differ by
omega x v. `PinocchioModel` converts both ways; nothing else should.

Pinocchio (`pip install pin`) is imported when a model is built, not before.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

from robots.errors import UserError
from robots.spec import FloatArray, RobotSpec

BASE_POS, BASE_VEL = 7, 6  # numbers of a floating base in qpos and qvel


@dataclass(frozen=True, kw_only=True)
class PinocchioModel:
    """A `pinocchio.Model` and the maps between its layout and ours."""

    model: Any
    """pinocchio.Model; armature from the MJCF, effort and velocity limits from the spec, bodies and sites as frames."""
    data: Any
    """pinocchio.Data, the workspace of `model`; not to be shared between threads."""
    joints: tuple[str, ...]
    """Joints the model keeps, in spec order, (J,)."""
    floating: bool
    """Whether the base floats."""
    q_index: NDArray[np.intp]
    """Position of each joint in Pinocchio's configuration, (J,)."""
    v_index: NDArray[np.intp]
    """Position of each joint in Pinocchio's velocity, (J,)."""

    def configuration(self, qpos: ArrayLike) -> FloatArray:
        """Pinocchio's configuration (nq) of our `qpos` (nq). Raises ValueError on a wrong shape."""
        pos = self._checked("qpos", qpos, self.model.nq)
        q = np.empty(self.model.nq)
        q[self.q_index] = pos[self.model.nq - len(self.joints) :]
        if self.floating:
            w, *xyz = pos[3:BASE_POS] / np.linalg.norm(pos[3:BASE_POS])
            q[:BASE_POS] = (*pos[:3], *xyz, w)
        return q

    def motion_map(self, qpos: ArrayLike) -> FloatArray:
        """T (nv, nv) with v_pinocchio = T qvel; T is orthogonal, and forces map by tau = T^T tau_pinocchio."""
        pos = self._checked("qpos", qpos, self.model.nq)
        joints = len(self.joints)
        matrix = np.zeros((self.model.nv, self.model.nv))
        matrix[self.v_index, np.arange(self.model.nv - joints, self.model.nv)] = 1.0
        if self.floating:
            matrix[:3, :3] = _rotation(pos[3:BASE_POS]).T
            matrix[3:BASE_VEL, 3:BASE_VEL] = np.eye(3)
        return matrix

    def velocity(self, qpos: ArrayLike, qvel: ArrayLike) -> FloatArray:
        """Pinocchio's velocity (nv) of our `qvel` (nv). Raises ValueError on a wrong shape."""
        moved: FloatArray = self.motion_map(qpos) @ self._checked("qvel", qvel, self.model.nv)
        return moved

    def acceleration(self, qpos: ArrayLike, qvel: ArrayLike, qacc: ArrayLike) -> FloatArray:
        """Pinocchio's acceleration (nv) of our `qacc` (nv) = d/dt qvel: T qacc - (omega x v, 0).

        v and omega are the base velocities in the base frame. Raises ValueError on a wrong shape.
        """
        acc: FloatArray = self.motion_map(qpos) @ self._checked("qacc", qacc, self.model.nv)
        if self.floating:
            vel = self.velocity(qpos, qvel)
            acc[:3] -= np.cross(vel[3:BASE_VEL], vel[:3])
        return acc

    def force(self, qpos: ArrayLike, tau: ArrayLike) -> FloatArray:
        """Our generalized force (nv) of Pinocchio's `tau` (nv): base force in the world, base torque in its frame."""
        mapped: FloatArray = self.motion_map(qpos).T @ self._checked("tau", tau, self.model.nv)
        return mapped

    def mass_matrix(self, qpos: ArrayLike) -> FloatArray:
        """Joint-space inertia with armature in our layout, (nv, nv)."""
        import pinocchio as pin

        matrix = self.motion_map(qpos)
        inertia = pin.crba(self.model, self.data, self.configuration(qpos))
        upper = np.triu(inertia)  # Pinocchio promises the upper triangle only
        product: FloatArray = matrix.T @ (upper + np.triu(upper, 1).T) @ matrix
        return product

    def inverse_dynamics(self, qpos: ArrayLike, qvel: ArrayLike, qacc: ArrayLike) -> FloatArray:
        """Generalized force (nv) that gives `qacc` against inertia, armature, Coriolis forces and gravity.

        M(q) qacc + c(q, qvel) in our layout; joint friction, damping and contacts are not in it. With `qacc` zero it
        is MuJoCo's `qfrc_bias`, with `qvel` zero too it is what holds the robot against gravity.
        """
        import pinocchio as pin

        tau = pin.rnea(
            self.model,
            self.data,
            self.configuration(qpos),
            self.velocity(qpos, qvel),
            self.acceleration(qpos, qvel, qacc),
        )
        return self.force(qpos, tau)

    @staticmethod
    def _checked(name: str, values: ArrayLike, size: int) -> FloatArray:
        array = np.asarray(values, dtype=np.float64)
        if array.shape != (size,):
            raise ValueError(f"{name} must have shape ({size},), got {array.shape}")
        return array


def build_pinocchio(spec: RobotSpec, *, lock: Sequence[str] = (), fixed_base: bool = False) -> PinocchioModel:
    """The Pinocchio model of the robot's own MJCF, with `lock` frozen in the default pose.

    `fixed_base` holds the base where the MJCF has it. Raises UnknownNameError for a joint that the robot lacks and
    UserError if Pinocchio is not installed.
    """
    try:
        import pinocchio as pin
    except ImportError as error:
        raise UserError("Pinocchio is needed for this and is not installed: pip install pin") from error
    spec.index(lock)
    model = pin.buildModelFromMJCF(str(spec.mjcf))
    (root,) = set(model.names[1:]) - set(spec.joint_names)
    reference = model.referenceConfigurations["qpos0"].copy()
    reference[[model.joints[model.getJointId(n)].idx_q for n in lock]] = spec.array("default_pos", lock)
    frozen = [*lock, *([root] if fixed_base else [])]
    model = pin.buildReducedModel(model, [model.getJointId(n) for n in frozen], reference)
    joints = tuple(n for n in spec.joint_names if n not in lock)
    chosen = [model.joints[model.getJointId(n)] for n in joints]
    v_index = np.array([j.idx_v for j in chosen], dtype=np.intp)
    model.effortLimit[v_index] = spec.array("effort_limit", joints)
    model.velocityLimit[v_index] = spec.array("vel_limit", joints)
    return PinocchioModel(
        model=model,
        data=model.createData(),
        joints=joints,
        floating=not fixed_base,
        q_index=np.array([j.idx_q for j in chosen], dtype=np.intp),
        v_index=v_index,
    )


def _rotation(quat: FloatArray) -> FloatArray:
    """Rotation matrix (3, 3) of a quaternion (w, x, y, z) of any length but zero."""
    w, *xyz = quat / np.linalg.norm(quat)
    x, y, z = xyz
    cross = np.array([[0, -z, y], [z, 0, -x], [-y, x, 0]])
    rotation: FloatArray = np.eye(3) + 2 * w * cross + 2 * cross @ cross
    return rotation
