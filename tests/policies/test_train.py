import errno
import os
import re
import signal
import subprocess
import sys
import threading
import warnings
from collections.abc import Callable, Iterator
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import tyro
from rich.console import Console
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from policies import train as module
from policies.contract import load_policy, read_contract
from policies.export import export_run
from policies.interface import WalkingConfig
from policies.ppo import PPOConfig
from policies.runs import CHECKPOINT, CONFIG, POLICY, load_checkpoint, read_json, save_checkpoint, to_tensors
from policies.sac import SACConfig
from policies.train import TrainConfig, Trainer, load_trainer, train
from robots.errors import UnknownNameError, UserError
from sim.environment import EpisodeConfig
from sim.replay import load_failure, replay
from sim.tasks import make_task
from sim.tasks.velocity import Velocity

QUIET = Console(quiet=True)
STEPS = 8 * 6
"""Environment steps of one iteration."""
PPO = PPOConfig(num_envs=8, horizon=6, minibatches=2, epochs=2, hidden=(16, 8), recurrent_dim=8)
SAC = SACConfig(num_envs=8, iteration=6, warmup=32, batch=16, capacity=128, hidden=(16, 16), actor_hidden=(16, 8))
RUNS = {
    "ppo": TrainConfig(threads=1, ppo=PPO),
    "lstm": TrainConfig(threads=1, ppo=replace(PPO, recurrent="lstm")),
    "gru": TrainConfig(threads=1, ppo=replace(PPO, recurrent="gru")),
    "history": TrainConfig(threads=1, ppo=PPO, walking=WalkingConfig(history=3)),
    "rough": TrainConfig(threads=1, ppo=PPO, task="velocity-rough"),
    "sac": TrainConfig(threads=1, algorithm="sac", sac=SAC),
}


def short_task(name: str, robot: str) -> Velocity:
    """Episodes of ten control steps, so that a few iterations see many of them end."""
    task = make_task(name, robot)
    assert isinstance(task, Velocity)
    return Velocity(replace(task.config, episode=EpisodeConfig(seconds=10 * task.plant.control_dt)))


@pytest.fixture(autouse=True)
def short_episodes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "make_task", short_task)


@pytest.fixture(autouse=True)
def no_warnings_no_threads_left() -> Iterator[None]:
    before = threading.active_count()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        # tensorboard's, on import of its own modules
        warnings.filterwarnings("ignore", category=DeprecationWarning, module=r"tensorboard\.")
        yield
    assert threading.active_count() == before


@pytest.fixture
def no_export(monkeypatch: pytest.MonkeyPatch) -> None:
    """For tests of all but the export, which takes most of a short run's time."""
    monkeypatch.setattr(Trainer, "export", lambda *_: 0.0)


def run(
    kind: str, folder: Path, iterations: int = 2, on_iteration: Callable[[Trainer], bool] | None = None, **changes: Any
) -> Path:
    config = replace(RUNS[kind], out=folder, steps=iterations * STEPS, **changes)
    return train(config, QUIET, on_iteration)


def resume(folder: Path, iterations: int, on_iteration: Callable[[Trainer], bool] | None = None) -> Path:
    return train(TrainConfig(resume=folder, steps=iterations * STEPS, threads=1), QUIET, on_iteration)


def leaves(tree: Any, where: str = "") -> Iterator[tuple[str, Any]]:
    if isinstance(tree, dict):
        for key, value in tree.items():
            yield from leaves(value, f"{where}.{key}")
    elif isinstance(tree, list):
        for i, value in enumerate(tree):
            yield from leaves(value, f"{where}[{i}]")
    else:
        yield where, tree


def assert_same_state(got: Any, expected: Any) -> None:
    """Every tensor, array and number bit by bit, but for the limits a run was given."""
    ours, theirs = (dict(leaves(to_tensors({k: v for k, v in s.items() if k != "config"}))) for s in (got, expected))
    assert ours.keys() == theirs.keys()
    for name, value in ours.items():
        other = theirs[name]
        if isinstance(value, torch.Tensor):
            assert value.dtype == other.dtype, name
            assert torch.equal(value, other), name
        else:
            assert value == other, name
    assert sum(isinstance(v, torch.Tensor) for v in ours.values()) > 50


# ---- determinism -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", RUNS)
def test_same_seed_same_everything_at_any_thread_count(kind: str) -> None:
    states = []
    for threads in (1, 2):
        with closing(Trainer(replace(RUNS[kind], threads=threads))) as trainer:
            curves = [trainer.iterate() for _ in range(3)]
            states.append((trainer.state(), curves))
    assert_same_state(states[0][0], states[1][0])
    assert states[0][1] == states[1][1]
    assert any("episode/return" in c for c in curves)


@pytest.mark.parametrize("kind", ["ppo", "sac"])
def test_another_seed_is_another_run(kind: str) -> None:
    heads = []
    for seed in (0, 1):
        with closing(Trainer(replace(RUNS[kind], seed=seed))) as trainer:
            trainer.iterate()
            heads.append(dict(leaves(to_tensors(trainer.state()["learner"]))))
    assert any(not torch.equal(v, heads[1][k]) for k, v in heads[0].items() if isinstance(v, torch.Tensor))


@pytest.mark.parametrize("kind", RUNS)
def test_two_and_two_iterations_are_four(kind: str, tmp_path: Path) -> None:
    config = RUNS[kind]
    with closing(Trainer(config)) as straight:
        for _ in range(4):
            straight.iterate()
        expected, finished = straight.state(), straight.task.level
    with closing(Trainer(config)) as first:
        for _ in range(2):
            first.iterate()
        save_checkpoint(tmp_path, first.state())
    with closing(Trainer(replace(config, threads=2))) as second:
        torch.manual_seed(99)
        second.restore(load_checkpoint(tmp_path))
        for _ in range(2):
            second.iterate()
        assert_same_state(second.state(), expected)
        assert second.task.level == finished
        assert (second.iteration, second.env_steps) == (4, 4 * STEPS)


@pytest.mark.parametrize("kind", ["ppo", "lstm", "sac"])
def test_an_export_in_the_middle_changes_nothing(kind: str, tmp_path: Path) -> None:
    states = []
    for export in (False, True):
        with closing(Trainer(RUNS[kind])) as trainer:
            trainer.iterate()
            if export:
                assert trainer.export(tmp_path / POLICY) < 1e-5
            trainer.iterate()
            states.append(trainer.state())
    assert_same_state(states[1], states[0])


@pytest.mark.parametrize("kind", ["ppo", "sac"])
def test_a_resumed_run_is_the_run_that_never_stopped(kind: str, tmp_path: Path, no_export: None) -> None:
    straight, parts = run(kind, tmp_path / "a", 4), run(kind, tmp_path / "b", 2)
    assert resume(parts, 4) == parts
    assert_same_state(load_checkpoint(parts), load_checkpoint(straight))


def test_another_process_goes_on_bit_by_bit(tmp_path: Path, no_export: None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.undo()  # the other process knows nothing of the tests' short episodes
    monkeypatch.setattr(Trainer, "export", lambda *_: 0.0)
    straight, parts = run("sac", tmp_path / "a", 4), run("sac", tmp_path / "b", 2)
    script = (
        "import sys; from pathlib import Path; from policies.train import TrainConfig, train\n"
        f"train(TrainConfig(resume=Path(sys.argv[1]), steps={4 * STEPS}, threads=2))"
    )
    environment = os.environ | {"PYTHONPATH": str(Path(__file__).parents[2])}
    subprocess.run([sys.executable, "-c", script, parts], check=True, env=environment, capture_output=True)
    assert_same_state(load_checkpoint(parts), load_checkpoint(straight))
    assert (parts / POLICY).exists()


# ---- Ctrl-C ----------------------------------------------------------------------------------------------------------


@pytest.fixture
def keyboard() -> Iterator[None]:
    """Python's own handler: a shell starts what it runs in the background with Ctrl-C switched off."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


def press(trainer: Trainer) -> bool:
    signal.raise_signal(signal.SIGINT)
    return False


def raise_interrupt(trainer: Trainer) -> bool:
    raise KeyboardInterrupt


@pytest.mark.parametrize("kind", ["ppo", "sac"])
@pytest.mark.parametrize("way", [press, raise_interrupt])
def test_ctrl_c_keeps_and_exports_what_was_learnt(
    kind: str,
    way: Callable[[Trainer], bool],
    tmp_path: Path,
    no_export: None,
    keyboard: None,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    exported: list[Path] = []
    monkeypatch.setattr(Trainer, "export", lambda _, path: exported.append(path) or 0.0)
    handler = signal.getsignal(signal.SIGINT)
    folder = run(kind, tmp_path / "run", 100, lambda trainer: trainer.iteration == 2 and way(trainer))
    assert load_checkpoint(folder)["iteration"] == 2
    assert exported == [folder / POLICY]
    assert signal.getsignal(signal.SIGINT) is handler
    resume(folder, 4)
    assert_same_state(load_checkpoint(folder), load_checkpoint(run(kind, tmp_path / "straight", 4)))


def test_ctrl_c_within_an_iteration_lets_it_end(
    tmp_path: Path, no_export: None, keyboard: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The signal comes with the simulation stepping and an update under way."""
    update = module.SACLearner._update

    def interrupted(learner: Any) -> None:
        if learner.count == 5:
            signal.raise_signal(signal.SIGINT)
        update(learner)

    with monkeypatch.context() as patch:
        patch.setattr(module.SACLearner, "_update", interrupted)
        folder = run("sac", tmp_path / "run", 100)
    saved = load_checkpoint(folder)
    assert 0 < saved["iteration"] < 100
    assert_same_state(saved, load_checkpoint(run("sac", tmp_path / "straight", saved["iteration"])))


def test_a_second_ctrl_c_stops_at_once_and_keeps_the_last_checkpoint(
    tmp_path: Path, no_export: None, keyboard: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    iterate = module.PPOLearner.iterate
    folder = run("ppo", tmp_path / "run", 1)
    before = (folder / CHECKPOINT).read_bytes()

    def impatient(learner: Any) -> dict[str, float]:
        curves = iterate(learner)
        signal.raise_signal(signal.SIGINT)
        signal.raise_signal(signal.SIGINT)
        return curves

    monkeypatch.setattr(module.PPOLearner, "iterate", impatient)
    handler = signal.getsignal(signal.SIGINT)
    with pytest.raises(KeyboardInterrupt):
        resume(folder, 3)
    assert (folder / CHECKPOINT).read_bytes() == before
    assert signal.getsignal(signal.SIGINT) is handler


def test_a_handler_of_someone_else_is_left_alone(tmp_path: Path, no_export: None) -> None:
    heard: list[int] = []
    before = signal.signal(signal.SIGINT, lambda number, _: heard.append(number))
    try:
        folder = run("ppo", tmp_path / "run", 2, press)
    finally:
        signal.signal(signal.SIGINT, before)
    assert heard == [signal.SIGINT] * 2
    assert load_checkpoint(folder)["iteration"] == 2


def test_a_run_in_a_thread_needs_no_signals(tmp_path: Path, no_export: None) -> None:
    done: list[Path] = []
    thread = threading.Thread(target=lambda: done.append(run("ppo", tmp_path / "run", 1)))
    thread.start()
    thread.join()
    assert done == [tmp_path / "run"]


# ---- refusals --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("change", "named"),
    [
        ({"seed": 1}, r"seed: expected 1, found 0"),
        ({"task": "velocity-rough"}, r"task: expected 'velocity-rough', found 'velocity'; task settings.plant.ground"),
        ({"ppo": replace(PPO, gamma=0.9, lam=0.8)}, r"ppo.gamma: expected 0.9, found 0.99; ppo.lam: expected 0.8"),
        ({"ppo": replace(PPO, recurrent="lstm")}, r"ppo.recurrent: expected 'lstm', found 'none'"),
        ({"walking": WalkingConfig(history=2)}, r"walking.history: expected 2, found 1"),
        ({"algorithm": "sac", "sac": SAC}, r"algorithm: expected 'sac', found 'ppo'"),
    ],
)
def test_a_checkpoint_of_another_run_is_refused_by_name(change: dict[str, Any], named: str) -> None:
    with closing(Trainer(RUNS["ppo"])) as trainer:
        saved = trainer.state()
    with closing(Trainer(replace(RUNS["ppo"], **change))) as other, pytest.raises(UserError, match=named):
        other.restore(saved)


@pytest.mark.parametrize(("key", "value"), [("robot", "spot"), ("robot model", "0" * 64)])
def test_a_checkpoint_of_another_robot_is_refused(key: str, value: str) -> None:
    with closing(Trainer(RUNS["ppo"])) as trainer:
        saved = trainer.state()
        saved["what"][key] = value
        with pytest.raises(UserError, match=f"of another run: {key}: expected .*, found '{value[:9]}"):
            trainer.restore(saved)


def test_a_run_whose_tasks_numbers_changed_since_is_refused_and_left_alone(
    tmp_path: Path, no_export: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = run("ppo", tmp_path / "run")
    before = {p.name: p.read_bytes() for p in folder.iterdir()}

    def changed(name: str, robot: str) -> Velocity:
        config = short_task(name, robot).config
        return Velocity(replace(config, weights=replace(config.weights, alive=9.0), max_tilt=0.5))

    monkeypatch.setattr(module, "make_task", changed)
    with pytest.raises(UserError, match=r"task settings\.weights\.alive: expected 9\.0.*task settings\.max_tilt"):
        resume(folder, 4)
    assert {p.name: p.read_bytes() for p in folder.iterdir()} == before


def test_a_checkpoint_without_its_parts_is_refused(tmp_path: Path, no_export: None) -> None:
    folder = run("ppo", tmp_path / "run", 1)
    whole = load_checkpoint(folder)
    for part in ("what", "rollout", "learner", "torch_rng", "env_steps"):
        save_checkpoint(folder, {k: v for k, v in whole.items() if k not in (part, "format")})
        with pytest.raises(UserError, match=f"the checkpoint is not whole: KeyError: '{part}'"):
            resume(folder, 2)
    save_checkpoint(folder, {k: v for k, v in whole.items() if k not in ("config", "format")})
    with pytest.raises(UserError, match=r"the checkpoint in .*: expected settings by name, found None"):
        resume(folder, 2)


def test_weights_of_another_shape_are_refused(tmp_path: Path, no_export: None) -> None:
    folder = run("ppo", tmp_path / "run", 1)
    whole = load_checkpoint(folder)
    del whole["format"]
    whole["learner"]["actor_state_dict"]["mlp.head"] = torch.zeros(2, 3, 4)
    save_checkpoint(folder, whole)
    with pytest.raises(UserError, match=r"the checkpoint is not whole: RuntimeError: .*size mismatch"):
        resume(folder, 2)


def test_settings_of_another_version_are_refused_by_name(tmp_path: Path, no_export: None) -> None:
    folder = run("ppo", tmp_path / "run", 1)
    whole = load_checkpoint(folder)
    del whole["format"], whole["config"]["ppo"]["lam"]
    whole["config"]["ppo"]["lambda"] = 0.95
    save_checkpoint(folder, whole)
    with pytest.raises(UserError, match=r"ppo was written by another version .*: lam is missing, lambda is unknown"):
        resume(folder, 2)


@pytest.mark.parametrize("kept", [CONFIG, CHECKPOINT])
def test_a_folder_that_holds_a_run_is_not_written_over(tmp_path: Path, kept: str, no_export: None) -> None:
    folder = run("ppo", tmp_path / "run", 1)
    (folder / (CHECKPOINT if kept == CONFIG else CONFIG)).unlink()
    before = {p.name: p.read_bytes() for p in folder.iterdir()}
    with pytest.raises(UserError, match=f"{folder} already holds a run; go on with it by --resume {folder}"):
        run("ppo", folder, 1)
    assert {p.name: p.read_bytes() for p in folder.iterdir()} == before


def test_what_makes_no_sense_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(UserError, match=f"no checkpoint at {re.escape(str(tmp_path / 'nowhere'))}"):
        resume(tmp_path / "nowhere", 1)
    monkeypatch.setattr(module, "make_task", make_task)
    with pytest.raises(UnknownNameError, match="did you mean velocity"):
        run("ppo", tmp_path / "run", task="velocty")
    with pytest.raises(UnknownNameError, match="did you mean unitree_h1_2"):
        run("ppo", tmp_path / "run", robot="h1_2")
    monkeypatch.setattr(module, "make_task", lambda *_: object())
    with pytest.raises(UserError, match="has no command to walk at"):
        run("ppo", tmp_path / "run")
    assert list(tmp_path.iterdir()) == []


def test_a_resumed_run_stays_in_its_folder(tmp_path: Path, no_export: None) -> None:
    folder = run("ppo", tmp_path / "run", 1)
    with pytest.raises(UserError, match="leave out --out"):
        train(TrainConfig(resume=folder, out=tmp_path / "other"), QUIET)


# ---- the run folder --------------------------------------------------------------------------------------------------


def curves_of(folder: Path) -> dict[str, list[int]]:
    """Steps of the points of every curve."""
    events = EventAccumulator(str(folder)).Reload()
    return {tag: [e.step for e in events.Scalars(tag)] for tag in events.Tags()["scalars"]}


@pytest.mark.parametrize("kind", ["ppo", "lstm", "history", "sac"])
def test_a_run_folder_holds_all_there_is(kind: str, tmp_path: Path) -> None:
    folder = run(kind, tmp_path / "run", 3)
    files = sorted(p.name for p in folder.iterdir())
    assert files[:3] == [CHECKPOINT, CONFIG, files[2]]
    assert files[2].startswith("events.out.tfevents")
    assert files[3:] == [POLICY]
    assert read_json(TrainConfig, folder / CONFIG) == replace(RUNS[kind], steps=3 * STEPS)
    contract = read_contract(folder / POLICY)
    assert (contract.task, contract.training.env_steps) == ("velocity", 3 * STEPS)
    assert contract.training.algorithm == RUNS[kind].algorithm
    assert {"lstm": "cell", "history": "history"}.get(kind, "phase") in {s.name for s in contract.states}
    curves = curves_of(folder)
    always = {"policy/std", "loss/value"} if kind != "sac" else {"policy/temperature", "loss/critic"}
    for tag in always | {"reward/alive", "curriculum/level", "simulation/broken", "speed/steps_per_second"}:
        assert curves[tag] == [STEPS, 2 * STEPS, 3 * STEPS], tag
    assert curves["episode/return"]
    assert curves["episode/survival"] == curves["episode/length"] == curves["episode/return"]


def test_curves_are_means_over_the_episodes_since_the_last_point(monkeypatch: pytest.MonkeyPatch) -> None:
    with closing(Trainer(RUNS["ppo"])) as trainer:
        monkeypatch.setattr(trainer.learner, "iterate", lambda: {"loss/value": 1.0})
        trainer.rollout.finished += [(1.0, 10, True), (3.0, 20, False)]
        curves = trainer.iterate()
        assert [curves[f"episode/{k}"] for k in ("return", "length", "survival")] == [2.0, 15.0, 0.5]
        assert not [k for k in trainer.iterate() if k.startswith("episode/")]


def test_the_default_folder_says_what_and_when(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, no_export: None
) -> None:
    monkeypatch.chdir(tmp_path)
    folder = train(replace(RUNS["ppo"], steps=STEPS), QUIET)
    assert re.fullmatch(r"runs/velocity-ppo-\d{8}-\d{6}", str(folder))
    assert (tmp_path / folder / CHECKPOINT).exists()


def test_curves_go_on_where_they_stopped(tmp_path: Path, no_export: None) -> None:
    folder = run("ppo", tmp_path / "run", 2)
    resume(folder, 4)
    assert curves_of(folder)["loss/value"] == [STEPS * i for i in (1, 2, 3, 4)]


def test_points_after_the_last_checkpoint_of_a_killed_run_are_drawn_once(
    tmp_path: Path, no_export: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = run("ppo", tmp_path / "run", 2)
    with monkeypatch.context() as patch:

        def killed(*_: object) -> None:
            raise SystemExit

        patch.setattr(module, "save_checkpoint", killed)
        with pytest.raises(SystemExit):
            resume(folder, 4)
    assert load_checkpoint(folder)["iteration"] == 2
    resume(folder, 5)
    assert curves_of(folder)["loss/value"] == [STEPS * i for i in (1, 2, 3, 4, 5)]


def test_a_run_that_is_done_is_exported_again(tmp_path: Path) -> None:
    folder = run("ppo", tmp_path / "run", 2)
    before = load_checkpoint(folder)
    (folder / POLICY).unlink()
    resume(folder, 1)
    assert_same_state(load_checkpoint(folder), before)
    assert read_contract(folder / POLICY).training.env_steps == 2 * STEPS


def test_a_policy_can_be_written_anew_from_a_checkpoint(tmp_path: Path) -> None:
    folder = run("sac", tmp_path / "run", 2)
    (folder / POLICY).rename(tmp_path / "first.onnx")
    checkpoint = (folder / CHECKPOINT).read_bytes()
    assert export_run(folder) == folder / POLICY
    policies = [load_policy(p) for p in (tmp_path / "first.onnx", folder / POLICY)]
    with closing(load_trainer(folder)) as trainer:
        assert (trainer.iteration, trainer.config.algorithm) == (2, "sac")
        signals = trainer.record_signals(steps=10, num=3)
    for policy in policies:
        policy.reset(3)
    for t in range(10):
        first, second = (p({k: v[t] for k, v in signals.items()}) for p in policies)
        np.testing.assert_array_equal(first, second)
    assert policies[1].contract.training.env_steps == 2 * STEPS
    assert (folder / CHECKPOINT).read_bytes() == checkpoint
    with pytest.raises(UserError, match="no checkpoint"):
        export_run(tmp_path / "nowhere")


# ---- limits ----------------------------------------------------------------------------------------------------------


@pytest.fixture
def slow_clock(monkeypatch: pytest.MonkeyPatch) -> None:
    """Half a minute passes between any two looks at the clock."""
    ticks = iter(range(0, 100_000, 30))

    class Clock:
        @staticmethod
        def monotonic() -> float:
            return float(next(ticks))

        strftime = staticmethod(module.time.strftime)

    monkeypatch.setattr(module, "time", Clock)


def test_a_time_limit_ends_a_run(tmp_path: Path, no_export: None, slow_clock: None) -> None:
    folder = run("ppo", tmp_path / "run", 100, minutes=1.4, save_every=1e9)
    assert load_checkpoint(folder)["iteration"] == 3


def test_checkpoints_are_written_on_the_way(tmp_path: Path, no_export: None, slow_clock: None) -> None:
    folder, seen = tmp_path / "run", []

    def look(trainer: Trainer) -> bool:
        seen.append(load_checkpoint(folder)["iteration"] if (folder / CHECKPOINT).exists() else 0)
        return False

    run("ppo", folder, 6, look, save_every=70.0)
    assert seen == [0, 0, 3, 3, 3, 6]
    assert load_checkpoint(folder)["iteration"] == 6


def test_a_callback_can_end_a_run(tmp_path: Path, no_export: None) -> None:
    folder = run("ppo", tmp_path / "run", 100, lambda trainer: trainer.iteration == 2)
    assert load_checkpoint(folder)["iteration"] == 2


# ---- what goes wrong -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["ppo", "sac"])
def test_a_simulation_that_breaks_is_kept_for_replay_and_learning_goes_on(
    kind: str, tmp_path: Path, no_export: None
) -> None:
    def sabotage(trainer: Trainer) -> bool:
        if trainer.iteration == 1:
            trainer.env.backend.batch.bind("qvel")[3, 0] = np.inf
        return False

    folder = run(kind, tmp_path / "run", 4, sabotage)
    (failure,) = (folder / "failures").iterdir()
    assert load_failure(failure).plant == short_task("velocity", "unitree_h1_2").plant
    assert replay(failure).broke == 0
    saved = load_checkpoint(folder)
    assert saved["rollout"]["env"]["broken"] == 1
    for name, value in leaves(to_tensors(saved["learner"])):
        assert not isinstance(value, torch.Tensor) or torch.isfinite(value).all(), name


def test_a_run_that_diverges_ends_with_its_last_good_checkpoint(
    tmp_path: Path, no_export: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = run("ppo", tmp_path / "run", 2)
    before = (folder / CHECKPOINT).read_bytes()
    monkeypatch.setattr(module.PPOLearner, "iterate", lambda _: {"loss/value": float("nan")})
    with pytest.raises(UserError, match=f"training diverged: loss/value is nan after {2 * STEPS} steps"):
        resume(folder, 4)
    assert (folder / CHECKPOINT).read_bytes() == before


def test_an_error_leaves_the_last_checkpoint_and_no_thread(tmp_path: Path, no_export: None) -> None:
    folder = run("sac", tmp_path / "run", 1)
    before = (folder / CHECKPOINT).read_bytes()

    def fail(trainer: Trainer) -> bool:
        raise RuntimeError("of the caller's own")

    with pytest.raises(RuntimeError, match="of the caller's own"):
        resume(folder, 2, fail)
    assert (folder / CHECKPOINT).read_bytes() == before


def test_a_full_disk_ends_a_run_with_its_old_checkpoint(
    tmp_path: Path, no_export: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = run("ppo", tmp_path / "run", 1)

    def full(_: int) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    with monkeypatch.context() as patch:
        patch.setattr(os, "fsync", full)
        with pytest.raises(UserError, match="No space left on device; the previous checkpoint is unchanged"):
            resume(folder, 2)
    assert load_checkpoint(folder)["iteration"] == 1
    resume(folder, 2)
    assert load_checkpoint(folder)["iteration"] == 2


def test_an_export_that_fails_fails_the_run_but_loses_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("policies.export.compare", lambda *_: 0.5)
    with pytest.raises(UserError, match=r"differs from torch by 5\.00e-01"):
        run("ppo", tmp_path / "run", 1)
    assert not (tmp_path / "run" / POLICY).exists()
    assert load_checkpoint(tmp_path / "run")["iteration"] == 1


# ---- command line ----------------------------------------------------------------------------------------------------


def test_the_command_line_is_made_of_the_configuration() -> None:
    assert tyro.cli(TrainConfig, args=[]) == TrainConfig()
    words = "--task velocity-rough --algorithm sac --steps 9 --minutes 0.5 --out a/b --walking.history 3"
    more = "--ppo.hidden 64 32 --ppo.recurrent gru --sac.batch 7"
    assert tyro.cli(TrainConfig, args=f"{words} {more}".split()) == TrainConfig(
        task="velocity-rough",
        algorithm="sac",
        steps=9,
        minutes=0.5,
        out=Path("a/b"),
        walking=WalkingConfig(history=3),
        ppo=PPOConfig(hidden=(64, 32), recurrent="gru"),
        sac=SACConfig(batch=7),
    )


def test_help_says_defaults_and_units(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        tyro.cli(TrainConfig, args=["--help"])
    text = capsys.readouterr().out
    assert "Wall-clock limit [min]" in text
    assert "--ppo.gamma" in text
    assert "0.99" in text


def test_a_finished_run_says_where_its_policy_is(tmp_path: Path, no_export: None) -> None:
    console = Console(record=True, width=200, quiet=False, file=open(os.devnull, "w"))  # noqa: SIM115
    folder = train(replace(RUNS["ppo"], out=tmp_path / "run", steps=4 * STEPS), console)
    console.file.close()
    text = console.export_text()
    assert f"policy: {folder / POLICY} (differs from torch by at most 0.0e+00 rad)" in text.replace("\n", "")
    assert "192/192 steps" in text
    assert "return" in text


@pytest.mark.parametrize("kind", ["ppo", "sac"])
def test_a_run_begins_with_another_ones_weights_level_and_steps(kind, tmp_path, no_export):
    first = run(kind, tmp_path / "first")
    saved = load_checkpoint(first)
    saved["rollout"]["env"]["task"]["level"] = 0.375
    with closing(Trainer(replace(RUNS[kind], seed=5))) as trainer:
        trainer.begin_with(saved)
        assert (trainer.task.level, trainer.env_steps, trainer.iteration) == (0.375, 2 * STEPS, 0)
        obs = torch.randn(4, trainer.interface.num_obs)
        with closing(load_trainer(first)) as old:
            actions = [t.learner.actor()(obs, {})[0] for t in (trainer, old)]
        torch.testing.assert_close(*actions, rtol=0, atol=0)


def test_a_run_does_not_begin_with_another_learner_or_other_sizes(tmp_path, no_export):
    first = run("ppo", tmp_path / "first")
    with pytest.raises(UserError, match="expected algorithm sac, found ppo"):
        run("sac", tmp_path / "second", begin_with=first)
    with pytest.raises(UserError, match="cannot begin with that run: RuntimeError"):
        run("ppo", tmp_path / "third", begin_with=first, ppo=replace(PPO, hidden=(32, 8)))
    assert not (tmp_path / "third").exists()
