from dataclasses import asdict, fields, replace

import numpy as np
import pytest

import robots
from robots.errors import UnknownNameError
from robots.signals import robot_signals
from sim.backend import make_backend
from sim.environment import Environment
from sim.gait import GaitConfig
from sim.tasks import TASKS, make_task
from sim.tasks.velocity import CommandConfig, PushConfig, RewardWeights, Velocity, flat

SPEC = robots.load("unitree_h1_2")
P, S = SPEC.mirror()
LEGS = slice(0, 12)
FEET = ("foot_pos", "foot_vel", "foot_up", "foot_force")


class Still:
    """A backend without physics: signals are what a test writes into them."""

    def __init__(self, num: int) -> None:
        self.spec, self.num_envs, self.pushes = SPEC, num, []
        self.signals = {}
        shapes = {s.name: s.shape for s in robot_signals(SPEC).values() if s.name != "command"}
        for name, shape in shapes.items():
            self.signals[name] = np.zeros((num, *shape), np.float32)
            self.signals[f"privileged.{name}"] = np.zeros((num, *shape), np.float32)
        for name, shape in {"base_lin_vel": 3, "base_ang_vel": 3, "base_pos": 3, "base_quat": 4}.items():
            self.signals[f"privileged.{name}"] = np.zeros((num, shape), np.float32)
        for name in FEET:
            self.signals[f"privileged.{name}"] = np.zeros((num, 2, 3), np.float32)

    def push(self, ids: np.ndarray, velocity: np.ndarray) -> None:
        self.pushes.append((ids, velocity))


def still(num: int, **changes) -> tuple[Velocity, Still, dict[str, np.ndarray]]:
    """The flat task over robots standing perfectly: upright, at the wanted height, feet flat, soles on the ground."""
    task, backend = Velocity(replace(flat().config, **changes)), Still(num)
    task.bind(backend)
    task.begin(np.arange(num), np.random.default_rng(0))
    s = {name.removeprefix("privileged."): v for name, v in backend.signals.items() if name.startswith("privileged.")}
    s["joint_pos"][:] = SPEC.array("default_pos")
    s["base_pos"][:, 2], s["base_quat"][:, 0] = task.config.height, 1
    s["foot_pos"][:, 0], s["foot_pos"][:, 1] = (0, 0.16, 0.045), (0, -0.16, 0.045)
    s["foot_up"][:, :, 2], s["foot_force"][:, :, 2] = 1, 330
    task.signals["command"][:] = 0
    task.stand[:] = True
    return task, backend, s


def hold(num: int) -> np.ndarray:
    return np.tile(SPEC.array("default_pos"), (num, 1)).astype(np.float32)


def terms_of(task: Velocity, targets: np.ndarray | None = None) -> dict[str, np.ndarray]:
    return task._reward_terms(hold(len(task.phase)) if targets is None else targets)


def scramble(s: dict[str, np.ndarray], rng: np.random.Generator, size: float = 1.0) -> None:
    """Any state a robot on its feet could be in."""
    for name, scale in {
        "joint_vel": 2,
        "joint_effort": 50,
        "base_lin_vel": 1,
        "base_ang_vel": 1,
        "foot_vel": 0.3,
    }.items():
        s[name][:] = size * scale * rng.normal(size=s[name].shape)
    s["joint_pos"][:] = SPEC.array("default_pos") + size * 0.4 * rng.normal(size=s["joint_pos"].shape)
    s["base_pos"][:] = [0.3, -0.2, 0.97] + size * 0.03 * rng.normal(size=s["base_pos"].shape)
    quat = [1, 0, 0, 0] + size * 0.2 * rng.normal(size=s["base_quat"].shape)
    s["base_quat"][:] = quat / np.linalg.norm(quat, axis=1, keepdims=True)
    s["foot_pos"][:] += size * 0.03 * rng.normal(size=s["foot_pos"].shape)
    s["foot_force"][:] = np.maximum(size * 200 * rng.normal(size=s["foot_force"].shape), 0)
    up = [0, 0, 1] + size * 0.2 * rng.normal(size=s["foot_up"].shape)
    s["foot_up"][:] = up / np.linalg.norm(up, axis=2, keepdims=True)


def mirrored(s: dict[str, np.ndarray], source: slice, image: slice) -> None:
    """Write into the simulations `image` what those of `source` look like in a mirror (y to -y)."""
    for name in ("joint_pos", "joint_vel", "joint_effort"):
        s[name][image] = S * s[name][source][:, P]
    for name, signs in {
        "base_lin_vel": (1, -1, 1),
        "base_pos": (1, -1, 1),
        "base_ang_vel": (-1, 1, -1),
        "base_quat": (1, -1, 1, -1),
    }.items():
        s[name][image] = s[name][source] * signs
    for name in FEET:
        s[name][image] = s[name][source][:, ::-1] * (1, -1, 1)


@pytest.mark.parametrize("standing", [False, True])
def test_a_robot_in_the_mirror_earns_the_same(standing):
    n = 50
    real, image = slice(0, n), slice(n, 2 * n)
    task, _, s = still(2 * n)
    rng = np.random.default_rng(0)
    task.phase[real] = rng.random(n)
    task.phase[image] = (task.phase[real] + 0.5) % 1
    task.stand[:] = standing
    task.signals["command"][real] = 0 if standing else rng.uniform(-1, 1, (n, 3))
    task.signals["command"][image] = task.signals["command"][real] * (1, -1, -1)
    targets = np.empty((2 * n, 27), np.float32)
    for _ in range(3):
        scramble(s, rng, 0.3)
        mirrored(s, real, image)
        targets[real] = hold(n) + 0.3 * rng.normal(size=(n, 27))
        targets[image] = S * targets[real][:, P]
        phases, last = task.phase.copy(), (task._last_vel.copy(), task._last_targets.copy())
        for name, term in terms_of(task, targets).items():
            np.testing.assert_allclose(term[image], term[real], rtol=1e-4, atol=1e-5, err_msg=name)
        task.phase[:], task._last_vel[:], task._last_targets[:] = phases, *last
        reward, failed = task.advance(targets, np.ones(2 * n, np.int64), rng)
        np.testing.assert_allclose(reward[image], reward[real], rtol=1e-4, atol=1e-6)
        np.testing.assert_array_equal(failed[image], failed[real])
    assert np.ptp(reward) > 0


def test_there_is_one_weight_for_each_term():
    task, _, _ = still(1)
    assert set(terms_of(task)) == {f.name for f in fields(RewardWeights)}


def test_no_term_is_negative_so_that_the_weight_says_whether_it_is_wanted():
    task, _, s = still(200)
    scramble(s, np.random.default_rng(0))
    task.phase[:] = np.linspace(0, 0.999, 200)
    for stand in (False, True):
        task.stand[:] = stand
        for name, values in terms_of(task).items():
            assert values.shape == (200,), name
            assert values.min() >= 0, name
    weights = asdict(RewardWeights())
    wanted = {"track_linear", "track_linear_sharp", "track_turn", "track_turn_sharp", "alive", "gait", "imitate"}
    assert {name for name, weight in weights.items() if weight > 0} == wanted


PERFECT = 1e-6
FAULTS = {
    "track_linear": lambda s: s["base_lin_vel"][:, 0].fill(0.5),
    "track_linear_sharp": lambda s: s["base_lin_vel"][:, 1].fill(0.5),
    "track_turn": lambda s: s["base_ang_vel"][:, 2].fill(0.5),
    "track_turn_sharp": lambda s: s["base_ang_vel"][:, 2].fill(-0.5),
    "gait": lambda s: s["foot_force"].fill(0),
    "upright": lambda s: s["base_quat"].__setitem__(slice(None), (np.cos(0.2), 0, np.sin(0.2), 0)),
    "height": lambda s: s["base_pos"][:, 2].fill(0.8),
    "vertical_speed": lambda s: s["base_lin_vel"][:, 2].fill(-0.5),
    "tumble": lambda s: s["base_ang_vel"][:, 0].fill(0.5),
    "feet_flat": lambda s: s["foot_up"].__setitem__(slice(None), (np.sin(0.3), 0, np.cos(0.3))),
    "feet_apart": lambda s: s["foot_pos"][:, 0, 1].fill(-0.1),
    "hips": lambda s: s["joint_pos"][:, 2].fill(0.3),
    "torque": lambda s: s["joint_effort"].fill(50),
    "acceleration": lambda s: s["joint_vel"].fill(0.5),
    "joint_speed": lambda s: s["joint_vel"].fill(0.5),
    "near_limit": lambda s: s["joint_pos"][:, 3].fill(2.19),
    "still": lambda s: s["joint_pos"][:, 3].fill(0.6),
}


@pytest.mark.parametrize("name", FAULTS)
def test_each_term_answers_to_its_fault_with_the_sign_of_its_weight(name):
    task, _, s = still(1)
    weight = getattr(task.config.weights, name)
    before = terms_of(task)[name][0]
    FAULTS[name](s)
    after = terms_of(task)[name][0]
    assert weight * after < weight * before
    if weight < 0:
        assert before == pytest.approx(0, abs=PERFECT)


def test_changing_targets_costs():
    task, _, _ = still(1)
    assert terms_of(task)["target_rate"][0] == 0
    assert terms_of(task, hold(1) + 0.1)["target_rate"][0] == pytest.approx(12 * 0.01, rel=1e-4)
    assert terms_of(task, hold(1) + 0.1)["target_rate"][0] == 0


def test_stepping_in_time_pays_more_than_standing_or_stepping_out_of_time():
    task, _, s = still(3)
    task.stand[:], task.phase[:] = False, 0.775  # the left foot in mid-swing
    swinging = (0, 0.16, 0.045 + task.config.gait.clearance)
    s["foot_pos"][0, 0], s["foot_force"][0, 0] = swinging, 0
    s["foot_pos"][1, 1], s["foot_force"][1, 1] = (0, -0.16, swinging[2]), 0
    in_time, out_of_time, standing = terms_of(task)["gait"]
    assert in_time == pytest.approx(1, abs=1e-3)
    assert in_time > standing + 0.1 > out_of_time + 0.1


def test_only_a_standing_command_asks_for_the_default_pose():
    task, _, s = still(2)
    s["joint_pos"][:, 3] += 0.2
    task.stand[:] = (True, False)
    np.testing.assert_allclose(terms_of(task)["still"], [0.2, 0], atol=1e-6)


def test_the_reward_is_the_weighted_sum_times_the_step_and_not_below_zero():
    task, _, s = still(40)
    scramble(s, np.random.default_rng(0), 0.5)
    targets = hold(40)
    kept = task._last_vel.copy(), task._last_targets.copy()
    task.phase[:] = 0
    terms = terms_of(task, targets)
    task._last_vel[:], task._last_targets[:] = kept
    total = sum(getattr(task.config.weights, k) * v for k, v in terms.items()) * task.plant.control_dt
    reward, _ = task.advance(targets, np.ones(40, np.int64), np.random.default_rng(0))
    np.testing.assert_allclose(reward, np.maximum(total, 0), rtol=1e-4, atol=1e-6)
    assert reward.dtype == np.float32


@pytest.mark.parametrize("axis", [1, 2])
def test_an_episode_fails_beyond_the_tilt(axis):
    task, _, s = still(4)
    angles = task.config.max_tilt + np.array(
        [-0.01, 0.01, -2 * task.config.max_tilt - 0.01, 0.01 - 2 * task.config.max_tilt]
    )
    s["base_quat"][:] = 0
    s["base_quat"][:, 0], s["base_quat"][:, axis] = np.cos(angles / 2), np.sin(angles / 2)
    _, failed = task.advance(hold(4), np.ones(4, np.int64), np.random.default_rng(0))
    assert failed.tolist() == [False, True, True, False]


def test_a_turned_robot_is_not_a_tilted_one():
    task, _, s = still(1)
    s["base_quat"][:] = (0, 0, 0, 1)
    assert not task.advance(hold(1), np.ones(1, np.int64), np.random.default_rng(0))[1][0]
    assert terms_of(task)["upright"][0] == pytest.approx(0, abs=PERFECT)


def test_an_episode_fails_below_the_height():
    task, _, s = still(2)
    s["base_pos"][:, 2] = task.config.min_height + np.array([-0.01, 0.01])
    _, failed = task.advance(hold(2), np.ones(2, np.int64), np.random.default_rng(0))
    assert failed.tolist() == [True, False]


def commands_at(level: float, rounds: int = 40, num: int = 500, **changes) -> tuple[Velocity, np.ndarray, np.ndarray]:
    """Many commands, and which of them ask to stand."""
    task, _, _ = still(num, **changes)
    task.level, rng = level, np.random.default_rng(1)
    drawn, stand = [], []
    for _ in range(rounds):
        task.begin(np.arange(num), rng)
        drawn.append(task.signals["command"].copy())
        stand.append(task.stand.copy())
    return task, np.concatenate(drawn), np.concatenate(stand)


@pytest.mark.parametrize("level", [0.0, 1.0])
def test_shares_of_standing_and_turning_commands_are_as_configured(level):
    shares = CommandConfig(stand_share=0.12, turn_share=0.2)
    gait = GaitConfig()
    _, commands, stand = commands_at(level, command=shares, gait=gait)
    still_ones = (commands == 0).all(axis=1)
    turning = (commands[:, :2] == 0).all(axis=1) & ~still_ones
    assert turning.mean() == pytest.approx(0.2, abs=0.01)
    assert still_ones.mean() == pytest.approx(0.12, abs=0.015)
    assert stand.mean() == pytest.approx(0.12, abs=0.015)
    assert not stand[turning].any()


@pytest.mark.parametrize("level", [0.0, 0.5, 1.0])
def test_command_ranges_grow_with_the_level(level):
    task, commands, _ = commands_at(level)
    c = task.config.command
    scale = c.start_scale + (1 - c.start_scale) * level
    for column, (lo, hi) in enumerate((c.forward, c.left, c.turn)):
        assert commands[:, column].min() == pytest.approx(lo * scale, rel=0.02)
        assert commands[:, column].max() == pytest.approx(hi * scale, rel=0.02)


def test_commands_change_about_every_few_seconds_and_on_time_only():
    task, _, _ = still(200)
    rng = np.random.default_rng(0)
    task.begin(np.arange(200), rng)
    seconds, limit = task.config.command.seconds, 1000
    changes = np.zeros(200)
    for step in range(1, limit + 1):
        before = task.signals["command"].copy()
        task.disturb(np.full(200, step), rng)
        changes += (task.signals["command"] != before).any(axis=1)
    expected = limit * task.plant.control_dt / seconds
    stays = task.config.command.stand_share**2
    assert changes.mean() == pytest.approx(expected * (1 - stays), rel=0.12)


def test_a_staggered_start_does_not_change_commands_at_once():
    env = Environment(flat(), 64, 0, threads=1)
    env.reset()
    assert env.steps.max() > 500
    before = env.signals["command"].copy()
    env.step(hold(64))
    assert (env.signals["command"] != before).any(axis=1).mean() < 0.2


@pytest.mark.parametrize("groups", [1, 8, 64])
def test_the_level_counts_episodes_whatever_the_number_of_simulations(groups):
    task, _, _ = still(64)
    task.level = 0.5
    good = np.arange(64) % 4 != 0
    for ids in np.split(np.arange(64), groups):
        finish(task, ids, good[ids])
    rate = task.config.curriculum.rate
    assert task.level == pytest.approx(0.5 + rate * (48 - 0.5 * 16), abs=1e-9)


def finish(task: Velocity, ids: np.ndarray, good: np.ndarray, steps: int = 10) -> None:
    """End episodes of `steps` steps that tracked their command well and lasted, or neither."""
    begun = task.begin(ids, np.random.default_rng(0))
    assert len(begun.base_pos) == len(ids)
    s = task._backend.signals
    for _ in range(steps):
        task.signals["command"][ids] = 0
        s["privileged.base_lin_vel"][ids, 0] = np.where(good, 0, 5)
        task.advance(hold(len(task.phase)), np.ones(len(task.phase), np.int64), np.random.default_rng(0))
    task.finish(ids, np.full(len(ids), steps), good)


def test_the_level_stays_between_zero_and_one():
    task, _, _ = still(64)
    everyone = np.arange(64)
    for _ in range(3):
        task.level = 0.0
        finish(task, everyone, np.zeros(64, bool))
    assert task.level == 0
    task.level = 1.0
    finish(task, everyone, np.ones(64, bool))
    assert task.level == 1


def test_only_whole_episodes_teach_the_curriculum():
    env = Environment(flat(), 64, 0, threads=1)
    env.reset()
    env.task.level = 0.5
    begun_late = env.steps > env.limit - 10
    assert begun_late.any()
    for _ in range(9):
        assert not env.step(hold(64)).failed.any()
    assert env.task.level == 0.5


@pytest.mark.parametrize("name", sorted(TASKS))
def test_no_robot_starts_inside_the_ground(name):
    task = make_task(name)
    backend = make_backend("mujoco", task.plant, 300, 1)
    task.bind(backend)
    rng, ids = np.random.default_rng(0), np.arange(300)
    if task.plant.ground is not None:
        task._terrain_level[:] = ids % task.plant.ground.levels
    backend.reset(ids, task.begin(ids, rng), rng)
    model, positions = backend.model, backend.batch.bind("geom_xpos")
    backend.batch.forward()
    soles = [g for g in range(model.ngeom) if "_heel_" in model.geom(g).name or "_toe_" in model.geom(g).name]
    corners = positions[:, soles]
    ground = 0.0 if task.plant.ground is None else task.plant.ground.height_at(corners[..., :2])
    gap = corners[..., 2] - model.geom_size[soles, 0] - ground
    assert gap.min() > -1e-3
    assert gap.min(axis=1).max() < 0.15


def test_starts_look_everywhere_and_stand_on_their_own_level():
    task = make_task("velocity-rough")
    task.bind(Still(600))
    task._terrain_level[:] = np.arange(600) % task.plant.ground.levels
    start = task.begin(np.arange(600), np.random.default_rng(0))
    yaw = 2 * np.arctan2(start.base_quat[:, 3], start.base_quat[:, 0])
    assert np.histogram(np.mod(yaw, 2 * np.pi), bins=4)[0].min() > 100
    np.testing.assert_allclose(np.linalg.norm(start.base_quat, axis=1), 1)
    np.testing.assert_array_equal(start.base_pos[:, 0] // task.plant.ground.band, task._terrain_level)


def test_the_ground_signal_is_that_below_the_robot_from_the_first_reading_on():
    env = Environment(make_task("velocity-rough"), 32, 0, threads=1)
    env.reset()
    env.task._terrain_level[:] = 5
    for _ in range(40):
        env.step(hold(32))
        wanted = env.task.plant.ground.height_at(env.signals["privileged.base_pos"][:, :2])
        np.testing.assert_allclose(env.signals["privileged.ground"][:, 0], wanted, atol=1e-5)
    assert np.ptp(env.signals["privileged.ground"]) > 0


def test_a_good_episode_leads_to_rougher_ground_and_a_fall_to_smoother():
    task = make_task("velocity-rough")
    task.bind(Still(4))
    task._terrain_level[:] = (0, 2, 2, task.plant.ground.levels - 1)
    good = np.array([False, True, False, True])
    finish(task, np.arange(4), good)
    assert task._terrain_level.tolist() == [0, 3, 1, task.plant.ground.levels - 1]


def test_pushes_come_as_often_and_as_hard_as_configured():
    task, backend, _ = still(400, push=PushConfig(speed=0.8, seconds=4.0), command=CommandConfig(nudge_seconds=0))
    task.level, rng, steps = 1.0, np.random.default_rng(0), 500
    for k in range(1, steps + 1):
        task.disturb(np.full(400, k), rng)
    velocities = np.concatenate([v for _, v in backend.pushes])
    assert len(velocities) == pytest.approx(400 * steps * task.plant.control_dt / 4.0, rel=0.1)
    assert np.abs(velocities).max() == pytest.approx(0.8, rel=0.02)
    assert np.abs(velocities.mean(axis=0)).max() < 0.05


def test_no_pushes_when_none_are_wanted():
    task, backend, _ = still(400, push=PushConfig(seconds=0), command=CommandConfig(nudge_seconds=0))
    task.level = 1.0
    for k in range(1, 100):
        task.disturb(np.full(400, k), np.random.default_rng(k))
    assert backend.pushes == []


def test_an_evaluation_fixes_commands_and_pushes():
    task, backend, _ = still(3)
    task.fixed_command, task.fixed_push, rng = np.array([0.7, 0.0, 0.2], np.float32), (5, 9), np.random.default_rng(0)
    task.begin(np.arange(3), rng)
    for k in range(1, 600):
        task.disturb(np.full(3, k), rng)
        np.testing.assert_array_equal(task.signals["command"], np.tile(task.fixed_command, (3, 1)))
    assert [ids.tolist() for ids, _ in backend.pushes] == [[0, 1, 2], [0, 1, 2]]


def test_state_and_restore_carry_everything_over():
    def run(task: Velocity, s: dict[str, np.ndarray], rng: np.random.Generator) -> list[np.ndarray]:
        out = []
        for k in range(30):
            scramble(s, rng, 0.3)
            reward, _ = task.advance(hold(6) + 0.1 * np.float32(np.sin(k)), np.full(6, 10 * k), rng)
            task.disturb(np.full(6, 10 * k), rng)
            out += [reward, task.signals["command"].copy(), task.phase.copy()]
            if k % 10 == 9:
                task.finish(np.array([k % 6]), np.array([10]), np.array([True]))
                task.begin(np.array([k % 6]), rng)
        return [*out, np.array([task.level])]

    task, _, s = still(6)
    rng = np.random.default_rng(0)
    task.level = 0.4
    run(task, s, rng)
    state, random = task.state(), rng.bit_generator.state
    s["foot_pos"][:] = 0.1
    expected = run(task, s, rng)
    other, _, s = still(6)
    s["foot_pos"][:] = 0.1
    other.restore(state)
    rng.bit_generator.state = random
    for a, b in zip(run(other, s, rng), expected, strict=True):
        np.testing.assert_array_equal(a, b)


def test_curves_are_the_mean_terms_since_the_last_call():
    task, _, s = still(4)
    for height in (0.9, 1.0):
        s["base_pos"][:, 2] = height
        task.advance(hold(4), np.ones(4, np.int64), np.random.default_rng(0))
    wanted = np.mean([(h - task.config.height) ** 2 for h in (0.9, 1.0)])
    curves = task.log()
    assert curves["reward/height"] == pytest.approx(wanted, rel=1e-3)
    assert curves["curriculum/level"] == task.level
    assert "reward/height" not in task.log()


def test_an_unknown_task_lists_the_nearest():
    with pytest.raises(UnknownNameError, match="did you mean velocity"):
        make_task("velocty")


def test_nudges_set_the_commanded_velocity_in_the_world_and_grow_rare_with_success():
    task, backend, s = still(400)
    task.signals["command"][:] = (0.6, -0.2, 0.3)
    yaw = np.linspace(-3, 3, 400)
    s["base_quat"][:] = np.stack([np.cos(yaw / 2), 0 * yaw, 0 * yaw, np.sin(yaw / 2)], axis=1)
    task._nudge(np.random.default_rng(0))
    ((ids, velocity),) = backend.pushes
    assert 0 < len(ids) < 40  # one in fifty at 50 Hz
    forward = velocity[:, 0] * np.cos(yaw[ids]) + velocity[:, 1] * np.sin(yaw[ids])
    left = -velocity[:, 0] * np.sin(yaw[ids]) + velocity[:, 1] * np.cos(yaw[ids])
    np.testing.assert_allclose(forward, 0.6, atol=1e-6)
    np.testing.assert_allclose(left, -0.2, atol=1e-6)
    task.level = 1.0
    task._nudge(np.random.default_rng(0))
    assert len(backend.pushes[1][0]) < len(ids)
    task.fixed_command = np.zeros(3, np.float32)
    task._nudge(np.random.default_rng(0))
    assert len(backend.pushes) == 2
