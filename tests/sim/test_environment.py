from typing import Any

import numpy as np
import pytest

import robots
from sim import environment
from sim.backend import Backend, PlantConfig, Start
from sim.environment import Environment, EpisodeConfig
from sim.replay import replay
from sim.sensors import SensorConfig
from sim.tasks import make_task

SPEC = robots.load("unitree_h1_2")
LEGS_ONLY = ("waist", "arms", "wrists")
NOISY = {"joint_pos": SensorConfig(noise=0.01, bias=0.01), "imu_gyro": SensorConfig(noise=0.1, delay=(0.0, 0.04))}


class Hang:
    """A task for tests: robots fall from 5 m, fail when told to, and count what they are asked."""

    def __init__(self, limit: int = 10, stagger: str = "none", plant: PlantConfig | None = None) -> None:
        self.plant = plant or PlantConfig(lock=LEGS_ONLY, sensors=NOISY)
        self.episode = EpisodeConfig(seconds=limit * self.plant.control_dt, stagger=stagger)
        self.fail_at: dict[int, int] = {}
        self.finished: list[tuple[list[int], list[int], list[bool]]] = []
        self.at_finish: dict[str, np.ndarray] = {}
        self.push: tuple[int, float] | None = None

    def bind(self, backend: Backend) -> None:
        self._backend = backend
        self.signals = {"command": np.zeros((backend.num_envs, 3), np.float32)}

    def begin(self, ids: np.ndarray, rng: np.random.Generator) -> Start:
        n = len(ids)
        self.signals["command"][ids] = rng.uniform(-1, 1, (n, 3))
        return Start(
            base_pos=np.tile([0.0, 0.0, 5.0], (n, 1)),
            base_quat=np.tile([1.0, 0.0, 0.0, 0.0], (n, 1)),
            base_vel=rng.uniform(-0.1, 0.1, (n, 6)),
            joint_pos=np.tile(SPEC.array("default_pos"), (n, 1)),
        )

    def advance(
        self, targets: np.ndarray, steps: np.ndarray, rng: np.random.Generator
    ) -> tuple[np.ndarray, np.ndarray]:
        failed = np.array([steps[i] == self.fail_at.get(i, -1) for i in range(len(steps))])
        return self._backend.signals["privileged.base_lin_vel"][:, 2].copy(), failed

    def disturb(self, steps: np.ndarray, rng: np.random.Generator) -> None:
        if self.push is not None:
            sim, speed = self.push
            self._backend.push(np.array([sim]), np.array([[speed, 0.0]]))
            self.push = None

    def finish(self, ids: np.ndarray, steps: np.ndarray, timed_out: np.ndarray) -> None:
        self.finished.append((ids.tolist(), steps.tolist(), timed_out.tolist()))
        everything = {**self._backend.signals, **self.signals}
        self.at_finish = {name: values[ids].copy() for name, values in everything.items()}

    def log(self) -> dict[str, float]:
        return {}

    def state(self) -> dict[str, Any]:
        return {"command": self.signals["command"].copy()}

    def restore(self, state: dict[str, Any]) -> None:
        self.signals["command"][:] = state["command"]


def hold(num: int) -> np.ndarray:
    """Targets (num, J) of the default pose."""
    return np.tile(SPEC.array("default_pos"), (num, 1)).astype(np.float32)


def made(task: Hang, num: int = 4, **options: Any) -> Environment:
    env = Environment(task, num, 0, threads=1, **options)
    env.reset()
    return env


def test_the_time_limit_ends_an_episode_without_failure():
    env = made(Hang(limit=5), 3)
    results = [env.step(hold(3)) for _ in range(10)]
    ended = [r.ended.tolist() for r in results]
    assert ended == [[], [], [], [], [0, 1, 2]] * 2
    assert not any(r.failed.any() for r in results)
    assert [r.timed_out.all() for r in results] == [False, False, False, False, True] * 2
    assert env.task.finished == [([0, 1, 2], [5, 5, 5], [True] * 3)] * 2


def test_a_failure_is_no_time_out_even_at_the_limit():
    task = Hang(limit=5)
    task.fail_at = {0: 5, 2: 3}
    env = made(task, 3)
    results = [env.step(hold(3)) for _ in range(5)]
    assert [(r.failed.tolist(), r.timed_out.tolist()) for r in results[2::2]] == [
        ([False, False, True], [False] * 3),
        ([True, False, False], [False, True, False]),
    ]
    assert not any((r.failed & r.timed_out).any() for r in results)


def test_steps_count_each_episode_from_its_start():
    task = Hang(limit=6)
    task.fail_at = {1: 2}
    env = made(task, 3)
    seen = []
    for _ in range(7):
        env.step(hold(3))
        seen.append(env.steps.tolist())
    assert seen == [[1, 1, 1], [2, 0, 2], [3, 1, 3], [4, 0, 4], [5, 1, 5], [0, 0, 0], [1, 1, 1]]


def test_final_signals_are_those_before_the_reset():
    task = Hang(limit=4)
    task.fail_at = {1: 4}
    env = made(task, 3)
    for _ in range(3):
        assert env.step(hold(3)).final == {}
    result = env.step(hold(3))
    assert set(result.final) == set(env.signals)
    for name, values in result.final.items():
        np.testing.assert_array_equal(values, task.at_finish[name], err_msg=name)
    assert (result.final["privileged.base_pos"][:, 2] < 5).all()
    assert (env.signals["privileged.base_pos"][:, 2] == 5).all()
    assert (result.final["command"] != env.signals["command"]).all()
    assert (result.final["joint_pos"] != env.signals["joint_pos"])[:, env.backend.free].all()
    np.testing.assert_allclose(result.reward, result.final["privileged.base_lin_vel"][:, 2])


def test_simulations_that_go_on_are_not_touched_by_the_reset_of_others():
    def trace(fail_at: dict[int, int]) -> list[np.ndarray]:
        task = Hang(limit=50, plant=PlantConfig(lock=LEGS_ONLY))
        task.fail_at = fail_at
        env = made(task, 3)
        out = []
        for _ in range(6):
            env.step(hold(3))
            out.append(env.signals["joint_vel"][[0, 2]].copy())
        return out

    np.testing.assert_array_equal(trace({1: 3}), trace({}))


@pytest.mark.parametrize(("num", "limit"), [(10, 100), (128, 40), (3, 1000)])
def test_blocks_spread_the_phases_evenly(num, limit):
    env = made(Hang(limit=limit, stagger="blocks"), num)
    gaps = np.diff(np.sort(env.steps), append=env.steps.min() + limit)
    assert 0 <= env.steps.min() <= env.steps.max() < limit
    assert np.abs(gaps - limit / num).max() <= 1
    assert np.histogram(env.steps, bins=2, range=(0, limit))[0].tolist() == [num - num // 2, num // 2]


def test_random_phases_are_spread_and_repeat_with_the_seed():
    steps = [made(Hang(limit=100, stagger="random"), 200).steps for _ in range(2)]
    np.testing.assert_array_equal(*steps)
    assert 0 <= steps[0].min() < 5
    assert 95 < steps[0].max() < 100
    assert np.histogram(steps[0], bins=4, range=(0, 100))[0].min() > 35


def test_without_stagger_all_episodes_begin_together():
    assert (made(Hang(stagger="none"), 5).steps == 0).all()


def test_staggered_episodes_end_one_after_the_other():
    env = made(Hang(limit=10, stagger="blocks"), 10)
    assert [env.step(hold(10)).ended.tolist() for _ in range(10)] == [[9 - k] for k in range(10)]


@pytest.fixture
def elsewhere(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)  # MuJoCo writes its warnings to a file in the working directory
    return tmp_path


def test_a_simulation_that_breaks_is_ended_counted_saved_and_harms_no_other(elsewhere):
    tasks = [Hang(limit=50, plant=PlantConfig(lock=LEGS_ONLY)) for _ in range(2)]
    hurt, well = made(tasks[0], failures=elsewhere / "failures"), made(tasks[1])
    for k in range(6):
        tasks[0].push = (2, 1e12) if k == 2 else None
        result, expected = hurt.step(hold(4)), well.step(hold(4))
        for name, values in hurt.signals.items():
            assert np.isfinite(values).all(), name
            np.testing.assert_array_equal(values[[0, 1, 3]], well.signals[name][[0, 1, 3]], err_msg=name)
        assert all(np.isfinite(values).all() for values in result.final.values())
        np.testing.assert_array_equal(result.reward[[0, 1, 3]], expected.reward[[0, 1, 3]])
        assert result.failed.tolist() == [False, False, k == 3, False]
        assert not result.timed_out.any()
        assert result.ended.tolist() == ([2] if k == 3 else [])
        if k == 3:
            assert result.reward[2] == 0
    assert (hurt.broken, well.broken) == (1, 0)
    assert hurt.steps.tolist() == [6, 6, 2, 6]
    [saved] = (elsewhere / "failures").iterdir()
    assert (replay(saved).warning, replay(saved).broke) == ("mjWARN_BADQVEL", 0)


@pytest.mark.parametrize("injury", [1e9, 1e12, float("nan")])
def test_nothing_that_is_not_finite_leaves_the_velocity_task(elsewhere, injury):
    env = Environment(make_task("velocity"), 8, 0, threads=1)
    env.reset()
    for k in range(6):
        result = env.step(hold(8))
        assert np.isfinite(result.reward).all()
        assert (result.reward >= 0).all()
        for values in (*env.signals.values(), *result.final.values()):
            assert np.isfinite(values).all()
        if k in (1, 3):
            env.backend.push(np.array([k]), np.array([[injury, 0.0]]))
    assert env.broken == 2
    assert all(np.isfinite(v) for v in env.task.log().values())


def test_targets_that_are_not_finite_end_their_own_episode_only(elsewhere):
    env = made(Hang(limit=50))
    targets = hold(4)
    targets[1, 0] = np.nan
    result = env.step(targets)
    assert result.failed.tolist() == [False, True, False, False]
    assert not env.step(hold(4)).failed.any()
    assert env.broken == 1


def test_only_so_many_failures_are_written(elsewhere, monkeypatch):
    monkeypatch.setattr(environment, "MOST_FAILURES", 3)
    env = made(Hang(limit=50), failures=elsewhere / "failures")
    broken = hold(4)
    broken[:2] = np.nan
    for _ in range(3):
        env.step(broken)
    assert env.broken == 6
    assert len(list((elsewhere / "failures").iterdir())) == 3


def run(env: Environment, steps: int) -> list[dict[str, np.ndarray]]:
    """Signals, rewards and ends of some steps with targets that do not depend on the environment's generator."""
    out = []
    for k in range(steps):
        targets = hold(env.num_envs) + 0.2 * np.sin(k + np.arange(env.num_envs * 27)).reshape(-1, 27)
        result = env.step(targets.astype(np.float32))
        out.append({name: values.copy() for name, values in env.signals.items()})
        out[-1] |= {"reward": result.reward.copy(), "failed": result.failed, "timed_out": result.timed_out}
        out[-1] |= {f"final.{name}": values for name, values in result.final.items()}
    return out


def assert_same(a: list[dict[str, np.ndarray]], b: list[dict[str, np.ndarray]]) -> None:
    for k, (one, other) in enumerate(zip(a, b, strict=True)):
        assert one.keys() == other.keys()
        for name in one:
            np.testing.assert_array_equal(one[name], other[name], err_msg=f"{name}, step {k}")


@pytest.mark.parametrize("name", ["velocity", "velocity-rough"])
def test_a_restored_environment_continues_bit_identically(name):
    env = Environment(make_task(name), 6, 0, threads=1)
    env.reset()
    run(env, 30)
    state = env.state()
    expected = run(env, 40)
    assert sum(step["failed"].sum() for step in expected) > 0
    other = Environment(make_task(name), 6, 99, threads=2)
    other.reset()
    run(other, 7)
    for target in (other, env):
        target.restore(state)
        assert_same(run(target, 40), expected)


def test_signals_are_restored_at_once():
    env = Environment(make_task("velocity"), 4, 0, threads=1)
    env.reset()
    run(env, 10)
    state, kept = env.state(), {name: values.copy() for name, values in env.signals.items()}
    run(env, 10)
    env.restore(state)
    for name, values in env.signals.items():
        np.testing.assert_array_equal(values, kept[name], err_msg=name)


def test_the_seed_decides_everything_and_the_thread_count_nothing():
    runs = []
    for seed, threads in ((0, 1), (0, 2), (1, 1)):
        env = Environment(make_task("velocity"), 6, seed, threads=threads)
        env.reset()
        runs.append(run(env, 40))
    assert_same(runs[0], runs[1])
    assert any((a["joint_pos"] != b["joint_pos"]).any() for a, b in zip(runs[0], runs[2], strict=True))
