"""Our SAC's gradient step against Stable-Baselines3's, same sizes, one thread, alternating in one run.

Sizes are those of the velocity task: observation 78, action 12, batch 512, critics of 256 x 256. Ours has layer norm
and mirror symmetry built in; Stable-Baselines3 (pip install stable-baselines3) runs plain perceptrons. Neither steps
an environment here.
"""

import time
from dataclasses import dataclass

import gymnasium
import numpy as np
import torch
from common import Benchmark, finish, run

from policies.interface import WalkingInterface
from policies.rollout import Rollout
from policies.sac import SACConfig, SACLearner
from robots.errors import UserError
from sim.environment import Environment
from sim.tasks.velocity import flat


@dataclass(frozen=True, kw_only=True)
class Config(Benchmark):
    """How long to measure."""

    blocks: int = 8
    """Alternations."""
    updates: int = 20
    """Gradient steps per block."""


class Sizes(gymnasium.Env):  # type: ignore[misc]
    """An environment that exists for its shapes."""

    def __init__(self, observations: int, actions: int) -> None:
        """Spaces only."""
        self.observation_space = gymnasium.spaces.Box(-1, 1, (observations,), np.float32)
        self.action_space = gymnasium.spaces.Box(-1, 1, (actions,), np.float32)

    def reset(
        self, *, seed: int | None = None, options: dict[str, object] | None = None
    ) -> tuple[np.ndarray, dict[str, object]]:
        """Zeros."""
        return np.zeros(self.observation_space.shape, np.float32), {}


def main(config: Config) -> None:
    try:
        import stable_baselines3
        from stable_baselines3.common.logger import configure
    except ModuleNotFoundError as error:
        raise UserError("this comparison needs Stable-Baselines3: pip install stable-baselines3") from error
    torch.set_num_threads(1)
    ours = SACConfig()
    task = flat()
    rollout = Rollout(
        Environment(task, ours.num_envs, 0, threads=1),
        WalkingInterface(task.spec, task.config.gait, task.plant.control_dt),
    )
    rollout.reset()
    learner = SACLearner(rollout, ours)
    obs = rollout.get_observations()["critic"]
    width, actions = obs.shape[1], rollout.num_actions
    for _ in range(40):
        learner.replay.add(obs, torch.randn(len(obs), actions), torch.rand(len(obs)), torch.zeros(len(obs)), obs)
    theirs = stable_baselines3.SAC(
        "MlpPolicy",
        Sizes(width, actions),
        batch_size=ours.batch,
        policy_kwargs={"net_arch": list(ours.hidden)},
        device="cpu",
    )
    theirs.set_logger(configure(None, []))
    assert theirs.replay_buffer is not None
    row = np.zeros((1, width), np.float32)
    for _ in range(5000):
        theirs.replay_buffer.add(row, row, np.zeros((1, actions)), np.zeros(1), np.zeros(1), [{}])
    a, b = [], []
    for _ in range(2 if config.quick else config.blocks):
        start = time.perf_counter()
        for _ in range(config.updates):
            learner._update()
        middle = time.perf_counter()
        theirs.train(gradient_steps=config.updates, batch_size=ours.batch)
        a.append((middle - start) / config.updates)
        b.append((time.perf_counter() - middle) / config.updates)
    results = {
        "update_ratio_to_sb3": round(float(np.median(np.array(b) / np.array(a))), 3),
        "ours_ms": round(1e3 * float(np.median(a)), 2),
        "sb3_ms": round(1e3 * float(np.median(b)), 2),
        "batch": ours.batch,
        "observation": width,
    }
    finish(config, "sac_update", results)


if __name__ == "__main__":
    run(main, Config)
