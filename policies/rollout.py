"""Signals to tensors and back: the environment as a learner sees it."""

from dataclasses import dataclass
from typing import Any

import torch
from rsl_rl.env import VecEnv
from tensordict import TensorDict
from torch import Tensor

from policies.interface import WalkingInterface, initial_state, restarted
from sim.environment import Environment, Step


@dataclass(kw_only=True)
class Ended:
    """Episodes that ended in a step."""

    ids: Tensor
    """Simulations (n,)."""
    timed_out: Tensor
    """Whether the time limit ended them (n,)."""
    obs: TensorDict
    """Last observations of the old episodes (n, ...)."""


class Rollout(VecEnv):  # type: ignore[misc]
    """rsl_rl's VecEnv over an Environment and an interface: observations in, actions out.

    Observation groups: "actor" (N, num_obs) measured, "critic" (N, num_obs + P) with privileged signals appended.
    """

    device = "cpu"

    def __init__(self, env: Environment, interface: WalkingInterface) -> None:
        """Wrap an environment; call `reset` before use."""
        self.env, self.interface = env, interface
        self.num_envs, self.num_actions = env.num_envs, interface.num_actions
        self.max_episode_length = env.limit
        self.cfg: dict[str, Any] = {}
        self._signals = {name: torch.from_numpy(values) for name, values in env.signals.items()}
        self._state = initial_state(interface.states, self.num_envs)
        self._returns, self._lengths = torch.zeros(self.num_envs), torch.zeros(self.num_envs, dtype=torch.long)
        self.finished: list[tuple[float, int, bool]] = []
        """Return, length and time-out of episodes that ran from their start, since last cleared."""
        self._whole = torch.zeros(self.num_envs, dtype=torch.bool)

    @property
    def episode_length_buf(self) -> Tensor:
        """Steps of the present episodes (N,)."""
        return torch.from_numpy(self.env.steps)

    def reset(self) -> None:
        """Start all episodes."""
        self.env.reset()
        self._state = initial_state(self.interface.states, self.num_envs)
        self._returns[:], self._lengths[:] = 0, 0
        self._whole[:] = torch.from_numpy(self.env.steps) == 0
        self.finished.clear()
        self._obs = self._observe(self._signals, self._state)

    def get_observations(self) -> TensorDict:
        """Observations of the present state."""
        return self._obs

    def step(self, actions: Tensor) -> tuple[TensorDict, Tensor, Tensor, dict[str, Any]]:
        """One control step with actions (N, num_actions); extras["ended"] holds an `Ended` or None.

        No extras["time_outs"]: rsl_rl would bootstrap with the value of the state before the last step; learners here
        use the value of the last state itself.
        """
        targets, self._state = self.interface.act(actions, self._obs["actor"], self._signals, self._state)
        result = self.env.step(targets.numpy())
        reward = torch.from_numpy(result.reward)
        dones = torch.from_numpy(result.failed | result.timed_out)
        self._returns += reward
        self._lengths += 1
        ended = self._end(result) if len(result.ended) else None
        self._obs = self._observe(self._signals, self._state)
        return self._obs, reward, dones, {"ended": ended}

    def state(self) -> dict[str, Any]:
        """Everything a bit-identical continuation needs."""
        return {
            "env": self.env.state(),
            "state": {k: v.clone() for k, v in self._state.items()},
            "returns": self._returns.clone(),
            "lengths": self._lengths.clone(),
            "whole": self._whole.clone(),
        }

    def restore(self, saved: dict[str, Any]) -> None:
        """Take back what `state` returned."""
        self.env.restore(saved["env"])
        self._state = {k: v.clone() for k, v in saved["state"].items()}
        self._returns, self._lengths = saved["returns"].clone(), saved["lengths"].clone()
        self._whole = saved["whole"].clone()
        self._obs = self._observe(self._signals, self._state)

    def _end(self, result: Step) -> Ended:
        ids = torch.from_numpy(result.ended)
        timed_out = torch.from_numpy(result.timed_out)[ids]
        final = {name: torch.from_numpy(values) for name, values in result.final.items()}
        obs = self._observe(final, {k: v[ids] for k, v in self._state.items()})
        for i, sim in enumerate(ids.tolist()):
            if self._whole[sim]:
                self.finished.append((float(self._returns[sim]), int(self._lengths[sim]), bool(timed_out[i])))
        self._state = restarted(self._state, self.interface.states, ids)
        self._returns[ids], self._lengths[ids], self._whole[ids] = 0, 0, True
        return Ended(ids=ids, timed_out=timed_out, obs=obs)

    def _observe(self, signals: dict[str, Tensor], state: dict[str, Tensor]) -> TensorDict:
        actor = self.interface.observe(signals, state)
        critic = torch.cat([actor, self.interface.privileged(signals)], dim=1)
        return TensorDict({"actor": actor, "critic": critic}, batch_size=[len(actor)])
