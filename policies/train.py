"""Train a policy: one run folder, curves, checkpoints, an exported policy at the end, after Ctrl-C too."""

import contextlib
import dataclasses
import math
import signal
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch
from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn
from torch.utils.tensorboard import SummaryWriter

from policies.export import Provenance, export_policy
from policies.interface import WalkingConfig, WalkingInterface, initial_state, restarted
from policies.networks import Actor
from policies.ppo import PPOConfig, PPOLearner
from policies.rollout import Rollout
from policies.runs import (
    CHECKPOINT,
    CONFIG,
    POLICY,
    differences,
    from_plain,
    load_checkpoint,
    save_checkpoint,
    to_plain,
    write_json,
)
from policies.sac import SACConfig, SACLearner
from robots.errors import UserError
from sim.environment import Environment
from sim.tasks import make_task
from sim.tasks.velocity import Velocity

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
    """Run folder to go on with; its own settings are used, but for steps, minutes, threads and save_every."""
    begin_with: Path | None = None
    """Run folder whose weights, curriculum level and step count a new run begins with; everything else starts anew,
    exploration at the learner's first standard deviation. For a second stage with other settings."""
    save_every: float = 60.0
    """Time between checkpoints [s]."""
    walking: WalkingConfig = field(default_factory=WalkingConfig)
    """What the policy sees and what its actions mean."""
    ppo: PPOConfig = field(default_factory=PPOConfig)
    """PPO's settings."""
    sac: SACConfig = field(default_factory=SACConfig)
    """SAC's settings."""


class Trainer:
    """A run in progress: environment, learner and counters, saved and restored as one."""

    def __init__(self, config: TrainConfig, failures: Path | None = None) -> None:
        """Build everything from the configuration and seed it; `close` it in the end.

        `failures`: folder for simulations that broke. Sets the number of torch's threads for the whole process.
        Raises UserError.
        """
        torch.set_num_threads(1)  # small networks: more threads cost more than they bring, and change the last bits
        torch.manual_seed(config.seed)
        self.config = config
        self.task = _walking_task(config)
        num_envs = config.ppo.num_envs if config.algorithm == "ppo" else config.sac.num_envs
        self.env = Environment(self.task, num_envs, config.seed, threads=config.threads, failures=failures)
        gait, dt = self.task.config.gait, self.task.plant.control_dt
        self.interface = WalkingInterface(self.task.spec, gait, dt, config.walking)
        self.rollout = Rollout(self.env, self.interface)
        self.rollout.reset()
        self.learner: Learner = (
            PPOLearner(self.rollout, config.ppo) if config.algorithm == "ppo" else SACLearner(self.rollout, config.sac)
        )
        self.env_steps = 0
        self.iteration = 0
        self.settled = True
        """False within an iteration, when `state` would be of no use."""

    def iterate(self) -> dict[str, float]:
        """One iteration of the learner; returns curve values by name. Raises UserError when it diverged."""
        self.settled = False
        curves = self.learner.iterate()
        for name, value in curves.items():
            if not math.isfinite(value):
                raise UserError(f"training diverged: {name} is {value} after {self.env_steps} steps; lower step sizes")
        self.env_steps += self.learner.steps_per_iteration
        self.iteration += 1
        self.settled = True
        finished = self.rollout.finished
        if finished:
            curves["episode/return"] = float(np.mean([f[0] for f in finished]))
            curves["episode/length"] = float(np.mean([f[1] for f in finished]))
            curves["episode/survival"] = float(np.mean([f[2] for f in finished]))
        finished.clear()
        return curves | self.task.log() | {"simulation/broken": float(self.env.broken)}

    def state(self) -> dict[str, Any]:
        """Everything a bit-identical continuation needs, between two iterations."""
        return {
            "config": to_plain(dataclasses.replace(self.config, out=None, resume=None, begin_with=None)),
            "what": self._identity(),
            "rollout": self.rollout.state(),
            "learner": self.learner.state(),
            "torch_rng": torch.get_rng_state(),
            "env_steps": self.env_steps,
            "iteration": self.iteration,
        }

    def restore(self, saved: dict[str, Any]) -> None:
        """Take back what `state` returned.

        Raises UserError for a checkpoint of another task, robot, learner or other settings, and for one that is not
        whole; the trainer is of no use then.
        """
        try:
            differing = differences(self._identity(), saved["what"])
            if differing:
                listed = "; ".join(differing[:5]) + (f"; and {len(differing) - 5} more" if len(differing) > 5 else "")
                raise UserError(f"the checkpoint is of another run: {listed}")
            self.rollout.restore(saved["rollout"])
            self.learner.restore(saved["learner"])
            torch.set_rng_state(saved["torch_rng"])
            self.env_steps, self.iteration = int(saved["env_steps"]), int(saved["iteration"])
        except (KeyError, IndexError, TypeError, ValueError, AttributeError, RuntimeError) as error:
            reason = " ".join(str(error).split())
            raise UserError(f"the checkpoint is not whole: {type(error).__name__}: {reason}") from error

    def begin_with(self, saved: dict[str, Any]) -> None:
        """Take weights, curriculum level and step count from another run's `state`.

        Raises UserError for a run of another task, robot, learner or interface, or with networks of another size.
        """
        mine, theirs = self._identity(), saved.get("what", {})
        for key in ("task", "robot", "algorithm", "walking", "robot model"):
            if theirs.get(key) != mine[key]:
                raise UserError(f"cannot begin with that run: expected {key} {mine[key]}, found {theirs.get(key)}")
        try:
            self.learner.begin_with(saved["learner"])
            self.task.level = float(saved["rollout"]["env"]["task"]["level"])
            self.env_steps = int(saved["env_steps"])
        except (KeyError, RuntimeError) as error:
            reason = " ".join(str(error).split())
            raise UserError(f"cannot begin with that run: {type(error).__name__}: {reason}") from error

    def export(self, path: Path, actor: Actor | None = None) -> float:
        """Write the policy file of the learner's actor, or of a snapshot of it, checked on signals of this task.

        Returns the largest difference [rad]. Training goes on as if nothing had happened. Raises UserError.
        """
        provenance = Provenance(
            task=self.config.task,
            algorithm=self.config.algorithm,
            seed=self.config.seed,
            env_steps=self.env_steps,
            plant=self.task.plant,
        )
        return export_policy(self.interface, actor or self.learner.actor(), provenance, path, self.record_signals())

    def record_signals(self, steps: int = 50, num: int = 16) -> dict[str, np.ndarray]:
        """Signals (steps, num, ...) of the present policy in a fresh environment; training is not touched."""
        with torch.inference_mode():
            env = Environment(_walking_task(self.config), num, self.config.seed + 1, threads=self.config.threads)
            rollout, actor = Rollout(env, self.interface), self.learner.actor()
            rollout.reset()
            memory = initial_state(actor.states, num)
            frames: dict[str, list[np.ndarray]] = {k: [] for k in self.interface.inputs}
            for _ in range(steps):
                for k, values in frames.items():
                    values.append(env.signals[k].copy())
                action, memory = actor(rollout.get_observations()["actor"], memory)
                _, _, dones, _ = rollout.step(action)
                memory = restarted(memory, actor.states, dones.nonzero().squeeze(1))
        return {k: np.stack(v) for k, v in frames.items()}

    def close(self) -> None:
        """End what runs beside the main thread."""
        self.learner.close()

    def _identity(self) -> dict[str, Any]:
        """What makes two runs the same run, plain; the task's numbers and the robot's model stand in no TrainConfig."""
        config = self.config
        plain: dict[str, Any] = to_plain(
            {
                **{k: getattr(config, k) for k in ("task", "robot", "algorithm", "seed", "walking", config.algorithm)},
                "task settings": self.task.config,
                "robot model": self.task.spec.model_hash,
            }
        )
        return plain


def load_trainer(folder: Path) -> Trainer:
    """The trainer of a run folder's last checkpoint, to be closed in the end. Raises UserError."""
    saved = load_checkpoint(folder)
    trainer = Trainer(_saved_config(folder, saved))
    with contextlib.ExitStack() as undo:
        undo.callback(trainer.close)
        trainer.restore(saved)
        undo.pop_all()
    return trainer


def train(
    config: TrainConfig, console: Console | None = None, on_iteration: Callable[[Trainer], bool] | None = None
) -> Path:
    """Run a training; returns its folder, which holds config.json, checkpoint.pt, TensorBoard curves and policy.onnx.

    Ctrl-C ends it after the iteration under way, as a limit would; a second one at once, with the last checkpoint.

    Args:
        config: What to train.
        console: Where progress is shown; by default the terminal.
        on_iteration: Called after every iteration; True ends the run as a limit would.

    Raises: UserError; KeyboardInterrupt for the second Ctrl-C.
    """
    console = console or Console()
    saved = load_checkpoint(config.resume) if config.resume else None
    config = _resumed(config, saved) if saved is not None else config
    folder = _folder(config)
    with contextlib.closing(Trainer(config, failures=folder / "failures")) as trainer:
        if saved is not None:
            trainer.restore(saved)
        elif config.begin_with is not None:
            trainer.begin_with(load_checkpoint(config.begin_with))
        del saved
        folder.mkdir(parents=True, exist_ok=True)
        write_json(folder / CONFIG, dataclasses.replace(config, resume=None, out=None, begin_with=None))
        # Points after the checkpoint that a run left when it was killed are hidden; the checkpoint's own stays.
        purge = trainer.env_steps + 1 if config.resume else None
        with SummaryWriter(str(folder), purge_step=purge) as writer:
            if _loop(trainer, folder, writer, console, on_iteration):
                console.print(f"interrupted; saving and exporting; go on with --resume {folder}")
        save_checkpoint(folder, trainer.state())
        difference = trainer.export(folder / POLICY)
    console.print(f"policy: {folder / POLICY} (differs from torch by at most {difference:.1e} rad)")
    return folder


class _Interruption:
    """While it is entered, the first Ctrl-C only sets `requested`; the second raises KeyboardInterrupt."""

    def __init__(self) -> None:
        self.requested = False

    def __enter__(self) -> "_Interruption":
        # Handlers belong to the main thread; one that is not Python's own was put there by someone who wants it.
        mine = threading.current_thread() is threading.main_thread()
        self._installed = mine and signal.getsignal(signal.SIGINT) is signal.default_int_handler
        if self._installed:
            signal.signal(signal.SIGINT, self._note)
        return self

    def __exit__(self, *_: object) -> None:
        if self._installed:
            signal.signal(signal.SIGINT, signal.default_int_handler)

    def _note(self, *_: object) -> None:
        if self.requested:
            raise KeyboardInterrupt
        self.requested = True


def _loop(
    trainer: Trainer,
    folder: Path,
    writer: SummaryWriter,
    console: Console,
    on_iteration: Callable[[Trainer], bool] | None,
) -> bool:
    """Iterate up to a limit; returns whether Ctrl-C ended it."""
    config, first, start = trainer.config, trainer.env_steps, time.monotonic()
    last_save, latest = start, dict[str, float]()
    with _progress(console) as progress, _Interruption() as interruption:
        bar = progress.add_task(config.task, total=config.steps, completed=first, curves="")
        try:
            while trainer.env_steps < config.steps and not interruption.requested:
                curves = trainer.iterate()
                now = time.monotonic()
                curves["speed/steps_per_second"] = (trainer.env_steps - first) / (now - start)
                for name, value in curves.items():
                    writer.add_scalar(name, value, trainer.env_steps)
                latest |= curves
                progress.update(bar, completed=trainer.env_steps, curves=_summary(latest))
                if now - last_save > config.save_every:
                    save_checkpoint(folder, trainer.state())
                    last_save = time.monotonic()
                if on_iteration is not None and on_iteration(trainer):
                    break
                if config.minutes and now - start > 60 * config.minutes:
                    break
        except KeyboardInterrupt:
            if not trainer.settled:
                raise
            return True
    return interruption.requested


def _progress(console: Console) -> Progress:
    return Progress(
        TextColumn("{task.description}"),
        BarColumn(),
        TextColumn("{task.completed:,.0f}/{task.total:,.0f} steps"),
        TextColumn("{task.fields[curves]}"),
        TimeElapsedColumn(),
        TimeRemainingColumn(),
        console=console,
    )


def _summary(curves: dict[str, float]) -> str:
    parts = [f"{curves['speed/steps_per_second']:,.0f}/s"]
    if "episode/return" in curves:
        parts.append(f"return {curves['episode/return']:.1f} length {curves['episode/length']:.0f}")
    return "  ".join(parts)


def _folder(config: TrainConfig) -> Path:
    """Where the run goes. Raises UserError for a new run in a folder that holds another."""
    if config.resume:
        return config.resume
    stamp = time.strftime("%Y%m%d-%H%M%S")
    folder = config.out or Path("runs") / f"{config.task}-{config.algorithm}-{stamp}"
    if (folder / CONFIG).exists() or (folder / CHECKPOINT).exists():
        raise UserError(f"{folder} already holds a run; go on with it by --resume {folder} or choose another --out")
    return folder


def _resumed(config: TrainConfig, saved: dict[str, Any]) -> TrainConfig:
    """The configuration of the run to go on with, its limits from `config`. Raises UserError."""
    assert config.resume is not None
    if config.out is not None:
        raise UserError("--resume goes on in the run's own folder: leave out --out")
    limits = {k: getattr(config, k) for k in ("steps", "minutes", "threads", "save_every", "resume")}
    return dataclasses.replace(_saved_config(config.resume, saved), **limits)


def _saved_config(folder: Path, saved: dict[str, Any]) -> TrainConfig:
    """The configuration inside a checkpoint. Raises UserError."""
    return from_plain(TrainConfig, saved.get("config"), f"the checkpoint in {folder}")


def _walking_task(config: TrainConfig) -> Velocity:
    """The task, one that a walking policy can learn. Raises UserError."""
    task = make_task(config.task, config.robot)
    if not isinstance(task, Velocity):
        raise UserError(f"task '{config.task}' has no command to walk at: this trainer cannot learn it")
    return task
