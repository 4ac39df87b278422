"""A robot's MuJoCo model, built from its own MJCF and its spec through `MjSpec`."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal

import mujoco
import numpy as np

from robots.spec import RobotSpec

GROUND = "ground"


@dataclass(frozen=True, kw_only=True)
class ModelConfig:
    """How a robot's model is built."""

    lock: tuple[str, ...] = ()
    """Joints removed from the model and frozen in the default pose."""
    fixed_base: bool = False
    """Hold the base in the air instead of letting it float."""
    collision: Literal["full", "feet"] = "full"
    """full: ground and self-collision of all shapes; feet: only the sole spheres touch the ground."""
    timestep: float = 0.002
    """Physics step [s]."""
    solver: Literal["accurate", "fast"] = "accurate"
    """accurate: MuJoCo's own settings; fast: 4 Newton and 6 line-search iterations, dense, no islands."""
    max_delay: float = 0.0
    """Longest command delay that `actuator.*.delay` may be set to [s]; as built there is none."""
    fuse: bool = False
    """Merge links without joints into their parents: faster, but their names are gone."""


def free_joints(spec: RobotSpec, config: ModelConfig) -> tuple[str, ...]:
    """Joints the model keeps, in spec order, (J,)."""
    spec.index(config.lock)
    return tuple(n for n in spec.joint_names if n not in config.lock)


def build_spec(
    spec: RobotSpec, config: ModelConfig, ground: Callable[[mujoco.MjSpec], None] | None = None
) -> mujoco.MjSpec:
    """The editable model: MJCF, locked joints, servos with the spec's gains and limits, sensors, ground.

    `ground` adds the terrain; by default a plane named "ground". Servos are MuJoCo position actuators,
    force = clip(kp (target - q) - kd qd, +-effort_limit), named after their joints, in spec order.
    Raises UnknownNameError for a joint that the robot lacks.
    """
    model = mujoco.MjSpec.from_file(str(spec.mjcf))
    model.option.timestep = config.timestep
    model.compiler.fusestatic = config.fuse
    if config.solver == "fast":
        _use_fast_solver(model)
    joints = free_joints(spec, config)
    for name in config.lock:
        _lock(model, name, spec.joint(name).default_pos)
    if config.fixed_base:
        model.delete(next(j for j in model.joints if j.type == mujoco.mjtJoint.mjJNT_FREE))
    _add_servos(model, spec, joints, config)
    _add_sensors(model, spec, joints)
    if config.collision == "feet":
        _keep_sole_contacts(model)
    (ground or _plane)(model)
    return model


def build_model(
    spec: RobotSpec, config: ModelConfig | None = None, ground: Callable[[mujoco.MjSpec], None] | None = None
) -> mujoco.MjModel:
    """The compiled model of `build_spec`."""
    return build_spec(spec, config or ModelConfig(), ground).compile()


def joint_addresses(model: mujoco.MjModel, joints: Sequence[str]) -> tuple[np.ndarray, np.ndarray]:
    """Addresses of `joints` in qpos and qvel, (J,) each, by name."""
    ids = [model.joint(n).id for n in joints]
    return model.jnt_qposadr[ids].astype(np.intp), model.jnt_dofadr[ids].astype(np.intp)


def _use_fast_solver(model: mujoco.MjSpec) -> None:
    model.option.iterations, model.option.ls_iterations = 4, 6
    model.option.jacobian = mujoco.mjtJacobian.mjJAC_DENSE
    model.option.disableflags |= mujoco.mjtDisableBit.mjDSBL_ISLAND


def _lock(model: mujoco.MjSpec, name: str, angle: float) -> None:
    joint = model.joint(name)
    body = joint.parent
    turn, quat = np.zeros(4), np.zeros(4)
    mujoco.mju_axisAngle2Quat(turn, np.asarray(joint.axis, dtype=np.float64), angle)
    orientation = np.array(body.quat, dtype=np.float64)
    if body.alt.type == mujoco.mjtOrientation.mjORIENTATION_EULER:
        mujoco.mju_euler2Quat(orientation, np.array(body.alt.euler), "XYZ")
        body.alt.type = mujoco.mjtOrientation.mjORIENTATION_QUAT
    mujoco.mju_mulQuat(quat, orientation, turn)
    body.quat = quat
    model.delete(joint)


def _add_servos(model: mujoco.MjSpec, spec: RobotSpec, joints: Sequence[str], config: ModelConfig) -> None:
    samples = int(np.ceil(config.max_delay / config.timestep - 1e-9))
    for name in joints:
        joint = spec.joint(name)
        servo = model.add_actuator(name=name, target=name, trntype=mujoco.mjtTrn.mjTRN_JOINT)
        servo.set_to_position(kp=joint.stiffness, kv=joint.damping)
        servo.forcerange = (-joint.effort_limit, joint.effort_limit)
        servo.forcelimited = mujoco.mjtLimited.mjLIMITED_TRUE
        if samples:
            servo.nsample = samples


def _add_sensors(model: mujoco.MjSpec, spec: RobotSpec, joints: Sequence[str]) -> None:
    """Measured quantities first: joint_pos, joint_vel, joint_effort, imu; then what only a simulation knows."""
    site, body, joint = mujoco.mjtObj.mjOBJ_SITE, mujoco.mjtObj.mjOBJ_XBODY, mujoco.mjtObj.mjOBJ_JOINT
    kind = mujoco.mjtSensor
    for suffix, sensor in (
        ("pos", kind.mjSENS_JOINTPOS),
        ("vel", kind.mjSENS_JOINTVEL),
        ("effort", kind.mjSENS_JOINTACTFRC),
    ):
        for name in joints:
            model.add_sensor(name=f"{name}.{suffix}", type=sensor, objtype=joint, objname=name)
    model.add_sensor(name="imu_gyro", type=kind.mjSENS_GYRO, objtype=site, objname=spec.imu_site)
    model.add_sensor(name="imu_accel", type=kind.mjSENS_ACCELEROMETER, objtype=site, objname=spec.imu_site)
    model.add_sensor(name="imu_quat", type=kind.mjSENS_FRAMEQUAT, objtype=site, objname=spec.imu_site)
    model.body(spec.base_body).add_site(name="base")
    model.add_sensor(name="base_lin_vel", type=kind.mjSENS_VELOCIMETER, objtype=site, objname="base")
    model.add_sensor(name="base_ang_vel", type=kind.mjSENS_GYRO, objtype=site, objname="base")
    for foot in spec.foot_bodies:
        model.add_sensor(name=f"{foot}.pos", type=kind.mjSENS_FRAMEPOS, objtype=body, objname=foot)
        model.add_sensor(name=f"{foot}.vel", type=kind.mjSENS_FRAMELINVEL, objtype=body, objname=foot)
        model.add_sensor(name=f"{foot}.up", type=kind.mjSENS_FRAMEZAXIS, objtype=body, objname=foot)
        _add_contact_sensor(model, foot)


def _add_contact_sensor(model: mujoco.MjSpec, foot: str) -> None:
    """Net force that a foot exerts on all it touches, in the world frame [N].

    MuJoCo's contact sensor (netforce reduction) takes the foot for the first body and reports the force on the second:
    standing on two feet, each reads minus half the weight along z.
    """
    model.add_sensor(
        name=f"{foot}.force",
        type=mujoco.mjtSensor.mjSENS_CONTACT,
        objtype=mujoco.mjtObj.mjOBJ_BODY,
        objname=foot,
        intprm=[1 << int(mujoco.mjtConDataField.mjCONDATA_FORCE), 3, 1],
    )


def _plane(model: mujoco.MjSpec) -> None:
    model.worldbody.add_geom(
        name=GROUND,
        type=mujoco.mjtGeom.mjGEOM_PLANE,
        size=(0, 0, 1),
        contype=1,
        conaffinity=0,
        rgba=(0.55, 0.58, 0.62, 1),
    )


def _keep_sole_contacts(model: mujoco.MjSpec) -> None:
    for geom in model.geoms:
        if geom.classname.name != "sole":
            geom.contype = geom.conaffinity = 0
