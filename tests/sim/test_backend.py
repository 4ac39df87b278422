"""What every backend must do: these tests run once for each of `sim.backend.BACKENDS` and use the protocol only."""

from dataclasses import replace

import mujoco
import numpy as np
import pytest

from robots.errors import UnknownNameError, UserError
from robots.model import ModelConfig, build_model
from robots.signals import robot_signals
from sim.backend import PlantConfig, Start, make_backend, plant_from_json, plant_to_json, reference_plant
from sim.parameters import Randomize
from sim.sensors import SensorConfig
from sim.terrain import RoughGround

WAIST, LEGS_ONLY = 12, ("waist", "arms", "wrists")
EVERYTHING_VARIES = PlantConfig(
    lock=LEGS_ONLY,
    max_delay=0.02,
    randomize=(
        Randomize(pattern="link.*.mass", lo=0.8, hi=1.2),
        Randomize(pattern="link.*.inertia", lo=0.9, hi=1.1),
        Randomize(pattern="joint.*.armature", lo=0.6, hi=1.4),
        Randomize(pattern="actuator.*.kp", lo=0.9, hi=1.1),
        Randomize(pattern="actuator.*.delay", lo=0.0, hi=0.02, kind="value", shared=True),
        Randomize(pattern="contact.*_toe_*.friction", lo=0.4, hi=1.2, kind="value"),
        Randomize(pattern="sensor.imu_gyro.noise", lo=0.0, hi=0.1, kind="value"),
    ),
    sensors={
        "joint_pos": SensorConfig(noise=0.01, bias=0.01, delay=(0.0, 0.06)),
        "imu_quat": SensorConfig(noise=0.02, bias=0.02),
    },
)
TRUE_ONLY = {
    "base_lin_vel": (3,),
    "base_ang_vel": (3,),
    "base_pos": (3,),
    "base_quat": (4,),
    "foot_pos": (2, 3),
    "foot_vel": (2, 3),
    "foot_up": (2, 3),
    "foot_force": (2, 3),
}


def everyone(backend) -> np.ndarray:
    return np.arange(backend.num_envs)


def begin(backend, start, seed: int = 0) -> np.random.Generator:
    """Start all simulations and draw their first readings; returns the generator for what follows."""
    rng = np.random.default_rng(seed)
    backend.reset(everyone(backend), start, rng)
    backend.measure(rng)
    return rng


def snapshot(backend) -> dict[str, np.ndarray]:
    return {name: values.copy() for name, values in backend.signals.items()}


def walk(backend, rng: np.random.Generator, steps: int, restart: bool = True) -> list[dict[str, np.ndarray]]:
    """Signals of some steps with moving targets, pushes and, now and then, new episodes."""
    out = []
    targets = np.tile(backend.spec.array("default_pos"), (backend.num_envs, 1)).astype(np.float32)
    for k in range(steps):
        backend.step(targets + 0.2 * rng.uniform(-1, 1, targets.shape).astype(np.float32))
        backend.measure(rng)
        if restart and k % 4 == 3:
            ids = np.array([k % backend.num_envs])
            backend.push(ids, rng.uniform(-1, 1, (1, 2)))
            backend.reset(ids, some_start(backend, 1, rng), rng)
            backend.measure(rng, ids)
        out.append(snapshot(backend))
    return out


def some_start(backend, num: int, rng: np.random.Generator):
    return Start(
        base_pos=np.tile([0.0, 0.0, backend.spec.spawn_height], (num, 1)),
        base_quat=np.tile([1.0, 0.0, 0.0, 0.0], (num, 1)),
        base_vel=rng.uniform(-0.3, 0.3, (num, 6)),
        joint_pos=backend.spec.array("default_pos") + rng.uniform(-0.1, 0.1, (num, len(backend.spec.joints))),
    )


def rotation(quat: np.ndarray) -> np.ndarray:
    """Rotation matrix (3, 3) of a quaternion w x y z."""
    out = np.empty(9)
    mujoco.mju_quat2Mat(out, np.asarray(quat, float))
    return out.reshape(3, 3)


def about(axis: str, angle: float) -> np.ndarray:
    """Quaternion w x y z of a turn [rad] about a coordinate axis."""
    return np.array([np.cos(angle / 2), *(np.sin(angle / 2) * (a == axis) for a in "xyz")])


def times(a: np.ndarray, b: np.ndarray) -> np.ndarray:
    out = np.empty(4)
    mujoco.mju_mulQuat(out, np.asarray(a, float), np.asarray(b, float))
    return out


def assert_same(a: list[dict[str, np.ndarray]], b: list[dict[str, np.ndarray]]) -> None:
    for k, (one, other) in enumerate(zip(a, b, strict=True)):
        for name in one:
            np.testing.assert_array_equal(one[name], other[name], err_msg=f"{name}, step {k}")


@pytest.mark.parametrize("lock", [(), ("wrists",), LEGS_ONLY])
def test_signals_have_the_names_and_shapes_of_the_robot_whatever_is_locked(make, spec, lock):
    backend = make(PlantConfig(lock=lock), 3)
    wanted = {s.name: (3, *s.shape) for s in robot_signals(spec).values() if s.name != "command"}
    wanted |= {f"privileged.{name}": shape for name, shape in wanted.items()}
    wanted |= {f"privileged.{name}": (3, *shape) for name, shape in TRUE_ONLY.items()}
    assert {name: values.shape for name, values in backend.signals.items()} == wanted
    assert {values.dtype for values in backend.signals.values()} == {np.dtype(np.float32)}
    assert [spec.joint_names[i] for i in backend.free] == [j.name for j in spec.joints if j.group not in lock]


@pytest.mark.parametrize("lock", [(), ("wrists",), LEGS_ONLY])
def test_joint_signals_are_in_spec_order_and_locked_joints_stay_at_their_default(make, spec, start_of, lock):
    backend = make(PlantConfig(lock=lock, sensors={"joint_pos": SensorConfig(noise=0.001)}))
    wanted = spec.array("default_pos") + np.linspace(-0.1, 0.1, 27)
    begin(backend, start_of(base_pos=[0, 0, 3.0], joint_pos=wanted))
    locked = np.setdiff1d(np.arange(27), backend.free)
    for prefix, slack in (("", 0.0011), ("privileged.", 1e-6)):
        np.testing.assert_allclose(
            backend.signals[f"{prefix}joint_pos"][0, backend.free], wanted[backend.free], atol=slack
        )
    walk(backend, np.random.default_rng(0), 3, restart=False)
    default = spec.array("default_pos", [spec.joint_names[i] for i in locked]).astype(np.float32)
    for prefix in ("", "privileged."):
        np.testing.assert_array_equal(backend.signals[f"{prefix}joint_pos"][:, locked], np.tile(default, (2, 1)))
        for name in ("joint_vel", "joint_effort"):
            assert (backend.signals[prefix + name][:, locked] == 0).all()
            assert (backend.signals[prefix + name][:, backend.free] != 0).all()


def test_signal_arrays_stay_the_same_objects(make, start_of):
    backend = make()
    arrays = dict(backend.signals)
    rng = begin(backend, start_of())
    walk(backend, rng, 5)
    backend.restore(backend.state())
    assert all(backend.signals[name] is values for name, values in arrays.items())


def test_servos_hold_the_targets_of_their_own_joints(make, spec, start_of):
    backend = make(PlantConfig(), 1)
    offset = np.random.default_rng(0).uniform(-0.1, 0.1, 27)
    rng = begin(backend, start_of(1, base_pos=[0, 0, 3.0]))
    targets = (spec.array("default_pos") + offset).astype(np.float32)[None]
    for _ in range(20):
        backend.step(targets)
    backend.measure(rng)
    reached = backend.signals["joint_pos"][0] - spec.array("default_pos")
    assert np.corrcoef(reached, offset)[0, 1] > 0.98


def test_servo_torque_is_the_specs_gains_clipped_at_its_limits(make, spec, start_of):
    backend = make(PlantConfig(decimation=1), 2)
    default, speed = spec.array("default_pos"), 0.0
    begin(backend, start_of(base_pos=[0, 0, 3.0]))
    targets = np.stack([default + 0.05, default + 3.0]).astype(np.float32)
    backend.step(targets)
    effort = backend.signals["privileged.joint_effort"]
    np.testing.assert_allclose(effort[0], spec.array("stiffness") * 0.05 - spec.array("damping") * speed, rtol=1e-4)
    np.testing.assert_allclose(effort[1], spec.array("effort_limit"), rtol=1e-6)
    moved, turning = (backend.signals[f"privileged.joint_{k}"][0].copy() for k in ("pos", "vel"))
    backend.step(targets)
    moved, turning = (backend.signals[f"privileged.joint_{k}"][0] for k in ("pos", "vel"))
    servo = spec.array("stiffness") * (targets[0] - moved) - spec.array("damping") * turning
    wanted = np.clip(servo, -spec.array("effort_limit"), spec.array("effort_limit"))
    np.testing.assert_allclose(backend.signals["privileged.joint_effort"][0], wanted, rtol=1e-4, atol=1e-3)


@pytest.mark.parametrize("turn", [0.0, 0.7])
def test_a_robot_spinning_about_z_with_a_turned_torso(make, spec, start_of, turn):
    joint_pos = spec.array("default_pos")
    joint_pos[spec.index(["torso_joint"])] = turn
    backend = make(PlantConfig(), 1)
    begin(
        backend,
        start_of(
            1, base_pos=[0, 0, 3.0], base_quat=about("z", 0.4), base_vel=[0, 0, 0, 0, 0, 1.5], joint_pos=joint_pos
        ),
    )
    s = backend.signals
    np.testing.assert_allclose(s["privileged.base_ang_vel"][0], [0, 0, 1.5], atol=1e-6)
    np.testing.assert_allclose(s["imu_gyro"][0], [0, 0, 1.5], atol=1e-6)
    np.testing.assert_allclose(s["privileged.base_quat"][0], about("z", 0.4), atol=1e-6)
    np.testing.assert_allclose(s["imu_quat"][0], about("z", 0.4 + turn), atol=1e-6)


def test_a_tilted_robot_reads_velocities_in_its_own_frames(make, spec, start_of):
    joint_pos = spec.array("default_pos")
    joint_pos[spec.index(["torso_joint"])] = 0.7
    quat = times(about("z", 0.5), about("y", 0.6))
    linear, angular = np.array([0.5, -0.3, 0.2]), np.array([0.1, 0.2, 0.3])
    backend = make(PlantConfig(), 1)
    begin(backend, start_of(1, base_pos=[0, 0, 3.0], base_quat=quat, base_vel=[*linear, *angular], joint_pos=joint_pos))
    s = backend.signals
    np.testing.assert_allclose(s["privileged.base_lin_vel"][0], rotation(quat).T @ linear, atol=1e-6)
    np.testing.assert_allclose(s["privileged.base_ang_vel"][0], angular, atol=1e-6)
    np.testing.assert_allclose(s["imu_gyro"][0], rotation(about("z", 0.7)).T @ angular, atol=1e-6)
    np.testing.assert_allclose(s["imu_quat"][0], times(quat, about("z", 0.7)), atol=1e-6)


def test_the_base_velocity_is_the_change_of_its_position(make, start_of):
    quat = times(about("z", 2.0), about("y", 0.3))
    plant = PlantConfig(timestep=0.001, decimation=1)
    backend = make(plant, 1)
    rng = begin(backend, start_of(1, base_pos=[0, 0, 3.0], base_quat=quat, base_vel=[1.0, -0.5, 0.3, 0.5, -0.4, 0.8]))
    for _ in range(5):
        before = snapshot(backend)
        walk(backend, rng, 1, restart=False)
        moved = backend.signals["privileged.base_pos"][0] - before["privileged.base_pos"][0]
        walk(backend, rng, 1, restart=False)
        # After a step, readings are those at its start: where the positions of the step before ended.
        in_base = rotation(before["privileged.base_quat"][0]).T @ (moved / plant.control_dt)
        np.testing.assert_allclose(backend.signals["privileged.base_lin_vel"][0], in_base, atol=0.02)


def test_feet_carry_the_weight_of_a_standing_robot_upwards(make, spec, start_of, default_targets):
    backend = make(PlantConfig(), 1)
    weight = build_model(spec, ModelConfig()).body_subtreemass[0] * 9.81
    rng = begin(backend, start_of(1))
    forces = []
    for _ in range(40):
        backend.step(default_targets(1))
        forces.append(backend.signals["privileged.foot_force"][0].copy())
    backend.measure(rng)
    mean = np.mean(forces[20:], axis=0)
    assert (mean[:, 2] > 0.4 * weight).all()
    np.testing.assert_allclose(mean.sum(axis=0)[2], weight, rtol=0.02)
    assert np.abs(mean.sum(axis=0)[:2]).max() < 0.05 * weight
    up = rotation(backend.signals["imu_quat"][0]).T @ [0, 0, 9.81]
    np.testing.assert_allclose(backend.signals["imu_accel"][0], up, atol=0.3)
    s = backend.signals
    assert (s["privileged.foot_up"][0, :, 2] > 0.99).all()
    assert s["privileged.foot_pos"][0, 0, 1] > 0.1 > -0.1 > s["privileged.foot_pos"][0, 1, 1]


def test_a_falling_robot_feels_nothing(make, start_of, default_targets):
    backend = make(PlantConfig(), 1)
    rng = begin(backend, start_of(1, base_pos=[0, 0, 5.0]))
    for _ in range(5):
        backend.step(default_targets(1))
    backend.measure(rng)
    assert (backend.signals["privileged.foot_force"] == 0).all()
    np.testing.assert_allclose(backend.signals["imu_accel"], 0, atol=0.3)
    speed = 0.1 * 9.81
    np.testing.assert_allclose(backend.signals["privileged.base_lin_vel"][0, 2], -speed, atol=0.06)
    np.testing.assert_allclose(backend.signals["privileged.foot_vel"][0, :, 2], -speed, atol=0.1)


def test_a_push_sets_the_horizontal_velocity_of_the_base(make, start_of, default_targets):
    backend = make(PlantConfig(timestep=0.001, decimation=1), 2)
    begin(backend, start_of(base_pos=[0, 0, 3.0], base_quat=about("z", np.pi / 2), base_vel=[0.2, 0, 0.4, 0, 0, 0]))
    backend.push(np.array([1]), np.array([[1.0, -0.5]]))
    backend.step(default_targets(2))
    np.testing.assert_allclose(
        backend.signals["privileged.base_lin_vel"], [[0, -0.2, 0.4], [-0.5, -1.0, 0.4]], atol=1e-5
    )


def test_without_imperfections_the_measured_signals_are_the_truth(make, start_of):
    backend = make(PlantConfig())
    for signals in walk(backend, begin(backend, start_of()), 6):
        for name in (n for n in signals if not n.startswith("privileged.")):
            np.testing.assert_array_equal(signals[name], signals[f"privileged.{name}"], err_msg=name)


def test_imperfections_touch_the_measured_signals_only(make, start_of):
    sensors = {n: SensorConfig(noise=0.1, bias=0.1) for n in ("joint_pos", "joint_vel", "imu_gyro", "imu_quat")}
    perfect, noisy = make(PlantConfig()), make(PlantConfig(sensors=sensors))
    begin(perfect, start_of())
    begin(noisy, start_of())
    for k in range(5):
        targets = np.full((2, 27), 0.01 * k, np.float32)
        for backend in (perfect, noisy):
            backend.step(targets)
            backend.measure(np.random.default_rng(k))
    for name in perfect.signals:
        same = np.array_equal(perfect.signals[name], noisy.signals[name])
        assert same == (name not in sensors), name


@pytest.mark.parametrize("prefix", ["measured", "after reset"])
def test_a_reset_leaves_the_other_simulations_alone(make, start_of, prefix):
    backend = make(EVERYTHING_VARIES, 4)
    rng = begin(backend, start_of(4))
    walk(backend, rng, 3, restart=False)
    before = snapshot(backend)
    ids = np.array([0, 2])
    backend.reset(ids, start_of(2, base_pos=[[0, 0, 2.0], [0, 0, 3.0]]), rng)
    if prefix == "measured":
        backend.measure(rng, ids)
    for name, values in backend.signals.items():
        np.testing.assert_array_equal(values[[1, 3]], before[name][[1, 3]], err_msg=name)
    np.testing.assert_array_equal(backend.signals["privileged.base_pos"][ids, 2], [2.0, 3.0])


def test_thread_counts_give_bit_identical_results(make, start_of):
    runs = []
    for threads in (1, 2):
        backend = make(EVERYTHING_VARIES, 8, threads)
        runs.append(walk(backend, begin(backend, start_of(8)), 20))
    assert_same(*runs)


def test_a_restored_backend_continues_bit_identically(make, start_of):
    backend = make(EVERYTHING_VARIES, 4)
    rng = begin(backend, start_of(4))
    backend.set_parameter("joint.*_knee.damping", np.array([0.0, 0.5, 1.0, 1.5]))
    backend.set_parameter("sensor.imu_gyro.bias", [0.1, 0.2, 0.3], np.array([1]))
    walk(backend, rng, 11)
    state, rng_state, at_save = backend.state(), rng.bit_generator.state, snapshot(backend)
    expected = walk(backend, rng, 15)
    fresh, used = make(EVERYTHING_VARIES, 4, 2), make(EVERYTHING_VARIES, 4)
    used_rng = begin(used, start_of(4), seed=5)
    used.set_parameter("joint.*.stiffness", 20.0)
    used.set_parameter("link.pelvis.com", [0.1, 0.0, 0.0])
    used.set_parameter("sensor.imu_accel.noise", 1.0)
    walk(used, used_rng, 5)
    for other in (fresh, used, backend):
        other.restore(state)
        assert_same([snapshot(other)], [at_save])
        rng.bit_generator.state = rng_state
        assert_same(walk(other, rng, 15), expected)


def test_saved_states_do_not_change_as_the_simulation_goes_on(make, start_of):
    backend = make(EVERYTHING_VARIES)
    rng = begin(backend, start_of())
    state = backend.state()
    kept = str(state)
    walk(backend, rng, 5)
    assert str(state) == kept


@pytest.mark.parametrize("timestep", [0.005, 0.0025])
def test_a_delay_is_the_age_of_the_command_in_each_simulation(make, spec, start_of, timestep):
    delays = np.array([0.0, 0.005, 0.01, 0.02])
    backend = make(PlantConfig(timestep=timestep, decimation=1, max_delay=0.02), 4)
    backend.set_parameter("actuator.*.delay", delays)
    joint_pos = spec.array("default_pos") + 0.1
    begin(backend, start_of(4, base_pos=[0, 0, 3.0], joint_pos=joint_pos))
    wait, efforts = 3, []
    for k in range(wait + round(0.03 / timestep)):
        backend.step(np.tile(joint_pos + 0.05 * (k >= wait), (4, 1)).astype(np.float32))
        efforts.append(np.abs(backend.signals["privileged.joint_effort"]).max(axis=1))
    pushed = np.stack(efforts) > 1.0
    # Before the step of the command no servo does anything: an episode does not start with a command of zero.
    measured = (pushed.argmax(axis=0) - wait) * timestep
    np.testing.assert_allclose(measured, delays, atol=1e-9)
    assert pushed.any(axis=0).all()
    assert np.abs(np.stack(efforts)[:wait]).max() < 1e-3


def test_a_delay_may_end_within_a_control_step(make, spec, start_of):
    """With 4 physics steps of 5 ms, a target 10 ms old acts on the last two of the first control step only."""
    speeds = []
    for delay in (0.0, 0.01, 0.02):
        backend = make(PlantConfig(max_delay=0.02), 1)
        backend.set_parameter("actuator.*.delay", delay)
        start = spec.array("default_pos")
        begin(backend, start_of(1, base_pos=[0, 0, 3.0]))
        backend.step((start + 0.3)[None].astype(np.float32))
        speeds.append(np.abs(backend.signals["privileged.joint_vel"][0]))
    assert np.median(speeds[0]) > 1.5 * np.median(speeds[1]) > 0.5
    assert speeds[2].max() < 1e-3


def test_parameters_are_set_by_name_in_the_simulations_asked_for(make, start_of):
    backend = make(PlantConfig(), 3)
    backend.set_parameter("link.*.mass", 20.0, np.array([1]))
    backend.set_parameter("sensor.joint_pos.bias", np.linspace(0.1, 0.2, 27), np.array([2]))
    rng = begin(backend, start_of(3))
    off = backend.signals["joint_pos"] - backend.signals["privileged.joint_pos"]
    np.testing.assert_allclose(off[2], np.linspace(0.1, 0.2, 27), atol=1e-6)
    assert (off[:2] == 0).all()
    walk_end = walk(backend, rng, 5, restart=False)[-1]
    heights = walk_end["privileged.base_pos"][:, 2]
    assert abs(heights[0] - heights[1]) > 1e-3


def test_a_bias_per_joint_keeps_spec_order_when_joints_are_locked(make, start_of):
    backend = make(PlantConfig(lock=LEGS_ONLY))
    backend.set_parameter("sensor.joint_pos.bias", np.linspace(0.1, 0.2, 27))
    begin(backend, start_of())
    off = (backend.signals["joint_pos"] - backend.signals["privileged.joint_pos"])[0]
    np.testing.assert_allclose(off[:WAIST], np.linspace(0.1, 0.2, 27)[:WAIST], atol=1e-6)
    assert (off[WAIST:] == 0).all()


def test_a_sensor_delay_reads_the_past(make, start_of):
    plant = PlantConfig(sensors={"joint_pos": SensorConfig(delay=(0.04, 0.04))})
    backend = make(plant, 1)
    rng = begin(backend, start_of(1))
    signals = walk(backend, rng, 8, restart=False)
    for now, before in zip(signals[2:], signals, strict=False):
        np.testing.assert_array_equal(now["joint_pos"], before["privileged.joint_pos"])
        np.testing.assert_array_equal(now["joint_vel"], now["privileged.joint_vel"])
    backend.set_parameter("sensor.joint_pos.delay", 0.0)
    last = walk(backend, rng, 1, restart=False)[0]
    np.testing.assert_array_equal(last["joint_pos"], last["privileged.joint_pos"])


@pytest.mark.parametrize(
    ("name", "nearest"),
    [("joint.left_kne.damping", "left_knee"), ("sensor.imu_gyr.bias", "imu_gyro"), ("motor.x.kp", "actuator")],
)
def test_unknown_parameters_list_the_nearest(make, name, nearest):
    with pytest.raises(UnknownNameError, match=nearest):
        make().set_parameter(name, 1.0)


@pytest.mark.parametrize("injury", ["speed", "target", "position"])
def test_a_broken_simulation_is_named_and_harms_no_other(
    make, start_of, default_targets, injury, tmp_path, monkeypatch
):
    monkeypatch.chdir(tmp_path)  # MuJoCo writes its warnings to a file in the working directory
    healthy, backend = make(PlantConfig(lock=LEGS_ONLY), 4), make(PlantConfig(lock=LEGS_ONLY), 4)
    start, targets = start_of(4), default_targets(4)
    begin(healthy, start)
    start.base_vel, start.base_pos = start.base_vel.copy(), start.base_pos.copy()
    if injury == "speed":
        start.base_vel[1] = 1e9
    if injury == "position":
        start.base_pos[1, 0] = np.nan
    rng = begin(backend, start)
    injured = targets.copy()
    if injury == "target":
        injured[1, 3] = np.nan
    assert backend.step(injured).tolist() == [1]
    assert healthy.step(targets).tolist() == []
    backend.measure(rng)
    healthy.measure(rng)
    for name, values in backend.signals.items():
        assert np.isfinite(values).all(), name
        np.testing.assert_array_equal(values[[0, 2, 3]], healthy.signals[name][[0, 2, 3]], err_msg=name)
    backend.reset(np.array([1]), start_of(1), rng)
    healthy.reset(np.array([1]), start_of(1), rng)
    for _ in range(3):
        assert backend.step(targets).tolist() == healthy.step(targets).tolist() == []
    backend.measure(rng)
    healthy.measure(rng)
    assert_same([snapshot(backend)], [snapshot(healthy)])


def test_the_reference_plant_is_exact_whatever_was_trained_on(spec):
    trained = replace(EVERYTHING_VARIES, ground=RoughGround())
    plant = reference_plant(trained)
    assert (plant.timestep, plant.decimation, plant.control_dt) == (0.002, 10, pytest.approx(trained.control_dt))
    assert (plant.lock, plant.collision, plant.solver, plant.fuse) == ((), "full", "accurate", False)
    assert (plant.randomize, plant.sensors) == ((), {})
    assert (plant.robot, plant.max_delay, plant.ground) == (trained.robot, trained.max_delay, trained.ground)
    with pytest.raises(UserError, match=r"0\.005 s is no multiple"):
        reference_plant(PlantConfig(timestep=0.005, decimation=1))


def test_the_reference_plant_moves_all_joints(make):
    backend = make(reference_plant(EVERYTHING_VARIES), 1)
    assert len(backend.free) == 27


@pytest.mark.parametrize("plant", [PlantConfig(), replace(EVERYTHING_VARIES, ground=RoughGround(levels=3, step=1 / 3))])
def test_a_plant_survives_the_way_through_json(plant):
    assert plant_from_json(plant_to_json(plant)) == plant


def test_a_plant_of_another_version_is_refused():
    text = plant_to_json(PlantConfig()).replace('"fuse"', '"weld"')
    with pytest.raises(UserError, match=r"another version.*weld"):
        plant_from_json(text)


def test_an_unknown_backend_lists_the_known_ones():
    with pytest.raises(UnknownNameError, match="did you mean mujoco"):
        make_backend("mujocco", PlantConfig(), 1)
