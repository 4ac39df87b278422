"""Proximal policy optimisation through rsl_rl, with a symmetric actor and an asymmetric critic."""

from dataclasses import asdict, dataclass
from typing import Any

import torch
from rsl_rl.algorithms import PPO
from rsl_rl.modules.distribution import GaussianDistribution
from torch import Tensor, nn

from policies.networks import Mirror, SymmetricModel
from policies.rollout import Rollout


@dataclass(frozen=True, kw_only=True)
class PPOConfig:
    """PPO's numbers."""

    num_envs: int = 512
    """Simulations stepped together."""
    horizon: int = 24
    """Control steps per simulation between updates."""
    epochs: int = 4
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
    desired_kl: float = 0.01
    """KL divergence per update that the step size aims at."""
    value_weight: float = 1.0
    """Weight of the value loss."""
    max_grad_norm: float = 1.0
    """Bound on the gradient's norm."""
    hidden: tuple[int, ...] = (256, 128)
    """Units per hidden layer of actor and critic."""
    init_std: float = 0.6
    """First standard deviation of the action."""


class PPOLearner:
    """One rollout and update at a time."""

    name = "ppo"

    def __init__(self, rollout: Rollout, config: PPOConfig) -> None:
        """Build networks for `rollout`, which must have been reset."""
        self.rollout, self.config = rollout, config
        interface = rollout.interface
        action_mirror = interface.mirror_action()
        cfg: dict[str, Any] = {
            "num_steps_per_env": config.horizon,
            "obs_groups": {"actor": ["actor"], "critic": ["critic"]},
            "multi_gpu": None,
            "actor": {
                "class_name": SymmetricModel,
                "hidden_dims": config.hidden,
                "in_mirror": interface.mirror_obs(),
                "out_mirror": action_mirror,
                "head_gain": 0.01,
                "distribution_cfg": {"class_name": GaussianDistribution, "init_std": config.init_std},
            },
            "critic": {
                "class_name": SymmetricModel,
                "hidden_dims": config.hidden,
                "in_mirror": critic_mirror(rollout),
                "out_mirror": None,
            },
            "algorithm": {
                "class_name": PPO,
                "num_learning_epochs": config.epochs,
                "num_mini_batches": config.minibatches,
                "clip_param": config.clip,
                "gamma": config.gamma,
                "lam": config.lam,
                "value_loss_coef": config.value_weight,
                "entropy_coef": config.entropy,
                "learning_rate": config.learning_rate,
                "max_grad_norm": config.max_grad_norm,
                "desired_kl": config.desired_kl,
                "schedule": "adaptive",
                "rnd_cfg": None,
                "symmetry_cfg": None,
            },
        }
        self.algorithm = PPO.construct_algorithm(rollout.get_observations(), rollout, cfg, "cpu")
        self.algorithm.train_mode()

    @property
    def steps_per_iteration(self) -> int:
        """Environment steps per `iterate`."""
        return self.config.num_envs * self.config.horizon

    def iterate(self) -> dict[str, float]:
        """One rollout and one update; returns losses and the action's standard deviation."""
        self._collect()
        losses = self.algorithm.update()
        std = float(self.algorithm.get_policy().output_std.mean())
        return {f"loss/{k}": v for k, v in losses.items()} | {
            "policy/std": std,
            "policy/learning_rate": self.algorithm.learning_rate,
        }

    def actor(self) -> nn.Module:
        """The deterministic network from observation to action, for export."""
        network: nn.Module = self.algorithm.get_policy().mlp
        return network

    def state(self) -> dict[str, Any]:
        """Weights, optimizer and step size."""
        saved: dict[str, Any] = self.algorithm.save()
        return saved | {"learning_rate": self.algorithm.learning_rate, "config": asdict(self.config)}

    def restore(self, saved: dict[str, Any]) -> None:
        """Take back what `state` returned."""
        self.algorithm.load(saved, None, True)
        self.algorithm.learning_rate = saved["learning_rate"]

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

    def _bootstrap(self, reward: Tensor, ended: Any) -> Tensor:
        """Reward plus gamma V(last state) where only the time limit ended the episode."""
        values = self.algorithm.critic(ended.obs).squeeze(1) * ended.timed_out
        return reward.index_add(0, ended.ids, self.config.gamma * values)


def critic_mirror(rollout: Rollout) -> Mirror:
    """Mirror of the critic's observation: the actor's, then the privileged signals."""
    permutation, signs = rollout.interface.mirror_obs()
    extra_p, extra_s = rollout.interface.mirror_privileged()
    return torch.cat([permutation, len(permutation) + extra_p]), torch.cat([signs, extra_s])
