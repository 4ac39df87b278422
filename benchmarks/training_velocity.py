"""How long a from-scratch training takes to walk, for both learners through the same command, and what it costs.

A training runs as `tarsus train velocity` does; every 15 s of training a copy of the actor is put aside. The copies
are evaluated afterwards on the reference plant, so that evaluation costs the training nothing. The robot walks from the
first copy on that, like the one after it, survives at least 95 % of the easy episodes with E_vel at most 0.15 m/s.
"""

import resource
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import torch
from common import Benchmark, finish, run
from rich.console import Console

from policies.evaluate import evaluate
from policies.networks import Actor
from policies.ppo import PPOLearner
from policies.train import TrainConfig, Trainer, train

SURVIVAL, E_VEL = 0.95, 0.15


@dataclass(frozen=True, kw_only=True)
class Config(Benchmark):
    """What to train and how to judge it."""

    algorithms: tuple[Literal["ppo", "sac"], ...] = ("ppo",)
    """Learners, one after the other."""
    minutes: float = 6.0
    """Training time per learner [min]."""
    every: float = 15.0
    """Training time between copies [s]."""
    episodes: int = 40
    """Episodes per judged copy."""
    seed: int = 0
    """Seed of the training."""
    threads: int = 2
    """Threads of the simulation."""


@dataclass(kw_only=True)
class Copy:
    """An actor put aside."""

    seconds: float
    """Training time [s]."""
    env_steps: int
    """Environment steps so far."""
    actor: Actor
    """The actor as it was then."""
    survival: float | None = None
    """Share of easy episodes without a fall."""
    e_vel: float | None = None
    """Velocity error on easy [m/s]."""


class Watch:
    """Puts copies aside and times the learner, from inside a training."""

    def __init__(self, every: float) -> None:
        """Copy every `every` seconds."""
        self.every, self.copies, self.start, self.learning = every, list[Copy](), 0.0, 0.0
        self.trainer: Trainer | None = None

    def __call__(self, trainer: Trainer) -> bool:
        """After an iteration."""
        if self.trainer is None:
            self._begin(trainer)
        seconds = time.perf_counter() - self.start
        if seconds >= self.every * (len(self.copies) + 1):
            actor = trainer.learner.actor()
            self.copies.append(Copy(seconds=seconds, env_steps=trainer.env_steps, actor=actor))
        return False

    def _begin(self, trainer: Trainer) -> None:
        self.trainer, self.start = trainer, time.perf_counter()
        if isinstance(trainer.learner, PPOLearner):
            update = trainer.learner.algorithm.update

            def timed() -> Any:
                start = time.perf_counter()
                try:
                    return update()
                finally:
                    self.learning += time.perf_counter() - start

            trainer.learner.algorithm.update = timed


def main(config: Config) -> None:
    results = {a: measure(config, a) for a in config.algorithms}
    quickest = min(results, key=lambda a: results[a]["minutes_to_walking"] or float("inf"))
    document = {k: v for k, v in results[quickest].items() if k != "copies"}
    finish(config, "training_velocity", {**document, "algorithm": quickest, "learners": results}, seeds=(config.seed,))


def measure(config: Config, algorithm: Literal["ppo", "sac"]) -> dict[str, Any]:
    """Train once and judge the copies; times in minutes, memory in GiB."""
    minutes = 0.5 if config.quick else config.minutes
    watch = Watch(config.every)
    with tempfile.TemporaryDirectory() as folder:
        request = TrainConfig(
            algorithm=algorithm,
            minutes=minutes,
            steps=10**9,
            seed=config.seed,
            threads=config.threads,
            out=Path(folder) / "run",
            save_every=1e9,
        )
        train(request, Console(stderr=True), watch)
        total = time.perf_counter() - watch.start
        walking = judge(config, watch, Path(folder) / "copy.onnx")
    trainer = watch.trainer
    assert trainer is not None
    return {
        "minutes_to_walking": round(walking.seconds / 60, 2) if walking else None,
        "env_steps_to_walking": walking.env_steps if walking else None,
        "learner_share": round(watch.learning / total, 3) if watch.learning else None,
        "peak_memory_gib": round(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20, 2),
        "steps_per_s": round(trainer.env_steps / total),
        "copies": [
            {"minutes": round(c.seconds / 60, 2), "env_steps": c.env_steps, "survival": c.survival, "e_vel": c.e_vel}
            for c in watch.copies
        ],
    }


def judge(config: Config, watch: Watch, path: Path) -> Copy | None:
    """Evaluate the copies in order; returns the first of two that walk in a row."""
    trainer = watch.trainer
    assert trainer is not None
    torch.set_num_threads(1)
    before: Copy | None = None
    for c in watch.copies:
        trainer.export(path, c.actor)
        seconds = 2.0 if config.quick else 20.0
        evaluation = evaluate(path, ["easy"], episodes=config.episodes, seconds=seconds, threads=config.threads)
        c.survival, c.e_vel = evaluation.value("easy", "survival"), evaluation.value("easy", "e_vel")
        walks = (c.survival or 0) >= SURVIVAL and c.e_vel is not None and c.e_vel <= E_VEL
        if walks and before is not None:
            return before
        before = c if walks else None
    return None


if __name__ == "__main__":
    run(main, Config)
