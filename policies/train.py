"""Train a policy: one run folder, curves, checkpoints, an exported policy at the end; Ctrl-C keeps and exports the last."""

import dataclasses
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch
from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn
from torch.utils.tensorboard import SummaryWriter

from policies.export import Provenance, export_policy
from policies.interface import WalkingInterface
from policies.ppo import PPOConfig, PPOLearner
from policies.rollout import Rollout
from policies.runs import CONFIG, POLICY, load_checkpoint, save_checkpoint, write_json
from policies.sac import SACConfig, SACLearner
from robots.errors import UserError
from sim.environment import Environment
from sim.tasks import make_task

Learner = PPOLearner | SACLearner


@dataclass(frozen=True, kw_only=True)
class TrainConfig:
    """What to train, how long, and where the run goes."""

    task: str = "velocity"
    """Task name; `tarsus tasks` lists them."""
    robot: str = "unitree_h1_2"
    """Robot name; `tarsus robots` lists them."""
    algorithm: Literal["ppo", "sac"] = "ppo"
    """Learner."""
    steps: int = 3_000_000
    """Environment steps in all, over all simulations."""
    minutes: float = 0.0
    """Wall-clock limit [min]; 0 for none."""
    seed: int = 0
    """Seed of everything random."""
    threads: int = 0
    """Threads of the simulation; 0 for all cores. Results do not depend on it."""
    out: Path | None = None
    """Run folder; by default runs/<task>-<algorithm>-<time>."""
    resume: Path | None = None
    """Run folder to go on with, up to `steps`; its own task, robot, algorithm, seed and learner settings are used."""
    save_every: float = 60.0
    """Time between checkpoints [s]."""
    ppo: PPOConfig = PPOConfig()  # noqa: RUF009 - frozen
    """PPO's settings."""
    sac: SACConfig = SACConfig()  # noqa: RUF009 - frozen
    """SAC's settings."""


class Trainer:
    """A run in progress: environment, learner and counters, saved and restored as one."""

    def __init__(self, config: TrainConfig, failures: Path | None = None) -> None:
        """Build everything from the configuration and seed it. `failures`: folder for simulations that broke."""
        torch.set_num_threads(1)  # small networks: more threads cost more than they bring, and change the last bits
        torch.manual_seed(config.seed)
        self.config = config
        self.task = make_task(config.task, config.robot)
        self.learner_config = config.ppo if config.algorithm == "ppo" else config.sac
        self.env = Environment(
            self.task, self.learner_config.num_envs, config.seed, threads=config.threads, failures=failures
        )
        self.interface = WalkingInterface(self.task.spec, self.task.config.gait, self.task.plant.control_dt)
        self.rollout = Rollout(self.env, self.interface)
        self.rollout.reset()
        self.learner: Learner = (
            PPOLearner(self.rollout, config.ppo) if config.algorithm == "ppo" else SACLearner(self.rollout, config.sac)
        )
        self.env_steps = 0
        self.iteration = 0

    def iterate(self) -> dict[str, float]:
        """One iteration of the learner; returns curve values by name."""
        curves = self.learner.iterate()
        self.env_steps += self.learner.steps_per_iteration
        self.iteration += 1
        finished = self.rollout.finished
        if finished:
            curves["episode/return"] = float(np.mean([f[0] for f in finished]))
            curves["episode/length"] = float(np.mean([f[1] for f in finished]))
            curves["episode/survival"] = float(np.mean([f[2] for f in finished]))
        finished.clear()
        return curves | self.task.log() | {"simulation/broken": float(self.env.broken)}

    def state(self) -> dict[str, Any]:
        """Everything a bit-identical continuation needs."""
        return {
            "what": _identity(self.config),
            "rollout": self.rollout.state(),
            "learner": self.learner.state(),
            "torch_rng": torch.get_rng_state(),
            "env_steps": self.env_steps,
            "iteration": self.iteration,
        }

    def restore(self, saved: dict[str, Any]) -> None:
        """Take back what `state` returned. Raises UserError for a checkpoint of another task, robot or learner."""
        mine, theirs = _identity(self.config), saved["what"]
        for key, wanted in mine.items():
            if theirs.get(key) != wanted:
                raise UserError(f"the checkpoint has {key} '{theirs.get(key)}', this run has '{wanted}'; resume it as it was")
        self.rollout.restore(saved["rollout"])
        self.learner.restore(saved["learner"])
        torch.set_rng_state(saved["torch_rng"])
        self.env_steps, self.iteration = saved["env_steps"], saved["iteration"]

    def export(self, path: Path) -> float:
        """Write the policy file, checked on signals of this environment; returns the largest difference [rad]."""
        provenance = Provenance(
            task=self.config.task,
            algorithm=self.config.algorithm,
            seed=self.config.seed,
            env_steps=self.env_steps,
            plant=self.task.plant,
        )
        return export_policy(self.interface, self.learner.actor(), provenance, path, self.record_signals())

    def record_signals(self, steps: int = 50, num: int = 16) -> dict[str, np.ndarray]:
        """Signals (steps, num, ...) of the present policy in a fresh environment, for checks; training is not touched."""
        with torch.random.fork_rng(devices=[]):
            task = make_task(self.config.task, self.config.robot)
            env = Environment(task, num, self.config.seed + 1, threads=self.config.threads)
            rollout = Rollout(env, self.interface)
            rollout.reset()
            actor = self.learner.actor()
            frames: dict[str, list[np.ndarray]] = {k: [] for k in self.interface.inputs}
            with torch.inference_mode():
                for _ in range(steps):
                    for k, values in frames.items():
                        values.append(env.signals[k].copy())
                    rollout.step(actor(rollout.get_observations()["actor"]))
        return {k: np.stack(v) for k, v in frames.items()}


def train(config: TrainConfig, console: Console | None = None, on_iteration: Callable[[Trainer], bool] | None = None) -> Path:
    """Run a training; returns its folder, which holds config.json, checkpoint.pt, TensorBoard curves and policy.onnx.

    `on_iteration` is called after every iteration; True stops the run as a limit would. Raises UserError.
    """
    console = console or Console()
    config, saved = _resumed(config) if config.resume else (config, None)
    folder = config.resume or config.out or Path("runs") / f"{config.task}-{config.algorithm}-{time.strftime('%Y%m%d-%H%M%S')}"
    if saved is None and (folder / CONFIG).exists():
        raise UserError(f"{folder} already holds a run; go on with it by --resume {folder} or choose another --out")
    trainer = Trainer(config, failures=folder / "failures")
    if saved is not None:
        trainer.restore(saved)
    folder.mkdir(parents=True, exist_ok=True)
    write_json(folder / CONFIG, dataclasses.replace(config, resume=None, out=None))
    writer = SummaryWriter(str(folder), purge_step=trainer.env_steps or None)
    try:
        with _quiet_interrupt(console, folder):
            _loop(trainer, config, folder, writer, console, on_iteration)
    finally:
        writer.close()
        save_checkpoint(folder, trainer.state())
    difference = trainer.export(folder / POLICY)
    console.print(f"policy: {folder / POLICY} (differs from torch by at most {difference:.1e} rad)")
    return folder


class _quiet_interrupt:  # noqa: N801 - reads as a statement
    """Ctrl-C ends the loop, not the run: checkpoint and export still happen."""

    def __init__(self, console: Console, folder: Path) -> None:
        self.console, self.folder = console, folder

    def __enter__(self) -> None:
        pass

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> bool:
        if kind is KeyboardInterrupt:
            self.console.print(f"interrupted; saving and exporting; go on with --resume {self.folder}")
        return kind is KeyboardInterrupt


def _loop(
    trainer: Trainer,
    config: TrainConfig,
    folder: Path,
    writer: SummaryWriter,
    console: Console,
    on_iteration: Callable[[Trainer], bool] | None,
) -> None:
    start, first, last_save = time.monotonic(), trainer.env_steps, time.monotonic()
    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        TextColumn("{task.completed:,.0f}/{task.total:,.0f} steps"),
        TextColumn("{task.fields[curves]}"),
        TimeElapsedColumn(),
        TimeRemainingColumn(),
    )
    with Progress(*columns, console=console) as progress:
        bar = progress.add_task(config.task, total=config.steps, completed=trainer.env_steps, curves="")
        while trainer.env_steps < config.steps:
            curves = trainer.iterate()
            elapsed = time.monotonic() - start
            curves["speed/steps_per_second"] = (trainer.env_steps - first) / elapsed
            for name, value in curves.items():
                writer.add_scalar(name, value, trainer.env_steps)
            progress.update(bar, completed=trainer.env_steps, curves=_summary(curves))
            if time.monotonic() - last_save > config.save_every:
                save_checkpoint(folder, trainer.state())
                last_save = time.monotonic()
            if (config.minutes and elapsed > 60 * config.minutes) or (on_iteration is not None and on_iteration(trainer)):
                break


def _summary(curves: dict[str, float]) -> str:
    parts = [f"{curves['speed/steps_per_second']:,.0f}/s"]
    if "episode/return" in curves:
        parts.append(f"return {curves['episode/return']:.1f} length {curves['episode/length']:.0f}")
    return "  ".join(parts)


def _resumed(config: TrainConfig) -> tuple[TrainConfig, dict[str, Any]]:
    """The configuration of the run to go on with (limits from `config`), and its checkpoint."""
    assert config.resume is not None
    saved = load_checkpoint(config.resume)
    what = saved["what"]
    resumed = dataclasses.replace(
        config,
        **{k: what[k] for k in ("task", "robot", "algorithm", "seed")},
        ppo=PPOConfig(**_tuples(what["ppo"])),
        sac=SACConfig(**_tuples(what["sac"])),
    )
    return resumed, saved


def _identity(config: TrainConfig) -> dict[str, Any]:
    """What makes two runs the same run."""
    plain = {k: getattr(config, k) for k in ("task", "robot", "algorithm", "seed")}
    return plain | {k: _lists(dataclasses.asdict(getattr(config, k))) for k in ("ppo", "sac")}


def _lists(values: dict[str, Any]) -> dict[str, Any]:
    return {k: list(v) if isinstance(v, tuple) else v for k, v in values.items()}


def _tuples(values: dict[str, Any]) -> dict[str, Any]:
    return {k: tuple(v) if isinstance(v, list) else v for k, v in values.items()}
