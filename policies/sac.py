"""Soft actor-critic with a symmetric actor, an asymmetric twin critic, and the simulation stepping beside the updates.

Haarnoja et al., "Soft Actor-Critic Algorithms and Applications" (2018): squashed Gaussian policy, clipped double Q,
temperature tuned to a target entropy. Layer-normalised critics. One worker thread advances the simulation while the
main thread updates; both meet after every control step, so that a run is reproducible.
"""

import copy
from concurrent.futures import ThreadPoolExecutor, wait
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from policies.networks import Actor, FeedForwardActor, SymmetricMLP
from policies.ppo import critic_mirror
from policies.rollout import Rollout
from robots.errors import UserError

LOG_STD_RANGE = (-4.0, 0.0)


@dataclass(frozen=True, kw_only=True)
class SACConfig:
    """SAC's numbers."""

    num_envs: int = 128
    """Simulations stepped together."""
    updates: int = 2
    """Gradient steps per control step of all simulations."""
    batch: int = 512
    """Transitions per gradient step."""
    capacity: int = 400_000
    """Transitions kept."""
    warmup: int = 5_000
    """Environment steps before the first update."""
    gamma: float = 0.97
    """Discount per control step."""
    tau: float = 0.01
    """Share of the critic that the target critic takes over per update."""
    actor_rate: float = 5e-4
    """Step size of the actor."""
    critic_rate: float = 1e-3
    """Step size of the critics."""
    temperature_rate: float = 1e-3
    """Step size of the log temperature."""
    actor_every: int = 2
    """Critic updates per actor update."""
    target_entropy: float = -12.0
    """Entropy of the squashed action that the temperature is tuned to [nat]."""
    first_temperature: float = 0.01
    """Temperature at the start."""
    action_bound: float = 3.0
    """Largest action; the squashed Gaussian lives in +-bound."""
    init_log_std: float = -1.5
    """First log standard deviation before squashing."""
    reward_scale: float = 5.0
    """Factor on rewards before they are stored."""
    hidden: tuple[int, ...] = (256, 256)
    """Units per hidden layer of the critics."""
    actor_hidden: tuple[int, ...] = (256, 128)
    """Units per hidden layer of the actor."""
    iteration: int = 96
    """Control steps per `iterate`."""


class GaussianActor(nn.Module):
    """Squashed Gaussian over actions: bound * tanh(mean + std * noise)."""

    def __init__(self, rollout: Rollout, config: SACConfig) -> None:
        """For the interface of `rollout`."""
        super().__init__()
        permutation, signs = rollout.interface.mirror_action()
        n = len(permutation)
        out_mirror = (torch.cat([permutation, n + permutation]), torch.cat([signs, torch.ones(n)]))
        self.net = SymmetricMLP(rollout.interface.mirror_obs(), 2 * n, out_mirror, config.actor_hidden, layer_norm=True)
        self.num_actions, self.bound, self.init_log_std = n, config.action_bound, config.init_log_std
        with torch.no_grad():
            self.net.head.mul_(0.01)

    def forward(self, obs: Tensor) -> Tensor:
        """Deterministic action (N, A)."""
        mean = self.net(obs)[:, : self.num_actions]
        return self.bound * torch.tanh(mean)

    def sample(self, obs: Tensor) -> tuple[Tensor, Tensor]:
        """Random action (N, A) and its log density in units of the bound (N,)."""
        mean, log_std = self.net(obs).chunk(2, dim=-1)
        log_std = torch.clamp(log_std + self.init_log_std, *LOG_STD_RANGE)
        noise = torch.randn_like(mean)
        raw = mean + log_std.exp() * noise
        log_density = -0.5 * noise.square() - log_std - 0.9189385
        squash = 2 * (0.6931472 - raw - functional.softplus(-2 * raw))
        return self.bound * torch.tanh(raw), (log_density - squash).sum(-1)


class Replay:
    """A ring of transitions; the actor's observation is the head of the critic's."""

    def __init__(self, capacity: int, obs_dim: int, action_dim: int) -> None:
        """Allocate everything."""
        self.data = torch.zeros(capacity, 2 * obs_dim + action_dim + 2)
        self.obs_dim, self.action_dim = obs_dim, action_dim
        self.next, self.size = 0, 0

    def add(self, obs: Tensor, action: Tensor, reward: Tensor, failed: Tensor, following: Tensor) -> None:
        """Append transitions: (N, O), (N, A), (N,), (N,), (N, O)."""
        n, capacity = len(obs), len(self.data)
        rows = (self.next + torch.arange(n)) % capacity
        self.data[rows] = torch.cat([obs, following, action, reward[:, None], failed[:, None].float()], dim=1)
        self.next, self.size = (self.next + n) % capacity, min(self.size + n, capacity)

    def sample(self, num: int) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
        """Random transitions: obs, following, action, reward, failed."""
        rows = self.data[torch.randint(self.size, (num,))]
        o, a = self.obs_dim, self.action_dim
        return rows[:, :o], rows[:, o : 2 * o], rows[:, 2 * o : 2 * o + a], rows[:, -2], rows[:, -1]


class SACLearner:
    """A stretch of control steps with updates beside them at a time."""

    def __init__(self, rollout: Rollout, config: SACConfig) -> None:
        """Build networks for `rollout`, which must have been reset. Raises UserError for numbers that do not fit.

        `close` ends the worker thread.
        """
        self.rollout, self.config = rollout, config
        if config.capacity < max(config.warmup, config.num_envs):
            needed = max(config.warmup, config.num_envs)
            raise UserError(f"SAC never learns with room for {config.capacity} transitions: it needs at least {needed}")
        obs = rollout.get_observations()
        self.obs_dim = obs["actor"].shape[1]
        permutation, signs = critic_mirror(rollout)
        action_p, action_s = rollout.interface.mirror_action()
        q_mirror = (torch.cat([permutation, len(permutation) + action_p]), torch.cat([signs, action_s]))
        self.policy = GaussianActor(rollout, config)
        self.critic = SymmetricMLP(q_mirror, 1, None, config.hidden, ensemble=2, layer_norm=True)
        self.target = SymmetricMLP(q_mirror, 1, None, config.hidden, ensemble=2, layer_norm=True)
        self.target.load_state_dict(self.critic.state_dict())
        self.target.requires_grad_(False)
        self.log_temperature = torch.tensor(config.first_temperature).log().requires_grad_()
        self.actor_optimizer = torch.optim.Adam(self.policy.parameters(), lr=config.actor_rate, fused=True)
        self.critic_optimizer = torch.optim.Adam(self.critic.parameters(), lr=config.critic_rate, fused=True)
        self.temperature_optimizer = torch.optim.Adam([self.log_temperature], lr=config.temperature_rate)
        self.replay = Replay(config.capacity, obs["critic"].shape[1], rollout.num_actions)
        self.count = 0
        self._losses: dict[str, float] = {}
        self._worker = ThreadPoolExecutor(1)

    @property
    def steps_per_iteration(self) -> int:
        """Environment steps per `iterate`."""
        return self.config.num_envs * self.config.iteration

    def iterate(self) -> dict[str, float]:
        """`iteration` control steps with updates beside them; returns the last losses."""
        for _ in range(self.config.iteration):
            self._control_step()
        return self._losses | {"policy/temperature": float(self.log_temperature.detach().exp())}

    def actor(self) -> Actor:
        """The deterministic network from observation to action, a copy."""
        return FeedForwardActor(self.policy)

    def state(self) -> dict[str, Any]:
        """Weights, optimizers and replay, copied."""
        networks = {"policy": self.policy, "critic": self.critic, "target": self.target}
        return {
            **{k: copy.deepcopy(network.state_dict()) for k, network in networks.items()},
            "log_temperature": self.log_temperature.detach().clone(),
            "optimizers": [copy.deepcopy(o.state_dict()) for o in self._optimizers],
            "replay": {"data": self.replay.data[: self.replay.size].clone(), "next": self.replay.next},
            "count": self.count,
        }

    def restore(self, saved: dict[str, Any]) -> None:
        """Take back what `state` returned."""
        self.begin_with(saved)
        for optimizer, state in zip(self._optimizers, saved["optimizers"], strict=True):
            optimizer.load_state_dict(copy.deepcopy(state))
        data = saved["replay"]["data"]
        self.replay.data[: len(data)] = data
        self.replay.size, self.replay.next = len(data), saved["replay"]["next"]
        self.count = saved["count"]

    def begin_with(self, saved: dict[str, Any]) -> None:
        """Take the networks and the temperature of another learner's `state`."""
        self.policy.load_state_dict(saved["policy"])
        self.critic.load_state_dict(saved["critic"])
        self.target.load_state_dict(saved["target"])
        with torch.no_grad():
            self.log_temperature.copy_(saved["log_temperature"])

    def close(self) -> None:
        """End the worker thread."""
        self._worker.shutdown()

    @property
    def _optimizers(self) -> tuple[torch.optim.Optimizer, ...]:
        return self.actor_optimizer, self.critic_optimizer, self.temperature_optimizer

    def _control_step(self) -> None:
        obs = self.rollout.get_observations()
        with torch.no_grad():
            action, _ = self.policy.sample(obs["actor"])
        stepping = self._worker.submit(self._step, action)
        try:
            if self.replay.size >= self.config.warmup:
                for _ in range(self.config.updates):
                    self._update()
        finally:
            wait([stepping])  # whatever happens here, no one may find the simulation in motion
        following, reward, failed = stepping.result()
        self.replay.add(obs["critic"], action, self.config.reward_scale * reward, failed, following)

    @torch.no_grad()
    def _step(self, action: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Step the simulation; the state that follows is the old episode's last one where an episode ended."""
        obs, reward, dones, extras = self.rollout.step(action)
        following, failed, ended = obs["critic"], dones, extras["ended"]
        if ended is not None:
            following = following.index_copy(0, ended.ids, ended.obs["critic"])
            failed = failed.index_copy(0, ended.ids, ~ended.timed_out)
        return following, reward, failed

    def _update(self) -> None:
        obs, following, action, reward, failed = self.replay.sample(self.config.batch)
        temperature = self.log_temperature.detach().exp()
        with torch.no_grad():
            next_action, log_density = self.policy.sample(following[:, : self.obs_dim])
            next_q = self.target(torch.cat([following, next_action], dim=1)).squeeze(-1).min(0).values
            value = next_q - temperature * log_density
            # The last state of a simulation that broke may be anything, its value not even finite: it is not read.
            goal = reward + self.config.gamma * torch.where(failed > 0, 0, value)
        q = self.critic(torch.cat([obs, action], dim=1)).squeeze(-1)
        critic_loss = (q - goal).square().mean(1).sum()
        self._descend(self.critic_optimizer, critic_loss)
        self.count += 1
        if self.count % self.config.actor_every == 0:
            self._update_actor(obs, temperature)
            self._losses |= {"loss/critic": float(critic_loss.detach()), "value/mean": float(q.detach().mean())}
        with torch.no_grad():
            for slow, fast in zip(self.target.parameters(), self.critic.parameters(), strict=True):
                slow.lerp_(fast, self.config.tau)

    def _update_actor(self, obs: Tensor, temperature: Tensor) -> None:
        action, log_density = self.policy.sample(obs[:, : self.obs_dim])
        self.critic.requires_grad_(False)
        q = self.critic(torch.cat([obs, action], dim=1)).squeeze(-1).min(0).values
        actor_loss = (temperature * log_density - q).mean()
        self._descend(self.actor_optimizer, actor_loss)
        self.critic.requires_grad_(True)
        entropy = -log_density.detach().mean()
        self._descend(self.temperature_optimizer, self.log_temperature * (entropy - self.config.target_entropy))
        self._losses |= {"loss/actor": float(actor_loss.detach()), "policy/entropy": float(entropy)}

    @staticmethod
    def _descend(optimizer: torch.optim.Optimizer, loss: Tensor) -> None:
        optimizer.zero_grad()
        loss.backward()  # type: ignore[no-untyped-call]
        optimizer.step()
