"""Proximal policy optimisation through rsl_rl, with a symmetric actor and an asymmetric critic."""

import copy
from dataclasses import dataclass
from typing import Any, Literal

import torch
from rsl_rl.algorithms import PPO
from rsl_rl.models import MLPModel, RNNModel
from rsl_rl.modules.distribution import GaussianDistribution
from rsl_rl.storage import RolloutStorage
from torch import Tensor

from policies.networks import Actor, FeedForwardActor, Mirror, RecurrentActor, SymmetricModel
from policies.rollout import Ended, Rollout
from robots.errors import UserError

GROUPS = {"actor": ["actor"], "critic": ["critic"]}
"""Observation groups of `Rollout` that actor and critic see."""
HEAD_GAIN = 0.01
"""Scale of the actor's first output weights: training starts from the interface's reference."""


@dataclass(frozen=True, kw_only=True)
class PPOConfig:
    """PPO's numbers."""

    num_envs: int = 256
    """Simulations stepped together."""
    horizon: int = 20
    """Control steps per simulation between updates."""
    epochs: int = 5
    """Passes over each batch."""
    minibatches: int = 4
    """Parts each pass is cut into."""
    gamma: float = 0.99
    """Discount per control step."""
    lam: float = 0.95
    """Trace decay of the advantage estimate."""
    clip: float = 0.2
    """Bound on the probability ratio."""
    entropy: float = 0.003
    """Weight of the entropy bonus."""
    learning_rate: float = 1e-3
    """First step size; adapted to the target KL."""
    desired_kl: float = 0.012
    """KL divergence per update that the step size aims at."""
    value_weight: float = 1.0
    """Weight of the value loss."""
    max_grad_norm: float = 1.0
    """Bound on the gradient's norm."""
    hidden: tuple[int, ...] = (256, 128)
    """Units per hidden layer of actor and critic."""
    init_std: float = 0.6
    """First standard deviation of the action."""
    recurrent: Literal["none", "lstm", "gru"] = "none"
    """Memory of the actor, before its hidden layers; it is not symmetric then. The critic sees more and needs none."""
    recurrent_dim: int = 128
    """Units of that memory."""


class PPOLearner:
    """One rollout and update at a time."""

    def __init__(self, rollout: Rollout, config: PPOConfig) -> None:
        """Build networks for `rollout`, which must have been reset. Raises UserError for numbers that do not fit."""
        self.rollout, self.config = rollout, config
        batch = config.num_envs if config.recurrent != "none" else config.num_envs * config.horizon
        if config.minibatches > batch:
            raise UserError(f"PPO cannot cut a batch of {batch} into {config.minibatches} minibatches: set fewer")
        obs = rollout.get_observations()
        self.algorithm = PPO(
            _make_actor(rollout, config),
            SymmetricModel(obs, GROUPS, "critic", 1, config.hidden, critic_mirror(rollout), None),
            RolloutStorage("rl", config.num_envs, config.horizon, obs, [rollout.num_actions]),
            num_learning_epochs=config.epochs,
            num_mini_batches=config.minibatches,
            clip_param=config.clip,
            gamma=config.gamma,
            lam=config.lam,
            value_loss_coef=config.value_weight,
            entropy_coef=config.entropy,
            learning_rate=config.learning_rate,
            max_grad_norm=config.max_grad_norm,
            desired_kl=config.desired_kl,
            schedule="adaptive",
        )
        self.algorithm.train_mode()

    @property
    def steps_per_iteration(self) -> int:
        """Environment steps per `iterate`."""
        return self.config.num_envs * self.config.horizon

    def iterate(self) -> dict[str, float]:
        """One rollout and one update; returns losses and the action's standard deviation."""
        self._collect()
        losses = self.algorithm.update()
        std = float(self._policy.output_std.detach().mean())
        return {f"loss/{k}": v for k, v in losses.items()} | {
            "policy/std": std,
            "policy/learning_rate": self.algorithm.learning_rate,
        }

    def actor(self) -> Actor:
        """The deterministic network from observation to action, a copy."""
        if self.config.recurrent == "none":
            return FeedForwardActor(self._policy.mlp)
        return RecurrentActor(self._policy.rnn.rnn, self._policy.mlp)

    def state(self) -> dict[str, Any]:
        """Weights, optimizer, step size and the memories of a recurrent actor, copied."""
        saved: dict[str, Any] = copy.deepcopy(self.algorithm.save())
        memory = [m.clone() for m in self._memory()]
        return saved | {"learning_rate": self.algorithm.learning_rate, "memory": memory}

    def restore(self, saved: dict[str, Any]) -> None:
        """Take back what `state` returned."""
        self.algorithm.load(copy.deepcopy(saved), None, True)
        self.algorithm.learning_rate = saved["learning_rate"]
        memory = tuple(m.clone() for m in saved["memory"])
        self._policy.reset(hidden_state=memory if len(memory) > 1 else memory[0] if memory else None)

    def begin_with(self, saved: dict[str, Any]) -> None:
        """Take the networks of another learner's `state`; exploration starts anew at `init_std`."""
        self.algorithm.load(copy.deepcopy(saved), {"actor": True, "critic": True}, True)
        with torch.no_grad():
            self._policy.distribution.std_param.fill_(self.config.init_std)

    def close(self) -> None:
        """Nothing to release."""

    @property
    def _policy(self) -> Any:
        return self.algorithm.get_policy()

    def _memory(self) -> tuple[Tensor, ...]:
        """Hidden state, for an LSTM cell state too, each (1, N, H); empty without memory or before the first step."""
        memory = self._policy.get_hidden_state()
        if memory is None:
            return ()
        return memory if isinstance(memory, tuple) else (memory,)

    def _collect(self) -> None:
        with torch.inference_mode():
            obs = self.rollout.get_observations()
            for _ in range(self.config.horizon):
                actions = self.algorithm.act(obs)
                obs, reward, dones, extras = self.rollout.step(actions)
                ended = extras["ended"]
                if ended is not None:
                    reward = self._bootstrap(reward, ended)
                self.algorithm.process_env_step(obs, reward, dones, {})
            self.algorithm.compute_returns(obs)

    def _bootstrap(self, reward: Tensor, ended: Ended) -> Tensor:
        """Reward plus gamma V(last state) where only the time limit ended the episode.

        The last state of a simulation that broke may be anything, its value not even finite: it must not be read.
        """
        values = self.algorithm.critic(ended.obs).squeeze(1)
        return reward.index_add(0, ended.ids, self.config.gamma * torch.where(ended.timed_out, values, 0))


def critic_mirror(rollout: Rollout) -> Mirror:
    """Mirror of the critic's observation: the actor's, then the privileged signals."""
    permutation, signs = rollout.interface.mirror_obs()
    extra_p, extra_s = rollout.interface.mirror_privileged()
    return torch.cat([permutation, len(permutation) + extra_p]), torch.cat([signs, extra_s])


def _make_actor(rollout: Rollout, config: PPOConfig) -> MLPModel:
    obs, num, distribution = rollout.get_observations(), rollout.num_actions, _gaussian(config)
    if config.recurrent == "none":
        mirrors = (rollout.interface.mirror_obs(), rollout.interface.mirror_action())
        return SymmetricModel(obs, GROUPS, "actor", num, config.hidden, *mirrors, distribution, HEAD_GAIN)
    actor = RNNModel(
        obs,
        GROUPS,
        "actor",
        num,
        config.hidden,
        distribution_cfg=distribution,
        rnn_type=config.recurrent,
        rnn_hidden_dim=config.recurrent_dim,
    )
    with torch.no_grad():
        actor.mlp[-1].weight.mul_(HEAD_GAIN)
        actor.mlp[-1].bias.zero_()
    return actor


def _gaussian(config: PPOConfig) -> dict[str, Any]:
    return {"class_name": GaussianDistribution, "init_std": config.init_std}
