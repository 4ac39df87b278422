import warnings
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch
from tensordict import TensorDict
from torch import Tensor

from policies.interface import WalkingInterface, initial_state, restarted
from policies.ppo import PPOConfig, PPOLearner
from policies.rollout import Ended, Rollout
from robots.errors import UserError
from sim.environment import Environment, EpisodeConfig
from sim.tasks.velocity import Velocity, flat

NUM, HORIZON = 8, 6
SMALL = PPOConfig(num_envs=NUM, horizon=HORIZON, minibatches=2, epochs=2, hidden=(16, 8), recurrent_dim=8)
KINDS = ("none", "lstm", "gru")


@pytest.fixture(autouse=True)
def no_warnings() -> Iterator[None]:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        yield


def make(seconds: float = 0.3, **changes: Any) -> PPOLearner:
    torch.manual_seed(0)
    torch.set_num_threads(1)
    config = flat().config
    task = Velocity(replace(config, episode=EpisodeConfig(seconds=seconds)))
    rollout = Rollout(
        Environment(task, NUM, 0, threads=1),
        WalkingInterface(task.spec, task.config.gait, task.plant.control_dt),
    )
    rollout.reset()
    return PPOLearner(rollout, replace(SMALL, **changes))


class Script:
    """Stands in for `Rollout.step`: rewards, falls and time limits as told, random observations."""

    def __init__(self, rollout: Rollout, failed: Tensor, timed_out: Tensor) -> None:
        """Failures and time limits (T, N)."""
        draw = torch.Generator().manual_seed(1)
        self.failed, self.timed_out, self.step = failed, timed_out, 0
        self.rewards = torch.randn(failed.shape, generator=draw)
        first = rollout.get_observations()
        self.obs = [first] + [self._random(first, draw) for _ in failed]
        self.last = [self._random(first, draw) for _ in failed]

    def __call__(self, action: Tensor) -> tuple[TensorDict, Tensor, Tensor, dict[str, Any]]:
        failed, timed_out, t = self.failed[self.step], self.timed_out[self.step], self.step
        ids = (failed | timed_out).nonzero().flatten()
        ended = Ended(ids=ids, timed_out=timed_out[ids], obs=self.last[t][ids]) if len(ids) else None
        self.step += 1
        return self.obs[t + 1], self.rewards[t], failed | timed_out, {"ended": ended}

    @staticmethod
    def _random(like: TensorDict, draw: torch.Generator) -> TensorDict:
        return TensorDict(
            {k: torch.randn(v.shape, generator=draw) for k, v in like.items()}, batch_size=like.batch_size
        )


def scripted(learner: PPOLearner) -> Script:
    """A fall at step 1 of simulation 0, time limits at step 2 of simulation 1 and at the very last step of 2."""
    failed, timed_out = torch.zeros(2, HORIZON, NUM, dtype=torch.bool)
    failed[1, 0] = timed_out[2, 1] = timed_out[-1, 2] = failed[-1, 3] = True
    script = Script(learner.rollout, failed, timed_out)
    learner.rollout.step = script  # type: ignore[method-assign]
    return script


# ---- time limits -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("recurrent", KINDS)
def test_a_time_limit_is_worth_the_last_state_and_a_fall_nothing(recurrent: str) -> None:
    learner = make(recurrent=recurrent)
    script, gamma, lam = scripted(learner), SMALL.gamma, SMALL.lam
    critic = learner.algorithm.critic
    learner._collect()
    with torch.no_grad():
        values = torch.stack([critic(o).squeeze(1) for o in script.obs])  # (T + 1, N)
        last = torch.stack([critic(o).squeeze(1) for o in script.last])
    expected = script.rewards + gamma * last * script.timed_out
    torch.testing.assert_close(learner.algorithm.storage.rewards[:, :, 0], expected)
    advantage, returns = torch.zeros(NUM), torch.zeros(HORIZON, NUM)
    for t in reversed(range(HORIZON)):
        # What follows: the next state, or at an episode's end the last state for a time limit, nothing for a fall.
        ended = script.failed[t] | script.timed_out[t]
        after = torch.where(ended, last[t] * script.timed_out[t], values[t + 1])
        advantage = script.rewards[t] + gamma * after - values[t] + gamma * lam * advantage * ~ended
        returns[t] = advantage + values[t]
    torch.testing.assert_close(learner.algorithm.storage.returns[:, :, 0], returns)


def test_what_a_simulation_that_broke_reads_last_does_no_harm() -> None:
    learner = make()
    script = scripted(learner)
    script.last[1]["critic"][0] = torch.nan
    learner._collect()
    assert torch.equal(learner.algorithm.storage.rewards[1, :, 0], script.rewards[1])
    assert torch.isfinite(learner.algorithm.storage.returns).all()


# ---- learning --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("recurrent", KINDS)
def test_an_iteration_moves_every_weight_and_reports_finite_numbers(recurrent: str) -> None:
    learner = make(recurrent=recurrent)
    before = {k: v.clone() for k, v in weights(learner).items()}
    curves = learner.iterate()
    assert set(curves) == {"loss/value", "loss/surrogate", "loss/entropy", "policy/std", "policy/learning_rate"}
    assert all(torch.isfinite(torch.tensor(v)) for v in curves.values())
    assert {k for k, v in weights(learner).items() if torch.equal(v, before[k])} == set()
    assert learner.steps_per_iteration == NUM * HORIZON


def test_it_learns_what_is_rewarded() -> None:
    """Reward for the first action alone: its mean rises."""
    learner = make(horizon=16, entropy=0.0, learning_rate=3e-3, desired_kl=0.1)
    obs, action = learner.rollout.get_observations(), torch.zeros(NUM, 12)

    def step(given: Tensor) -> tuple[TensorDict, Tensor, Tensor, dict[str, Any]]:
        action[:] = given
        return obs, given[:, 0].clone(), torch.zeros(NUM, dtype=torch.bool), {"ended": None}

    learner.rollout.step = step  # type: ignore[method-assign]
    means = []
    for _ in range(20):
        means.append(float(learner.actor()(obs["actor"], {})[0][:, 0].mean()))
        learner.iterate()
    assert abs(means[0]) < 0.1
    assert means[-1] > means[0] + 0.5


@pytest.mark.parametrize("recurrent", KINDS)
def test_the_actor_is_the_mean_of_the_policy_that_acts(recurrent: str) -> None:
    learner = make(recurrent=recurrent)
    learner.iterate()
    policy, rollout = learner.algorithm.get_policy(), learner.rollout
    policy.reset()
    actor = learner.actor()
    state = initial_state(actor.states, NUM)
    assert list(actor.states) == {"none": [], "lstm": ["hidden", "cell"], "gru": ["hidden"]}[recurrent]
    with torch.inference_mode():
        for _ in range(20):
            obs = rollout.get_observations()
            action, state = actor(obs["actor"], state)
            torch.testing.assert_close(action, policy(obs), atol=1e-6, rtol=1e-5)
            _, _, dones, _ = rollout.step(action)
            policy.reset(dones)
            state = restarted(state, actor.states, dones.nonzero().flatten())
            rollout.finished.clear()


def test_taking_an_actor_changes_nothing() -> None:
    learner = make(recurrent="lstm")
    learner.iterate()
    before, modes = weights(learner), [m.training for m in learner.algorithm.actor.modules()]
    copies = {k: v.clone() for k, v in before.items()}
    memory = [m.clone() for m in learner._memory()]
    actor = learner.actor()
    actor(torch.randn(3, learner.rollout.interface.num_obs), initial_state(actor.states, 3))
    assert all(torch.equal(v, copies[k]) for k, v in weights(learner).items())
    assert [m.training for m in learner.algorithm.actor.modules()] == modes
    assert all(torch.equal(a, b) for a, b in zip(learner._memory(), memory, strict=True))


# ---- memory ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("recurrent", "parts"), [("lstm", 2), ("gru", 1)])
def test_memory_is_empty_after_an_episode_ends(recurrent: str, parts: int) -> None:
    learner = make(recurrent=recurrent)
    script = scripted(learner)
    learner._collect()
    ended = script.failed[-1] | script.timed_out[-1]
    memory = learner._memory()
    assert len(memory) == parts
    for part in memory:
        assert (part[0] == 0).all(dim=1).tolist() == ended.tolist()
    saved = learner.algorithm.storage.saved_hidden_state_a
    for part in saved:  # (T, 1, N, H): what each step started with
        assert (part[0] == 0).all()
        assert (part[2, 0] == 0).all(dim=1).tolist() == [i == 0 for i in range(NUM)]
        assert (part[3, 0] == 0).all(dim=1).tolist() == [i == 1 for i in range(NUM)]


def test_a_symmetric_actor_has_no_memory() -> None:
    learner = make()
    learner.iterate()
    assert learner._memory() == ()
    assert learner.state()["memory"] == []


# ---- state -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("recurrent", KINDS)
def test_a_restored_learner_goes_on_bit_by_bit(recurrent: str) -> None:
    learner = make(recurrent=recurrent)
    learner.iterate()
    saved, environment, rng = learner.state(), learner.rollout.state(), torch.get_rng_state()
    frozen = [v.clone() for v in tensors(saved)]
    expected = learner.iterate()
    assert all(torch.equal(a, b) for a, b in zip(tensors(saved), frozen, strict=True))
    other = make(recurrent=recurrent)
    other.rollout.restore(environment)
    other.restore(saved)
    torch.set_rng_state(rng)
    assert other.iterate() == expected
    assert all(torch.equal(v, weights(learner)[k]) for k, v in weights(other).items())
    assert all(torch.equal(a, b) for a, b in zip(other._memory(), learner._memory(), strict=True))
    assert all(torch.equal(a, b) for a, b in zip(tensors(saved), frozen, strict=True))


@pytest.mark.parametrize(("changes", "batch"), [({"minibatches": 49}, 48), ({"minibatches": 9, "recurrent": "gru"}, 8)])
def test_more_minibatches_than_there_is_to_cut_are_refused(changes: dict[str, Any], batch: int) -> None:
    with pytest.raises(UserError, match=f"batch of {batch} into {changes['minibatches']} minibatches"):
        make(**changes)


def test_a_learner_is_quiet(capsys: pytest.CaptureFixture[str]) -> None:
    make().iterate()
    assert capsys.readouterr().out == ""


def weights(learner: PPOLearner) -> dict[str, Tensor]:
    networks = {"actor": learner.algorithm.actor, "critic": learner.algorithm.critic}
    return {f"{k}.{name}": p.detach() for k, n in networks.items() for name, p in n.named_parameters()}


def tensors(saved: dict[str, Any]) -> list[Tensor]:
    """Weights, optimizer moments and memory of a saved state."""
    moments = [v for p in saved["optimizer_state_dict"]["state"].values() for v in p.values()]
    return [*saved["actor_state_dict"].values(), *saved["critic_state_dict"].values(), *moments, *saved["memory"]]
