"""Building a MuJoCo model from a spec: locked joints, servos, delays, sensors."""

import itertools

import mujoco
import numpy as np
import pytest

import robots
from robots import UnknownNameError
from robots.model import ModelConfig, build_model, free_joints, joint_addresses

SPEC = robots.load("unitree_h1_2")
WEIGHT = 66.984 * 9.81
TWELVE = SPEC.group("waist", "arms", "wrists")
TWENTY_ONE = SPEC.group("wrists")


def no_ground(model: mujoco.MjSpec) -> None:
    """A world without ground."""


def full_pose(values: np.ndarray, model: mujoco.MjModel, joints: tuple[str, ...]) -> mujoco.MjData:
    """Kinematics with `joints` at `values` [rad] and the base at the origin of the MJCF."""
    data = mujoco.MjData(model)
    data.qpos[joint_addresses(model, joints)[0]] = values
    mujoco.mj_kinematics(model, data)
    return data


# --------------------------------------------------------------------------------------------- locks


@pytest.mark.parametrize(("lock", "count"), [((), 27), (TWENTY_ONE, 21), (TWELVE, 12), (SPEC.joint_names, 0)])
def test_locking_leaves_the_other_joints_in_spec_order(lock, count):
    config = ModelConfig(lock=lock)
    model = build_model(SPEC, config)
    joints = free_joints(SPEC, config)
    assert len(joints) == count
    assert (model.nq, model.nv, model.nu) == (7 + count, 6 + count, count)
    assert [model.actuator(a).name for a in range(model.nu)] == list(joints)
    assert list(joints) == [n for n in SPEC.joint_names if n in joints]


@pytest.mark.parametrize("lock", [TWENTY_ONE, TWELVE, SPEC.joint_names])
@pytest.mark.parametrize("fuse", [False, True])
def test_locking_keeps_the_mass(lock, fuse):
    model = build_model(SPEC, ModelConfig(lock=lock, fuse=fuse))
    assert model.body_subtreemass[0] == pytest.approx(66.984, abs=1e-9)


@pytest.mark.parametrize(
    "lock",
    [
        ("left_shoulder_pitch_joint", "right_shoulder_pitch_joint"),  # default 0.4, link placed with a roll
        ("left_shoulder_roll_joint", "right_shoulder_roll_joint"),  # default 0.2 about x, link placed with a roll
        ("left_elbow_joint", "right_elbow_joint"),  # default 0.3
        ("left_knee_joint", "left_hip_pitch_joint"),
        TWENTY_ONE,
        TWELVE,
    ],
)
def test_a_locked_joint_is_the_joint_held_in_its_default_pose(lock):
    """All body frames equal those of the unlocked model posed there, to rounding."""
    config = ModelConfig(lock=lock)
    joints = free_joints(SPEC, config)
    angles = np.random.default_rng(3).uniform(*SPEC.array("pos_limit").T)
    angles[SPEC.index(lock)] = SPEC.array("default_pos", lock)
    unlocked, locked = build_model(SPEC), build_model(SPEC, config)
    one = full_pose(angles, unlocked, SPEC.joint_names)
    two = full_pose(angles[SPEC.index(joints)], locked, joints)
    for body in range(unlocked.nbody):
        name = unlocked.body(body).name
        np.testing.assert_allclose(two.body(name).xpos, one.body(name).xpos, atol=1e-14, err_msg=name)
        np.testing.assert_allclose(two.body(name).xmat, one.body(name).xmat, atol=1e-14, err_msg=name)


def test_fusing_changes_the_dynamics_by_nothing():
    lock = TWELVE
    plain, fused = (build_model(SPEC, ModelConfig(lock=lock, fuse=fuse), no_ground) for fuse in (False, True))
    assert fused.nbody < plain.nbody
    rng = np.random.default_rng(4)
    for _ in range(10):
        qpos, qvel = np.r_[rng.normal(size=7), rng.uniform(-0.4, 0.4, 12)], rng.normal(size=18)
        qpos[3:7] /= np.linalg.norm(qpos[3:7])
        results = []
        for model in (plain, fused):
            data = mujoco.MjData(model)
            data.qpos[:], data.qvel[:] = qpos, qvel
            mujoco.mj_forward(model, data)
            results.append(data.qfrc_bias.copy())
        np.testing.assert_allclose(results[1], results[0], atol=1e-9)


@pytest.mark.parametrize("call", [free_joints, build_model])
def test_locking_an_unknown_joint_lists_the_nearest(call):
    with pytest.raises(
        UnknownNameError, match=r"unknown joint of unitree_h1_2 'left_knee'; did you mean left_knee_joint"
    ):
        call(SPEC, ModelConfig(lock=("left_knee",)))


def test_fixed_base_removes_the_floating_base_only():
    model = build_model(SPEC, ModelConfig(fixed_base=True))
    assert (model.nq, model.nv, model.nu) == (27, 27, 27)
    assert mujoco.MjData(model).qpos.shape == (27,)


def test_joint_addresses_go_by_name():
    model = build_model(SPEC)
    names = ("torso_joint", "left_knee_joint")
    qpos, qvel = joint_addresses(model, names)
    np.testing.assert_array_equal(qpos, [model.joint(n).qposadr[0] for n in names])
    np.testing.assert_array_equal(qvel, [model.joint(n).dofadr[0] for n in names])


# -------------------------------------------------------------------------------------------- servos


def test_servo_is_a_clipped_pd_loop_with_the_gains_of_the_spec():
    model = build_model(SPEC)
    data = mujoco.MjData(model)
    rng = np.random.default_rng(1)
    q, v = joint_addresses(model, SPEC.joint_names)
    clipped = 0
    for _ in range(20):
        data.qpos[q], data.qvel[v] = rng.normal(0, 0.3, 27), rng.normal(0, 2.0, 27)
        data.ctrl[:] = rng.normal(0, 0.4, 27)
        mujoco.mj_forward(model, data)
        wanted = SPEC.array("stiffness") * (data.ctrl - data.qpos[q]) - SPEC.array("damping") * data.qvel[v]
        limit = SPEC.array("effort_limit")
        clipped += np.count_nonzero(np.abs(wanted) > limit)
        np.testing.assert_allclose(data.actuator_force, np.clip(wanted, -limit, limit), atol=1e-12)
        np.testing.assert_allclose(data.qfrc_actuator[v], data.actuator_force, atol=1e-12)
    assert 0 < clipped < 20 * 27


def test_servos_do_not_clip_the_target():
    """A target outside the joint's range is how a policy asks for torque at the end stop."""
    assert not build_model(SPEC).actuator_ctrllimited.any()


def steps_until_it_acts(model: mujoco.MjModel, start: int) -> int:
    """Steps between a knee command at step `start` and the first step whose force obeys it."""
    data = mujoco.MjData(model)
    knee = model.actuator("left_knee_joint").id
    for step in itertools.count():
        assert step < start + 100, "the command never arrived"
        if step == start:
            data.ctrl[knee] = 1.0
        mujoco.mj_step(model, data)
        if data.actuator_force[knee] > 100:
            return step - start
    raise AssertionError


@pytest.mark.parametrize("start", [0, 15])
@pytest.mark.parametrize(("delay", "steps"), [(0.0, 0), (0.002, 1), (0.003, 2), (0.004, 2), (0.0101, 6), (0.02, 10)])
def test_a_command_arrives_after_the_delay_rounded_up_to_steps(delay, steps, start):
    """Timeline at 2 ms: command before step k, delay 4 ms -> steps k and k + 1 act on the old one, k + 2 on the new."""
    model = build_model(SPEC, ModelConfig(fixed_base=True, max_delay=0.02))
    model.actuator_delay[:] = delay
    assert steps_until_it_acts(model, start) == steps


@pytest.mark.parametrize("max_delay", [0.0, 0.001, 0.002, 0.005, 0.02])
def test_as_built_commands_are_not_delayed(max_delay):
    model = build_model(SPEC, ModelConfig(fixed_base=True, max_delay=max_delay))
    assert steps_until_it_acts(model, 5) == 0


def test_each_servo_has_its_own_delay():
    model = build_model(SPEC, ModelConfig(fixed_base=True, max_delay=0.02))
    model.actuator_delay[:] = 0.002
    model.actuator_delay[model.actuator("left_knee_joint").id] = 0.016
    assert steps_until_it_acts(model, 3) == 8


# ------------------------------------------------------------------------------------------- sensors


@pytest.fixture(scope="module")
def standing() -> tuple[mujoco.MjModel, mujoco.MjData]:
    """The robot at rest on the ground; servos ten times stiffer, or it would tip over without a controller."""
    model = build_model(SPEC)
    model.actuator_gainprm[:, 0] *= 10
    model.actuator_biasprm[:, 1:3] *= 10
    data = mujoco.MjData(model)
    data.qpos[joint_addresses(model, SPEC.joint_names)[0]] = data.ctrl[:] = SPEC.pose("default")
    data.qpos[2] = SPEC.spawn_height
    for _ in range(3000):
        mujoco.mj_step(model, data)
    mujoco.mj_forward(model, data)
    assert np.abs(data.qvel).max() < 1e-3
    return model, data


def test_feet_press_the_weight_into_the_ground(standing):
    """The sensor reads the force of the foot on the ground: downward, about minus half the weight each."""
    _, data = standing
    forces = np.array([data.sensor(f"{foot}.force").data for foot in SPEC.foot_bodies])
    assert np.all(forces[:, 2] < -0.4 * WEIGHT)
    assert -forces[:, 2].sum() == pytest.approx(WEIGHT, rel=0.01)
    np.testing.assert_allclose(forces[:, :2].sum(axis=0), (0, 0), atol=0.01 * WEIGHT)


def test_feet_in_the_air_press_on_nothing():
    model = build_model(SPEC)
    data = mujoco.MjData(model)
    data.qpos[2] = 3
    mujoco.mj_forward(model, data)
    for foot in SPEC.foot_bodies:
        np.testing.assert_array_equal(data.sensor(f"{foot}.force").data, (0, 0, 0))


def test_imu_at_rest_reads_gravity_upwards_and_no_rotation(standing):
    _, data = standing
    up = data.site("imu").xmat.reshape(3, 3)[2]  # the soft ankles let the robot lean by 3 degrees
    assert up[2] > 0.998
    np.testing.assert_allclose(data.sensor("imu_accel").data, 9.81 * up, atol=0.01)
    np.testing.assert_allclose(data.sensor("imu_gyro").data, np.zeros(3), atol=1e-3)


def test_imu_in_free_fall_reads_nothing():
    model = build_model(SPEC, ModelConfig(lock=SPEC.joint_names), no_ground)
    data = mujoco.MjData(model)
    mujoco.mj_forward(model, data)
    np.testing.assert_allclose(data.sensor("imu_accel").data, np.zeros(3), atol=1e-9)


def test_imu_turns_with_the_torso_and_the_base_sensors_with_the_pelvis():
    model = build_model(SPEC, ModelConfig(), no_ground)
    data = mujoco.MjData(model)
    (q,), (v,) = joint_addresses(model, ("torso_joint",))
    data.qpos[q], data.qvel[v], data.qvel[3:6] = np.pi / 2, 0.5, (0.1, 0.2, 0.3)
    mujoco.mj_forward(model, data)
    half = np.sqrt(0.5)
    np.testing.assert_allclose(data.sensor("imu_quat").data, (half, 0, 0, half), atol=1e-12)
    np.testing.assert_allclose(data.sensor("imu_gyro").data, (0.2, -0.1, 0.8), atol=1e-12)
    np.testing.assert_allclose(data.sensor("base_ang_vel").data, (0.1, 0.2, 0.3), atol=1e-12)


def test_base_velocity_is_in_the_base_frame():
    model = build_model(SPEC, ModelConfig(), no_ground)
    data = mujoco.MjData(model)
    half = np.sqrt(0.5)
    data.qpos[3:7], data.qvel[:3] = (half, 0, 0, half), (1, 2, 3)  # the pelvis looks along world y
    mujoco.mj_forward(model, data)
    np.testing.assert_allclose(data.sensor("base_lin_vel").data, (2, -1, 3), atol=1e-12)


@pytest.mark.parametrize("lock", [(), TWENTY_ONE])
def test_joint_sensors_read_each_joint(lock):
    config = ModelConfig(lock=lock)
    model = build_model(SPEC, config, no_ground)
    joints = free_joints(SPEC, config)
    data = mujoco.MjData(model)
    rng = np.random.default_rng(2)
    q, v = joint_addresses(model, joints)
    data.qpos[q], data.qvel[v] = rng.uniform(-0.1, 0.1, len(joints)), rng.normal(size=len(joints))
    mujoco.mj_forward(model, data)
    for i, name in enumerate(joints):
        assert data.sensor(f"{name}.pos").data[0] == data.qpos[q[i]]
        assert data.sensor(f"{name}.vel").data[0] == data.qvel[v[i]]
        assert data.sensor(f"{name}.effort").data[0] == pytest.approx(data.actuator(name).force[0])


def test_foot_sensors_read_the_foot():
    model = build_model(SPEC, ModelConfig(), no_ground)
    data = mujoco.MjData(model)
    data.qvel[:3] = (1, 2, 3)
    data.qpos[joint_addresses(model, ("left_ankle_roll_joint",))[0]] = 0.2
    mujoco.mj_forward(model, data)
    foot = data.body("left_ankle_roll_link")
    np.testing.assert_allclose(data.sensor("left_ankle_roll_link.pos").data, foot.xpos)
    np.testing.assert_allclose(data.sensor("left_ankle_roll_link.vel").data, (1, 2, 3))
    np.testing.assert_allclose(data.sensor("left_ankle_roll_link.up").data, (0, -np.sin(0.2), np.cos(0.2)), atol=1e-12)


# ------------------------------------------------------------------------------------------- options


def test_feet_collision_keeps_the_soles_and_the_ground_of_the_caller():
    def boxes(model: mujoco.MjSpec) -> None:
        model.worldbody.add_geom(
            name="step", type=mujoco.mjtGeom.mjGEOM_BOX, size=(1, 1, 0.1), contype=1, conaffinity=0
        )

    model = build_model(SPEC, ModelConfig(collision="feet"), boxes)
    colliding = {model.geom(g).name for g in range(model.ngeom) if model.geom_contype[g] | model.geom_conaffinity[g]}
    ends = itertools.product(("left", "right"), ("heel", "toe"), ("left", "right"))
    assert colliding == {"step", *("_".join(end) for end in ends)}


def test_solver_fast_differs_from_accurate_in_the_solver_only():
    fast, accurate = (build_model(SPEC, ModelConfig(solver=s)) for s in ("fast", "accurate"))
    assert (fast.opt.iterations, fast.opt.ls_iterations) == (4, 6)
    assert (accurate.opt.iterations, accurate.opt.ls_iterations) == (100, 50)
    assert fast.opt.timestep == accurate.opt.timestep == ModelConfig().timestep
    np.testing.assert_array_equal(fast.body_mass, accurate.body_mass)


def test_timestep_is_taken():
    assert build_model(SPEC, ModelConfig(timestep=0.005)).opt.timestep == 0.005
