from collections.abc import Mapping
from dataclasses import replace

import mujoco
import numpy as np
import pytest
import torch
from torch import Tensor

import robots
from policies.interface import StateSpec, WalkingConfig, WalkingInterface, initial_state, restarted
from robots.model import build_model, joint_addresses
from robots.spec import RobotSpec
from sim.gait import GaitConfig, advance_phase, foot_phases, standing, swing_progress

DT = 0.02
GAIT = GaitConfig()


@pytest.fixture(scope="module")
def spec() -> RobotSpec:
    return robots.load("unitree_h1_2")


def make(spec: RobotSpec, gait: GaitConfig = GAIT, dt: float = DT, **walking: object) -> WalkingInterface:
    return WalkingInterface(spec, gait, dt, replace(WalkingConfig(), **walking))


def random_signals(spec: RobotSpec, num: int, seed: int = 0) -> dict[str, Tensor]:
    draw = torch.Generator().manual_seed(seed)
    quat = torch.randn(num, 4, generator=draw)
    return {
        "joint_pos": torch.randn(num, len(spec.joints), generator=draw),
        "joint_vel": torch.randn(num, len(spec.joints), generator=draw),
        "imu_quat": quat / quat.norm(dim=1, keepdim=True),
        "imu_gyro": torch.randn(num, 3, generator=draw),
        "command": torch.randn(num, 3, generator=draw),
    }


def random_state(interface: WalkingInterface, num: int, seed: int = 1) -> dict[str, Tensor]:
    draw = torch.Generator().manual_seed(seed)
    state = {k: torch.randn(num, *s.shape, generator=draw) for k, s in interface.states.items()}
    return state | {"phase": torch.rand(num, 1, generator=draw)}


def random_privileged(num: int, seed: int = 2) -> dict[str, Tensor]:
    draw = torch.Generator().manual_seed(seed)
    per_foot = {k: torch.randn(num, 2, 3, generator=draw) for k in ("foot_pos", "foot_vel", "foot_up", "foot_force")}
    per_base = {k: torch.randn(num, 3, generator=draw) for k in ("base_lin_vel", "base_ang_vel", "base_pos")}
    signals = per_foot | per_base | {"ground": torch.randn(num, 1, generator=draw)}
    return {f"privileged.{k}": v for k, v in signals.items()}


def mirrored(values: Tensor, mirror: tuple[Tensor, Tensor]) -> Tensor:
    return values[:, mirror[0]] * mirror[1]


def mirrored_joints(spec: RobotSpec, values: Tensor) -> Tensor:
    permutation, signs = spec.mirror()
    return values[:, torch.as_tensor(permutation)] * torch.as_tensor(signs, dtype=torch.float32)


def mirrored_signals(spec: RobotSpec, signals: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """What a robot feels that does the same on the other side of the mirror y -> -y."""
    return {
        "joint_pos": mirrored_joints(spec, signals["joint_pos"]),
        "joint_vel": mirrored_joints(spec, signals["joint_vel"]),
        "imu_quat": signals["imu_quat"] * torch.tensor([1.0, -1, 1, -1]),
        "imu_gyro": signals["imu_gyro"] * torch.tensor([-1.0, 1, -1]),
        "command": signals["command"] * torch.tensor([1.0, -1, -1]),
    }


def mirrored_state(interface: WalkingInterface, state: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """The other foot is where this one was: half a cycle apart."""
    phase = state["phase"]
    out = {
        "phase": torch.where(phase >= 0.5, phase - 0.5, phase + 0.5),
        "action": mirrored(state["action"], interface.mirror_action()),
    }
    if "history" in state:
        permutation, signs = interface.mirror_obs()
        past = len(permutation) - interface.frame
        out["history"] = mirrored(state["history"], (permutation[:past], signs[:past]))
    return out


# ---- attitude --------------------------------------------------------------------------------------------------------


def test_base_attitude_and_rate_come_from_the_torso_imu_with_the_waist_turned_and_turning(spec: RobotSpec) -> None:
    model = build_model(spec)
    data, rng = mujoco.MjData(model), np.random.default_rng(0)
    interface = make(spec)
    pos_at, vel_at = joint_addresses(model, spec.joint_names)
    waist = spec.index(spec.imu_joints)
    for _ in range(20):
        quat = rng.normal(size=4)
        data.qpos[:3], data.qpos[3:7] = (0, 0, 2), quat / np.linalg.norm(quat)
        data.qpos[pos_at] = rng.uniform(*spec.array("pos_limit").T)
        data.qvel[:] = rng.normal(size=model.nv) * 3
        mujoco.mj_forward(model, data)
        measured = {
            "joint_pos": data.qpos[pos_at],
            "joint_vel": data.qvel[vel_at],
            "imu_quat": data.sensor("imu_quat").data,
            "imu_gyro": data.sensor("imu_gyro").data,
            "command": np.zeros(3),
        }
        signals = {k: torch.tensor(v, dtype=torch.float32)[None] for k, v in measured.items()}
        obs = interface.observe(signals, initial_state(interface.states, 1))[0].numpy()
        assert abs(data.qpos[pos_at][waist]).max() > 1e-3
        assert abs(data.qvel[vel_at][waist]).max() > 1e-3
        # A free joint's angular velocity is in the frame of its body; the third row of its rotation is world up there.
        np.testing.assert_allclose(obs[:3], 0.25 * data.qvel[3:6], atol=5e-6)
        np.testing.assert_allclose(obs[3:6], -data.body(spec.base_body).xmat.reshape(3, 3)[2], atol=1e-6)


def test_an_upright_robot_feels_gravity_straight_down(spec: RobotSpec) -> None:
    interface = make(spec)
    signals = {k: torch.zeros_like(v) for k, v in random_signals(spec, 1).items()}
    signals["imu_quat"][:, 0] = 1
    obs = interface.observe(signals, initial_state(interface.states, 1))
    np.testing.assert_array_equal(obs[0, 3:6], [0, 0, -1])


def test_neither_heading_nor_the_sign_of_the_quaternion_is_observed(spec: RobotSpec) -> None:
    interface, signals = make(spec), random_signals(spec, 32)
    state = random_state(interface, 32)
    obs = interface.observe(signals, state)
    w, x, y, z = signals["imu_quat"].T
    c, s = np.cos(0.6), np.sin(0.6)
    turned = torch.stack([c * w - s * z, c * x - s * y, c * y + s * x, c * z + s * w], dim=1)
    torch.testing.assert_close(interface.observe(signals | {"imu_quat": turned}, state), obs, atol=1e-6, rtol=1e-5)
    opposite = signals | {"imu_quat": -signals["imu_quat"]}
    torch.testing.assert_close(interface.observe(opposite, state), obs, atol=0, rtol=0)


def test_a_frame_holds_what_the_docstring_says(spec: RobotSpec) -> None:
    interface, signals = make(spec), random_signals(spec, 5)
    state, legs = random_state(interface, 5), spec.index(spec.group("legs"))
    obs, n = interface.observe(signals, state), interface.num_actions
    assert obs.shape == (5, interface.num_obs) == (5, 17 + 3 * n)
    default = torch.as_tensor(spec.array("default_pos"), dtype=torch.float32)
    torch.testing.assert_close(obs[:, 6:9], signals["command"] * torch.tensor([2.0, 2, 1]))
    torch.testing.assert_close(obs[:, 9 : 9 + n], (signals["joint_pos"] - default)[:, legs])
    torch.testing.assert_close(obs[:, 9 + n : 9 + 2 * n], signals["joint_vel"][:, legs] * 0.05)
    torch.testing.assert_close(obs[:, 9 + 2 * n : 9 + 3 * n], state["action"])
    sine, cosine = torch.sin(2 * np.pi * state["phase"]), torch.cos(2 * np.pi * state["phase"])
    clock = torch.cat([sine, cosine, sine * obs[:, 6:9], cosine * obs[:, 6:9]], dim=1)
    torch.testing.assert_close(obs[:, 9 + 3 * n :], clock)


# ---- clock and reference ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("period", "dt"), [(0.8, 0.02), (0.7, 0.016), (0.64, 0.02), (1.1, 0.005)])
def test_the_clock_is_the_tasks_own_bit_by_bit(spec: RobotSpec, period: float, dt: float) -> None:
    gait = replace(GAIT, period=period)
    interface, rng, num = make(spec, gait, dt), np.random.default_rng(3), 64
    signals, state = random_signals(spec, num), initial_state(interface.states, num)
    phase, command = np.zeros(num, np.float32), np.zeros((num, 3), np.float32)
    action, stops = torch.zeros(num, interface.num_actions), 0
    for _ in range(600):
        changed = rng.random(num) < 0.05
        kinds = rng.choice([0.0, 0.03, 1.0], (num, 1))  # nothing, less than counts, walk
        command[changed] = (rng.uniform(-1, 1, (num, 3)) * kinds).astype(np.float32)[changed]
        stand = standing(command, gait)
        expected = advance_phase(phase, stand, dt, gait)
        signals["command"] = torch.from_numpy(command.copy())
        _, state = interface.act(action, interface.observe(signals, state), signals, state)
        np.testing.assert_array_equal(state["phase"][:, 0].numpy(), expected)
        stops += int((expected == phase).sum())
        phase = expected
    assert stops > 1000


@pytest.mark.parametrize("command", [(0.0, 0.0, 0.0), (0.05, -0.05, 0.05)])
def test_a_standing_robot_is_asked_for_the_default_pose(spec: RobotSpec, command: tuple[float, ...]) -> None:
    interface, num = make(spec), 50
    signals = random_signals(spec, num) | {"command": torch.tensor([command]).repeat(num, 1)}
    state = initial_state(interface.states, num) | {"phase": torch.arange(num)[:, None] / num}
    for _ in range(round(0.5 * GAIT.period / DT) + 1):
        targets, state = interface.act(torch.zeros(num, interface.num_actions), torch.empty(0), signals, state)
    default = torch.as_tensor(spec.array("default_pos"), dtype=torch.float32).expand(num, -1)
    torch.testing.assert_close(targets, default, atol=0, rtol=0)
    assert set(state["phase"].flatten().tolist()) == {0.0, 0.5}


def test_a_command_too_small_to_walk_is_observed_as_none(spec: RobotSpec) -> None:
    interface = make(spec)
    signals = random_signals(spec, 2) | {"command": torch.tensor([[0.05, -0.05, 0.05], [0.2, 0.0, 0.0]])}
    obs = interface.observe(signals, initial_state(interface.states, 2))
    np.testing.assert_array_equal(obs[:, 6:9], np.array([[0, 0, 0], [0.4, 0, 0]], np.float32))


def walked(spec: RobotSpec, command: tuple[float, float, float]) -> tuple[np.ndarray, np.ndarray]:
    """Phases (N) after a step and the reference there (N, J) as the angles away from the default pose."""
    interface = make(spec)
    phase = torch.arange(80)[:, None] / 80
    signals = random_signals(spec, 80) | {"command": torch.tensor([command]).repeat(80, 1)}
    state = initial_state(interface.states, 80) | {"phase": phase}
    targets, state = interface.act(torch.zeros(80, interface.num_actions), torch.empty(0), signals, state)
    return state["phase"][:, 0].numpy(), targets.numpy() - spec.array("default_pos").astype(np.float32)


@pytest.mark.parametrize("command", [(0.7, 0.0, 0.0), (0.0, 0.4, 0.0), (0.3, -0.3, 0.5), (0.0, 0.0, 0.6)])
def test_the_reference_keeps_the_feet_level(spec: RobotSpec, command: tuple[float, float, float]) -> None:
    _, away = walked(spec, command)
    for side in ("left", "right"):
        pitch = spec.index([f"{side}_{part}_joint" for part in ("hip_pitch", "knee", "ankle_pitch")])
        roll = spec.index([f"{side}_{part}_joint" for part in ("hip_roll", "ankle_roll")])
        assert abs(away).max() > 0.05
        np.testing.assert_allclose(away[:, pitch].sum(1), 0, atol=1e-6)
        np.testing.assert_allclose(away[:, roll].sum(1), 0, atol=1e-6)


def test_the_reference_lifts_the_foot_that_the_gait_swings(spec: RobotSpec) -> None:
    phase, away = walked(spec, (0.0, 0.0, 0.6))
    progress = swing_progress(foot_phases(phase), GAIT)
    knees = away[:, spec.index(["left_knee_joint", "right_knee_joint"])]
    np.testing.assert_allclose(knees, 2 * GAIT.lift * np.sin(np.pi * progress), atol=1e-6)
    assert (progress > 0).any(axis=0).all()


def test_a_foot_in_stance_moves_against_the_command(spec: RobotSpec) -> None:
    phase, away = walked(spec, (0.7, 0.0, 0.0))
    stands = (phase > 0.02) & (phase < GAIT.stance - 0.02)
    hip = away[stands, spec.index(["left_hip_pitch_joint"])[0]][np.argsort(phase[stands])]
    assert (np.diff(hip) > 0).all()  # pitch about y: a rising angle swings the leg back, the body goes forward
    assert hip[0] < 0.02 < hip[-1]


# ---- mirror ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("history", [1, 3])
@pytest.mark.parametrize("name", ["mirror_obs", "mirror_action", "mirror_privileged"])
def test_a_mirror_image_of_a_mirror_image_is_the_thing_itself(spec: RobotSpec, name: str, history: int) -> None:
    interface = make(spec, history=history)
    permutation, signs = getattr(interface, name)()
    width = {
        "mirror_obs": interface.num_obs,
        "mirror_action": interface.num_actions,
        "mirror_privileged": interface.privileged(random_privileged(1)).shape[1],
    }[name]
    assert permutation.shape == signs.shape == (width,)
    values = torch.randn(4, width)
    assert not torch.equal(mirrored(values, (permutation, signs)), values)
    assert torch.equal(mirrored(mirrored(values, (permutation, signs)), (permutation, signs)), values)


@pytest.mark.parametrize("history", [1, 3])
def test_a_mirrored_robot_observes_the_mirrored_observation(spec: RobotSpec, history: int) -> None:
    interface, signals = make(spec, history=history), random_signals(spec, 64)
    state = random_state(interface, 64)
    obs = interface.observe(signals, state)
    other = interface.observe(mirrored_signals(spec, signals), mirrored_state(interface, state))
    torch.testing.assert_close(other, mirrored(obs, interface.mirror_obs()), atol=2e-6, rtol=1e-5)


@pytest.mark.parametrize("history", [1, 3])
def test_a_mirrored_action_makes_the_mirrored_targets(spec: RobotSpec, history: int) -> None:
    interface, signals = make(spec, history=history), random_signals(spec, 64)
    state, action = random_state(interface, 64), torch.randn(64, interface.num_actions)
    obs = interface.observe(signals, state)
    targets, following = interface.act(action, obs, signals, state)
    other, later = interface.act(
        mirrored(action, interface.mirror_action()),
        mirrored(obs, interface.mirror_obs()),
        mirrored_signals(spec, signals),
        mirrored_state(interface, state),
    )
    torch.testing.assert_close(other, mirrored_joints(spec, targets), atol=2e-6, rtol=1e-5)
    for name, value in mirrored_state(interface, following).items():
        torch.testing.assert_close(later[name], value, atol=1e-6, rtol=1e-5)


def test_a_mirrored_world_gives_the_mirrored_privileged_vector(spec: RobotSpec) -> None:
    interface, signals = make(spec), random_privileged(32)
    reflect = torch.tensor([1.0, -1, 1])
    other = {k: v * reflect if v.shape[-1] == 3 else v for k, v in signals.items()}
    other["privileged.base_ang_vel"] = signals["privileged.base_ang_vel"] * torch.tensor([-1.0, 1, -1])
    for name in ("foot_pos", "foot_vel", "foot_up", "foot_force"):
        other[f"privileged.{name}"] = other[f"privileged.{name}"].flip(1)
    seen, expected = interface.privileged(other), mirrored(interface.privileged(signals), interface.mirror_privileged())
    torch.testing.assert_close(seen, expected, atol=0, rtol=0)


# ---- actions and state -----------------------------------------------------------------------------------------------


def test_targets_stay_within_the_limits_and_other_joints_in_the_default_pose(spec: RobotSpec) -> None:
    interface, signals = make(spec), random_signals(spec, 64)
    state, limits = random_state(interface, 64), spec.array("pos_limit").astype(np.float32)
    others = spec.index([n for n in spec.joint_names if n not in interface.legs])
    legs = spec.index(interface.legs)
    for size in (1e3, -1e3):
        action = torch.full((64, interface.num_actions), size)
        targets = interface.act(action, torch.empty(0), signals, state)[0].numpy()
        assert (targets >= limits[:, 0]).all()
        assert (targets <= limits[:, 1]).all()
        np.testing.assert_array_equal(targets[0, legs], limits[legs, 1 if size > 0 else 0])
        np.testing.assert_array_equal(
            targets[:, others], np.float32(spec.array("default_pos")[others])[None].repeat(64, 0)
        )


def test_an_action_moves_its_own_joint_by_its_scale(spec: RobotSpec) -> None:
    interface, signals = make(spec, action_scale=0.25, yaw_scale=0.1, ankle_scale=0.5), random_signals(spec, 12)
    signals["command"] = torch.zeros(12, 3)
    targets, _ = interface.act(0.5 * torch.eye(12), torch.empty(0), signals, initial_state(interface.states, 12))
    moved = (targets - torch.as_tensor(spec.array("default_pos"), dtype=torch.float32))[:, spec.index(interface.legs)]
    scales = [0.5 if "ankle" in n else 0.1 if "hip_yaw" in n else 0.25 for n in interface.legs]
    torch.testing.assert_close(moved, 0.5 * torch.diag(torch.tensor(scales)), atol=1e-6, rtol=0)


def test_history_stacks_frames_oldest_first(spec: RobotSpec) -> None:
    """Observation [frame t-2, frame t-1, frame t]; frames before the episode's start are zero."""
    stacked, single = make(spec, history=3), make(spec)
    long, short = initial_state(stacked.states, 4), initial_state(single.states, 4)
    frames = [torch.zeros(4, single.frame)] * 2
    for t in range(5):
        signals, action = random_signals(spec, 4, seed=t), torch.randn(4, single.num_actions)
        obs, frame = stacked.observe(signals, long), single.observe(signals, short)
        frames = [*frames[-2:], frame]
        torch.testing.assert_close(obs, torch.cat(frames, dim=1), atol=0, rtol=0)
        targets, long = stacked.act(action, obs, signals, long)
        expected, short = single.act(action, frame, signals, short)
        torch.testing.assert_close(targets, expected, atol=0, rtol=0)


@pytest.mark.parametrize("history", [1, 2, 4])
def test_states_have_the_shapes_they_announce(spec: RobotSpec, history: int) -> None:
    interface, signals = make(spec, history=history), random_signals(spec, 3)
    state = initial_state(interface.states, 3)
    obs = interface.observe(signals, state)
    _, following = interface.act(torch.zeros(3, interface.num_actions), obs, signals, state)
    assert obs.shape == (3, interface.num_obs) == (3, history * interface.frame)
    assert following.keys() == interface.states.keys() == state.keys()
    for name, s in interface.states.items():
        assert following[name].shape == state[name].shape == (3, *s.shape)
    assert ("history" in interface.states) == (history > 1)


def test_a_restart_touches_the_chosen_robots_only() -> None:
    specs = {"a": StateSpec(shape=(2,), initial=0.5), "b": StateSpec(shape=(3, 2))}
    state = {"a": torch.ones(4, 2), "b": torch.full((4, 3, 2), 7.0)}
    after = restarted(state, specs, torch.tensor([1, 3]))
    np.testing.assert_array_equal(after["a"], [[1, 1], [0.5, 0.5], [1, 1], [0.5, 0.5]])
    np.testing.assert_array_equal(after["b"][:, 0, 0], [7, 0, 7, 0])
    assert state["a"].eq(1).all()
    first = initial_state(specs, 4)
    assert all(torch.equal(restarted(state, specs, torch.arange(4))[k], first[k]) for k in specs)


def test_inputs_are_the_robots_own_signals(spec: RobotSpec) -> None:
    signals = make(spec).signals
    assert [s.name for s in signals] == ["joint_pos", "joint_vel", "imu_quat", "imu_gyro", "command"]
    assert signals[0].order == spec.joint_names
    assert signals[2].order == ("w", "x", "y", "z")
