"""Environment steps per second: the whole loop against bare physics, a Python loop and Gymnasium's AsyncVectorEnv.

The whole loop is what a learner sees: joint targets from actions, physics, measured and privileged signals, sensor
noise, rewards, terminations, resets with drawn parameters, observations. Bare physics is `Batch.step` of the same
model, threads and per-simulation fields, from the same states with the same targets, in alternating blocks of one run.
"""

import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import gymnasium
import mujoco
import numpy as np
import torch
from common import Benchmark, finish, run

from policies.interface import WalkingInterface
from policies.rollout import Rollout
from robots.model import ModelConfig, build_model, free_joints, joint_addresses
from sim.environment import Environment
from sim.mujoco_backend import MujocoBackend
from sim.tasks.velocity import flat

DECIMATION, TIMESTEP = 4, 0.005


@dataclass(frozen=True, kw_only=True)
class Config(Benchmark):
    """What to measure."""

    num_envs: int = 512
    """Simulations in one batch."""
    threads: int = 2
    """Threads of the batch, and worker processes of AsyncVectorEnv."""
    blocks: int = 12
    """Alternations of bare physics and the whole loop."""
    block: int = 25
    """Control steps per block."""


def main(config: Config) -> None:
    torch.set_num_threads(1)
    blocks = 3 if config.quick else config.blocks
    raw, whole, cpu = measure_loop(config, blocks)
    single = measure_python_loop(200 if config.quick else 2000)
    gym = measure_async(config.threads, 50 if config.quick else 400)
    ratio = np.median(np.array(whole) / np.array(raw))
    results = {
        "ratio_to_raw": round(float(ratio), 4),
        "ratio_to_raw_range": [round(float(x), 4) for x in np.percentile(np.array(whole) / np.array(raw), [2.5, 97.5])],
        "steps_per_s": round(float(np.median(whole))),
        "raw_steps_per_s": round(float(np.median(raw))),
        "steps_per_s_core": round(cpu),
        "ratio_to_python_loop": round(float(np.median(whole)) / single, 3),
        "python_loop_steps_per_s": round(single),
        "ratio_to_async_vector": round(float(np.median(whole)) / gym, 3),
        "async_vector_steps_per_s": round(gym),
        "num_envs": config.num_envs,
        "threads": config.threads,
    }
    finish(config, "env_throughput", results)


def measure_loop(config: Config, blocks: int) -> tuple[list[float], list[float], float]:
    """Steps/s of bare physics and of the whole loop, per block, and the whole loop's steps per CPU second."""
    task = flat()
    env = Environment(task, config.num_envs, seed=0, threads=config.threads)
    interface = WalkingInterface(task.spec, task.config.gait, task.plant.control_dt)
    rollout = Rollout(env, interface)
    rollout.reset()
    assert isinstance(env.backend, MujocoBackend)
    batch = env.backend.batch
    ctrl = batch.bind("ctrl")
    generator = torch.Generator().manual_seed(0)
    raw, whole, cpu = [], [], 0.0
    for _ in range(blocks + 1):
        actions = [
            0.3 * torch.randn(config.num_envs, interface.num_actions, generator=generator) for _ in range(config.block)
        ]
        before = batch.state.copy()
        noise = torch.randn(config.block, *ctrl.shape, generator=generator).numpy()
        targets = [ctrl + 0.02 * n for n in noise]

        def bare(targets: list[np.ndarray] = targets) -> None:
            for target in targets:
                ctrl[:] = target
                batch.step(nstep=DECIMATION)

        def loop(actions: list[torch.Tensor] = actions) -> None:
            with torch.inference_mode():
                for action in actions:
                    rollout.step(action)

        raw.append(_rate(bare, config)[0])
        batch.state[:] = before
        rate, used = _rate(loop, config)
        whole.append(rate)
        cpu += used
    steps = config.num_envs * config.block * len(whole)
    return raw[1:], whole[1:], steps / cpu


def _rate(function: Callable[[], None], config: Config) -> tuple[float, float]:
    wall, cpu = time.perf_counter(), time.process_time()
    function()
    wall, cpu = time.perf_counter() - wall, time.process_time() - cpu
    return config.num_envs * config.block / wall, cpu


class PlainEnv(gymnasium.Env[np.ndarray, np.ndarray]):  # type: ignore[misc]
    """The same model stepped by `mj_step`, with a short observation and reward: what a first script looks like."""

    def __init__(self) -> None:
        """Build the training model."""
        plant, spec = flat().plant, flat().spec
        lock = spec.group(*plant.lock)
        config = ModelConfig(lock=lock, collision="feet", timestep=TIMESTEP, solver="fast", fuse=True)
        self.model = build_model(spec, config)
        self.data = mujoco.MjData(self.model)
        joints = free_joints(spec, config)
        self.qpos, self.qvel = joint_addresses(self.model, joints)
        self.default = spec.array("default_pos", joints)
        self.height = spec.spawn_height
        self.observation_space = gymnasium.spaces.Box(-np.inf, np.inf, (9 + 2 * len(joints),), np.float32)
        self.action_space = gymnasium.spaces.Box(-1, 1, (len(joints),), np.float32)

    def reset(
        self, *, seed: int | None = None, options: dict[str, Any] | None = None
    ) -> tuple[np.ndarray, dict[str, Any]]:
        """Stand in the default pose."""
        super().reset(seed=seed)
        mujoco.mj_resetData(self.model, self.data)
        self.data.qpos[self.qpos] = self.default
        self.data.qpos[2] = self.height
        return self._observe(), {}

    def step(self, action: np.ndarray) -> tuple[np.ndarray, float, bool, bool, dict[str, Any]]:
        """One control step."""
        self.data.ctrl[:] = self.default + 0.25 * action
        mujoco.mj_step(self.model, self.data, DECIMATION)
        velocity = self.data.qvel[:3]
        reward = float(
            np.exp(-4 * np.sum((velocity[:2] - (0.5, 0.0)) ** 2)) - 1e-5 * np.sum(self.data.actuator_force**2)
        )
        return self._observe(), reward, bool(self.data.qpos[2] < 0.6), False, {}

    def _observe(self) -> np.ndarray:
        q, v = self.data.qpos, self.data.qvel
        return np.concatenate([q[3:7], v[3:6], q[self.qpos] - self.default, v[self.qvel], [0.5, 0.0]]).astype(
            np.float32
        )


def measure_python_loop(steps: int) -> float:
    """Steps/s of one PlainEnv in a Python loop, resetting when it falls."""
    env = PlainEnv()
    env.reset()
    rng = np.random.default_rng(0)
    actions = rng.normal(0, 0.3, (16, *env.default.shape))
    start = time.perf_counter()
    for i in range(steps):
        if env.step(actions[i % 16])[2]:
            env.reset()
    return steps / (time.perf_counter() - start)


def measure_async(workers: int, steps: int) -> float:
    """Steps/s of Gymnasium's AsyncVectorEnv over `workers` processes."""
    envs = gymnasium.vector.AsyncVectorEnv([PlainEnv] * workers)
    try:
        envs.reset(seed=0)
        rng = np.random.default_rng(0)
        actions = rng.normal(0, 0.3, (16, *envs.action_space.shape)).astype(np.float32)
        start = time.perf_counter()
        for i in range(steps):
            envs.step(actions[i % 16])
        return workers * steps / (time.perf_counter() - start)
    finally:
        envs.close()


if __name__ == "__main__":
    run(main, Config)
