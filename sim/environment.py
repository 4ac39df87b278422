"""The environment loop: a backend, a task, episodes, terminations, staggered resets. Actions are joint targets."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, Protocol

import numpy as np
from numpy.typing import NDArray

from sim.backend import Backend, Float32, Ids, PlantConfig, Start, make_backend

Bool = NDArray[np.bool_]

MOST_FAILURES = 100
"""So many simulations that broke are kept for replay; a policy that diverges must not fill the disk."""


@dataclass(frozen=True, kw_only=True)
class EpisodeConfig:
    """Length and phase of episodes."""

    seconds: float = 20.0
    """Time limit [s]; reaching it is no failure: the value of the last state is bootstrapped."""
    stagger: Literal["blocks", "random", "none"] = "random"
    """Episode phases at the start of training: evenly spread over the simulations, drawn at random, or all zero.
    Without it a short rollout sees one phase of the episode at a time."""


class Task(Protocol):
    """What is to be done with the robot: commands, rewards, failure, curriculum."""

    plant: PlantConfig
    episode: EpisodeConfig
    signals: dict[str, Float32]

    def bind(self, backend: Backend) -> None:
        """Prepare for the simulations of `backend`."""

    def begin(self, ids: Ids, rng: np.random.Generator) -> Start:
        """Start episodes in `ids`: draw commands, return initial conditions."""

    def advance(self, targets: Float32, steps: NDArray[np.int64], rng: np.random.Generator) -> tuple[Float32, Bool]:
        """Reward (N,) and failure (N,) of the control step just made, after `steps` (N) steps of the episode."""

    def disturb(self, steps: NDArray[np.int64], rng: np.random.Generator) -> None:
        """Change commands and push the robot, before the next control step."""

    def log(self) -> dict[str, float]:
        """Curves since the last call, by name."""

    def finish(self, ids: Ids, steps: NDArray[np.int64], timed_out: Bool) -> None:
        """Learn from the episodes that end (curricula)."""

    def state(self) -> dict[str, Any]:
        """Everything a bit-identical continuation needs."""

    def restore(self, state: dict[str, Any]) -> None:
        """Take back what `state` returned."""


@dataclass(kw_only=True)
class Step:
    """What one control step brought."""

    reward: Float32
    """(N,)"""
    failed: Bool
    """Episodes that ended by failure (N,)."""
    timed_out: Bool
    """Episodes that ended by the time limit (N,)."""
    ended: Ids
    """Simulations whose episode ended and was started anew (n,)."""
    final: Mapping[str, Float32] = field(default_factory=dict)
    """Signals of `ended` at the end of the old episode (n, ...), for bootstrapping."""


class Environment:
    """Many copies of a task, advanced together.

    `signals` maps names to live float32 arrays (N, ...): the backend's, the task's, measured and `privileged.`.
    """

    def __init__(
        self,
        task: Task,
        num_envs: int,
        seed: int,
        backend: str = "mujoco",
        threads: int = 0,
        failures: Path | None = None,
    ) -> None:
        """Build `num_envs` simulations. `failures`: folder for what `sim.replay` needs of simulations that broke."""
        self.task, self.num_envs = task, num_envs
        self.rng = np.random.Generator(np.random.SFC64(seed))
        self.backend = make_backend(backend, task.plant, num_envs, threads)
        task.bind(self.backend)
        self.signals: dict[str, Float32] = {**self.backend.signals, **task.signals}
        self.limit = round(task.episode.seconds / task.plant.control_dt)
        self.steps = np.zeros(num_envs, np.int64)
        self.broken = 0
        self._failures = failures

    def reset(self) -> None:
        """Start all episodes, at the phases the task's stagger setting asks for."""
        everyone = np.arange(self.num_envs)
        self._begin(everyone)
        if self.task.episode.stagger == "blocks":
            self.steps[:] = everyone * self.limit // self.num_envs
        elif self.task.episode.stagger == "random":
            self.steps[:] = self.rng.integers(0, self.limit, self.num_envs)

    def step(self, targets: Float32) -> Step:
        """Hold joint targets (N, J) [rad], in spec order, for one control step."""
        broken = self.backend.step(targets)
        self.steps += 1
        reward, failed = self.task.advance(targets, self.steps, self.rng)
        if len(broken):
            self._record(broken, reward, failed)
        timed_out = (self.steps >= self.limit) & ~failed
        self.task.disturb(self.steps, self.rng)
        self.backend.measure(self.rng)
        ended = np.flatnonzero(failed | timed_out)
        final = {name: values[ended] for name, values in self.signals.items()} if len(ended) else {}
        if len(ended):
            self.task.finish(ended, self.steps[ended], timed_out[ended])
            self._begin(ended)
        return Step(reward=reward, failed=failed, timed_out=timed_out, ended=ended, final=final)

    def state(self) -> dict[str, Any]:
        """Everything a bit-identical continuation needs."""
        return {
            "rng": self.rng.bit_generator.state,
            "steps": self.steps.copy(),
            "broken": self.broken,
            "backend": self.backend.state(),
            "task": self.task.state(),
        }

    def restore(self, state: dict[str, Any]) -> None:
        """Take back what `state` returned."""
        self.rng.bit_generator.state = state["rng"]
        self.steps[:] = state["steps"]
        self.broken = state["broken"]
        self.backend.restore(state["backend"])
        self.task.restore(state["task"])

    def _begin(self, ids: Ids) -> None:
        start = self.task.begin(ids, self.rng)
        self.backend.reset(ids, start, self.rng)
        self.backend.measure(self.rng, ids)
        self.steps[ids] = 0

    def _record(self, broken: Ids, reward: Float32, failed: Bool) -> None:
        """A simulation that is no longer finite ends its episode without reward; its last state is kept for replay."""
        reward[broken] = 0
        failed[broken] = True
        if self._failures is not None:
            for sim in broken[: max(MOST_FAILURES - self.broken, 0)]:
                self.backend.save_failure(int(sim), self._failures)
        self.broken += len(broken)
