"""Pinocchio against MuJoCo on the same robot: two libraries, one dynamics."""

import copy
import dataclasses
import sys

import mujoco
import numpy as np
import pytest

import robots
from robots import UnknownNameError, UserError
from robots.model import ModelConfig, build_model, joint_addresses
from robots.pinocchio import PinocchioModel, build_pinocchio

pin = pytest.importorskip("pinocchio")

SPEC = robots.load("unitree_h1_2")
STATES = 100
TOLERANCE = 1e-6  # relative to the largest element
VARIANTS = {
    "27 joints": {},
    "21 joints": {"lock": SPEC.group("wrists")},
    "12 joints": {"lock": SPEC.group("waist", "arms", "wrists")},
    "fixed base": {"fixed_base": True},
    "no joints": {"lock": SPEC.joint_names},
}


@pytest.fixture(scope="module", params=VARIANTS, ids=str)
def pair(request) -> tuple[mujoco.MjModel, PinocchioModel]:
    """The same robot in both libraries; MuJoCo without contacts, joint limits and joint friction."""
    options = VARIANTS[request.param]
    model = build_model(SPEC, ModelConfig(**options))
    model.opt.disableflags |= mujoco.mjtDisableBit.mjDSBL_CONSTRAINT
    return model, build_pinocchio(SPEC, **options)


def states(model: mujoco.MjModel, seed: int = 0) -> list[tuple[np.ndarray, np.ndarray, np.ndarray]]:
    """Random qpos, qvel, qacc: any orientation, joints within limits, 2 rad/s, 10 rad/s^2."""
    rng = np.random.default_rng(seed)
    drawn = []
    for _ in range(STATES):
        qpos = rng.normal(size=model.nq)
        joints = [j for j in range(model.njnt) if model.jnt_type[j] == mujoco.mjtJoint.mjJNT_HINGE]
        qpos[model.jnt_qposadr[joints]] = rng.uniform(*model.jnt_range[joints].T)
        if model.jnt_type[0] == mujoco.mjtJoint.mjJNT_FREE:
            qpos[3:7] /= np.linalg.norm(qpos[3:7])
        drawn.append((qpos, rng.normal(0, 2, model.nv), rng.normal(0, 10, model.nv)))
    return drawn


def error(found: np.ndarray, expected: np.ndarray) -> float:
    return float(np.abs(found - expected).max() / np.abs(expected).max())


def test_layouts_agree(pair):
    """What the conversions rest on: our layout is MuJoCo's, joints in spec order."""
    model, pinocchio = pair
    offset = 7 if pinocchio.floating else 0
    np.testing.assert_array_equal(
        joint_addresses(model, pinocchio.joints)[0], offset + np.arange(len(pinocchio.joints))
    )
    assert (pinocchio.model.nq, pinocchio.model.nv) == (model.nq, model.nv)


def test_mass_matrix(pair):
    model, pinocchio = pair
    data = mujoco.MjData(model)
    expected = np.zeros((model.nv, model.nv))
    for qpos, _, _ in states(model):
        data.qpos[:] = qpos
        mujoco.mj_forward(model, data)
        mujoco.mj_fullM(model, data, expected)
        assert error(pinocchio.mass_matrix(qpos), expected) < TOLERANCE


def test_gravity_torques(pair):
    model, pinocchio = pair
    data = mujoco.MjData(model)
    rest = np.zeros(model.nv)
    for qpos, _, _ in states(model):
        data.qpos[:] = qpos
        mujoco.mj_forward(model, data)
        assert error(pinocchio.inverse_dynamics(qpos, rest, rest), data.qfrc_bias) < TOLERANCE


def test_nonlinear_effects(pair):
    model, pinocchio = pair
    data = mujoco.MjData(model)
    for qpos, qvel, _ in states(model):
        data.qpos[:], data.qvel[:] = qpos, qvel
        mujoco.mj_forward(model, data)
        assert error(pinocchio.inverse_dynamics(qpos, qvel, np.zeros(model.nv)), data.qfrc_bias) < TOLERANCE


def test_inverse_dynamics(pair):
    model, pinocchio = pair
    data = mujoco.MjData(model)
    for qpos, qvel, qacc in states(model):
        data.qpos[:], data.qvel[:], data.qacc[:] = qpos, qvel, qacc
        mujoco.mj_inverse(model, data)
        assert error(pinocchio.inverse_dynamics(qpos, qvel, qacc), data.qfrc_inverse) < TOLERANCE


def test_forward_dynamics_undoes_inverse_dynamics(pair):
    model, pinocchio = copy.copy(pair[0]), pair[1]
    model.opt.disableflags |= mujoco.mjtDisableBit.mjDSBL_ACTUATION
    data = mujoco.MjData(model)
    for qpos, qvel, qacc in states(model)[:10]:
        data.qpos[:], data.qvel[:] = qpos, qvel
        data.qfrc_applied[:] = pinocchio.inverse_dynamics(qpos, qvel, qacc)
        mujoco.mj_forward(model, data)
        assert error(data.qacc, qacc) < TOLERANCE


def test_frames_of_bodies_and_sites(pair):
    model, pinocchio = pair
    data = mujoco.MjData(model)
    sites = [model.site(s).name for s in range(model.nsite) if model.site(s).name != "base"]
    for qpos, _, _ in states(model)[:10]:
        data.qpos[:] = qpos
        mujoco.mj_kinematics(model, data)
        pin.framesForwardKinematics(pinocchio.model, pinocchio.data, pinocchio.configuration(qpos))
        for name in (*(model.body(b).name for b in range(1, model.nbody)), *sites):
            frame = pinocchio.data.oMf[pinocchio.model.getFrameId(name)]
            there = data.site(name) if name in sites else data.body(name)
            np.testing.assert_allclose(frame.translation, there.xpos, atol=1e-9, err_msg=name)
            np.testing.assert_allclose(frame.rotation, there.xmat.reshape(3, 3), atol=1e-9, err_msg=name)


def test_velocity_of_a_frame(pair):
    """The velocity map: a foot's world velocity in both libraries."""
    model, pinocchio = pair
    data = mujoco.MjData(model)
    foot = SPEC.foot_bodies[0]
    for qpos, qvel, _ in states(model)[:10]:
        data.qpos[:], data.qvel[:] = qpos, qvel
        mujoco.mj_forward(model, data)
        pin.forwardKinematics(
            pinocchio.model, pinocchio.data, pinocchio.configuration(qpos), pinocchio.velocity(qpos, qvel)
        )
        frame = pinocchio.model.getFrameId(foot)
        motion = pin.getFrameVelocity(pinocchio.model, pinocchio.data, frame, pin.LOCAL_WORLD_ALIGNED)
        np.testing.assert_allclose(motion.linear, data.sensor(f"{foot}.vel").data, atol=1e-9)


def test_regressor_is_linear_in_the_inertial_parameters(pair):
    """Y(q, v, a) theta plus the armature's share is the inverse dynamics: what identification fits."""
    model, pinocchio = pair
    theta = np.concatenate([inertia.toDynamicParameters() for inertia in list(pinocchio.model.inertias)[1:]])
    if not theta.size:
        pytest.skip("no moving body")
    for qpos, qvel, qacc in states(model)[:10]:
        q, v = pinocchio.configuration(qpos), pinocchio.velocity(qpos, qvel)
        a = pinocchio.acceleration(qpos, qvel, qacc)
        regressor = pin.computeJointTorqueRegressor(pinocchio.model, pinocchio.data, q, v, a)
        tau = regressor @ theta + pinocchio.model.armature * a
        assert error(pinocchio.force(qpos, tau), pinocchio.inverse_dynamics(qpos, qvel, qacc)) < TOLERANCE


def test_motion_map_is_orthogonal_and_keeps_power(pair):
    model, pinocchio = pair
    for qpos, qvel, tau in states(model)[:10]:
        matrix = pinocchio.motion_map(qpos)
        np.testing.assert_allclose(matrix @ matrix.T, np.eye(model.nv), atol=1e-12)
        power = pinocchio.force(qpos, tau) @ qvel
        assert power == pytest.approx(tau @ pinocchio.velocity(qpos, qvel))


def test_scalar_last_quaternions_would_be_caught():
    """A state with the quaternion rolled by one has other gravity torques, so the tests above see the order."""
    model, pinocchio = build_model(SPEC), build_pinocchio(SPEC)
    rest = np.zeros(model.nv)
    qpos = states(model)[0][0]
    rolled = np.r_[qpos[:3], np.roll(qpos[3:7], -1), qpos[7:]]
    assert error(pinocchio.inverse_dynamics(rolled, rest, rest), pinocchio.inverse_dynamics(qpos, rest, rest)) > 0.01


def test_joints_go_by_name_not_by_place():
    """A spec with another joint order gives the same torques, in that order."""
    shuffled = dataclasses.replace(SPEC, joints=tuple(np.random.default_rng(1).permutation(np.array(SPEC.joints))))
    order = SPEC.index(shuffled.joint_names)
    one, two = (build_pinocchio(s, fixed_base=True) for s in (SPEC, shuffled))
    angles = np.random.default_rng(2).uniform(*SPEC.array("pos_limit").T)
    rest = np.zeros(27)
    np.testing.assert_allclose(
        two.inverse_dynamics(angles[order], rest, rest), one.inverse_dynamics(angles, rest, rest)[order], atol=1e-12
    )


def test_limits_come_from_the_spec():
    pinocchio = build_pinocchio(SPEC)
    np.testing.assert_array_equal(pinocchio.model.effortLimit[pinocchio.v_index], SPEC.array("effort_limit"))
    np.testing.assert_array_equal(pinocchio.model.velocityLimit[pinocchio.v_index], SPEC.array("vel_limit"))
    np.testing.assert_array_equal(pinocchio.model.lowerPositionLimit[pinocchio.q_index], SPEC.array("pos_limit")[:, 0])
    np.testing.assert_array_equal(pinocchio.model.upperPositionLimit[pinocchio.q_index], SPEC.array("pos_limit")[:, 1])


def test_wrong_shape_says_expected_and_given():
    pinocchio = build_pinocchio(SPEC)
    with pytest.raises(ValueError, match=r"qpos must have shape \(34,\), got \(27,\)"):
        pinocchio.configuration(np.zeros(27))
    with pytest.raises(ValueError, match=r"qvel must have shape \(33,\), got \(34,\)"):
        pinocchio.velocity(np.r_[np.zeros(3), 1, np.zeros(30)], np.zeros(34))


def test_locking_an_unknown_joint_lists_the_nearest():
    with pytest.raises(
        UnknownNameError, match="unknown joint of unitree_h1_2 'left_knee'; did you mean left_knee_joint"
    ):
        build_pinocchio(SPEC, lock=("left_knee",))


def test_without_pinocchio_one_sentence_says_what_to_install(monkeypatch):
    monkeypatch.setitem(sys.modules, "pinocchio", None)
    with pytest.raises(UserError, match="Pinocchio is needed for this and is not installed: pip install pin"):
        build_pinocchio(SPEC)
