import threading
import warnings
from collections.abc import Iterator
from concurrent.futures import Executor, Future
from contextlib import closing
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from tensordict import TensorDict
from torch import Tensor

from policies.interface import WalkingInterface
from policies.rollout import Ended, Rollout
from policies.sac import GaussianActor, Replay, SACConfig, SACLearner
from robots.errors import UserError
from sim.environment import Environment, EpisodeConfig
from sim.tasks.velocity import Velocity, flat

NUM = 8
SMALL = SACConfig(num_envs=NUM, iteration=12, warmup=64, batch=16, capacity=256, hidden=(16, 16), actor_hidden=(16, 8))


@pytest.fixture(autouse=True)
def no_warnings() -> Iterator[None]:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        yield


def make_rollout(seconds: float = 0.3) -> Rollout:
    torch.manual_seed(0)
    torch.set_num_threads(1)
    task = Velocity(replace(flat().config, episode=EpisodeConfig(seconds=seconds)))
    rollout = Rollout(
        Environment(task, NUM, 0, threads=1),
        WalkingInterface(task.spec, task.config.gait, task.plant.control_dt),
    )
    rollout.reset()
    return rollout


@pytest.fixture
def learner() -> Iterator[SACLearner]:
    with closing(SACLearner(make_rollout(), SMALL)) as made:
        yield made


def weights(learner: SACLearner) -> dict[str, Tensor]:
    networks = {"policy": learner.policy, "critic": learner.critic, "target": learner.target}
    named = {f"{k}.{name}": p for k, n in networks.items() for name, p in n.named_parameters()}
    return {k: v.detach() for k, v in named.items()} | {"temperature": learner.log_temperature.detach()}


# ---- replay ----------------------------------------------------------------------------------------------------------


def test_replay_keeps_the_latest_transitions() -> None:
    """Capacity 7, three at a time: the third round overwrites the first two rows of the first."""
    replay, rng = Replay(7, obs_dim=2, action_dim=1), torch.Generator().manual_seed(0)
    kept: list[tuple[float, ...]] = []
    for t in range(12):
        obs, following = torch.randn(2, 3, 2, generator=rng)
        action, reward = torch.randn(3, 1, generator=rng), torch.randn(3, generator=rng)
        failed = torch.tensor([t % 2 == 0, False, True])
        replay.add(obs, action, reward, failed, following)
        rows = torch.cat([obs, following, action, reward[:, None], failed[:, None].float()], dim=1)
        kept = [*kept, *(tuple(r) for r in rows.tolist())][-7:]
        assert replay.size == len(kept)
        assert replay.next == 3 * (t + 1) % 7
        assert {tuple(r) for r in replay.data[: replay.size].tolist()} == set(kept)
        drawn = replay.sample(200)
        assert {tuple(r) for r in torch.cat([d.view(200, -1) for d in drawn], dim=1).tolist()} == set(kept)


def test_a_sample_comes_apart_as_it_was_put_together() -> None:
    replay = Replay(1, obs_dim=3, action_dim=2)
    obs, following, action = torch.tensor([[1.0, 2, 3]]), torch.tensor([[4.0, 5, 6]]), torch.tensor([[7.0, 8]])
    replay.add(obs, action, torch.tensor([9.0]), torch.tensor([True]), following)
    drawn = replay.sample(1)
    for got, put in zip(drawn, (obs, following, action, torch.tensor([9.0]), torch.tensor([1.0])), strict=True):
        assert torch.equal(got, put)


def scripted(learner: SACLearner, failed: Tensor, timed_out: Tensor) -> tuple[list[TensorDict], list[TensorDict]]:
    """Random observations instead of the simulation's; failures and time limits (T, N) as told."""
    draw, first = torch.Generator().manual_seed(1), learner.rollout.get_observations()

    def randoms(num: int) -> list[TensorDict]:
        shapes = {k: v.shape for k, v in first.items()}
        return [TensorDict({k: torch.randn(s, generator=draw) for k, s in shapes.items()}, [NUM]) for _ in range(num)]

    obs, last = randoms(len(failed) + 1), randoms(len(failed))
    now = iter(range(len(failed)))
    learner.rollout._obs = obs[0]

    def step(_: Tensor) -> tuple[TensorDict, Tensor, Tensor, dict[str, Any]]:
        t = next(now)
        ids = (failed[t] | timed_out[t]).nonzero().flatten()
        ended = Ended(ids=ids, timed_out=timed_out[t][ids], obs=last[t][ids]) if len(ids) else None
        learner.rollout._obs = obs[t + 1]
        return obs[t + 1], torch.arange(NUM) + 10.0 * t, failed[t] | timed_out[t], {"ended": ended}

    learner.rollout.step = step  # type: ignore[method-assign]
    return obs, last


def test_falls_are_stored_as_ends_and_time_limits_as_going_on(learner: SACLearner) -> None:
    failed, timed_out = torch.zeros(2, 3, NUM, dtype=torch.bool)
    failed[1, 0] = timed_out[1, 1] = timed_out[2, 2] = True
    obs, last = scripted(learner, failed, timed_out)
    for _ in range(3):
        learner._control_step()
    rows, width = learner.replay.data[: 3 * NUM].view(3, NUM, -1), obs[0]["critic"].shape[1]
    for t in range(3):
        ended = failed[t] | timed_out[t]
        following = torch.where(ended[:, None], last[t]["critic"], obs[t + 1]["critic"])
        assert torch.equal(rows[t, :, :width], obs[t]["critic"])
        assert torch.equal(rows[t, :, width : 2 * width], following)
        assert torch.equal(rows[t, :, -2], SMALL.reward_scale * (torch.arange(NUM) + 10.0 * t))
        assert torch.equal(rows[t, :, -1], failed[t].float())


def test_what_a_simulation_that_broke_reads_last_does_no_harm(learner: SACLearner) -> None:
    failed, timed_out = torch.zeros(2, 1, NUM, dtype=torch.bool)
    failed[0, 3] = True
    _, last = scripted(learner, failed, timed_out)
    last[0]["critic"][3], last[0]["actor"][3] = torch.nan, torch.nan
    learner._control_step()
    for _ in range(4):
        learner._update()
    assert all(torch.isfinite(v).all() for v in weights(learner).values())


@pytest.mark.parametrize("fell", [True, False])
def test_values_tend_to_the_reward_alone_after_a_fall_and_look_ahead_otherwise(fell: bool) -> None:
    """One transition for ever, temperature and entropy next to nothing: Q -> r, or r + gamma Q'."""
    config = replace(SMALL, capacity=NUM, warmup=NUM, gamma=0.5, tau=0.2, first_temperature=1e-9, critic_rate=1e-2)
    with closing(SACLearner(make_rollout(), config)) as learner:
        obs = learner.rollout.get_observations()["critic"]
        action, reward = torch.zeros(NUM, 12), torch.full((NUM,), 2.0)
        learner.replay.add(obs, action, reward, torch.full((NUM,), fell), obs)
        for _ in range(200):
            learner._update()
        with torch.no_grad():
            q = learner.critic(torch.cat([obs, action], dim=1)).squeeze(-1)
            acted, _ = learner.policy.sample(obs[:, : learner.obs_dim])
            ahead = learner.target(torch.cat([obs, acted], dim=1)).squeeze(-1).min(0).values
        torch.testing.assert_close(q, (2.0 + (not fell) * 0.5 * ahead).expand(2, -1), atol=0.15, rtol=0)
        assert (ahead.mean() > 2.5) == (not fell)


# ---- policy ----------------------------------------------------------------------------------------------------------


def test_the_log_density_is_that_of_the_squashed_gaussian() -> None:
    rollout = make_rollout()
    actor = GaussianActor(rollout, SMALL)
    obs = rollout.get_observations()["actor"]
    action, log_density = actor.sample(obs)
    mean, log_std = actor.net(obs).chunk(2, dim=-1)
    gaussian = torch.distributions.Normal(mean, (log_std + SMALL.init_log_std).exp())
    squashed = torch.distributions.TransformedDistribution(gaussian, [torch.distributions.TanhTransform()])
    expected = squashed.log_prob(action / SMALL.action_bound).sum(-1)
    torch.testing.assert_close(log_density, expected, atol=1e-3, rtol=1e-4)
    assert (action.abs() < SMALL.action_bound).all()


def test_the_policy_is_symmetric_in_law() -> None:
    rollout = make_rollout()
    actor, interface = GaussianActor(rollout, SMALL), rollout.interface
    with torch.no_grad():
        for p in actor.parameters():
            p.copy_(torch.randn(p.shape))
    obs = torch.randn(16, interface.num_obs)
    (p, s), (ap, asign) = interface.mirror_obs(), interface.mirror_action()
    mean, log_std = actor.net(obs).chunk(2, dim=-1)
    other_mean, other_log_std = actor.net(obs[:, p] * s).chunk(2, dim=-1)
    torch.testing.assert_close(other_mean, mean[:, ap] * asign, atol=1e-4, rtol=1e-4)
    torch.testing.assert_close(other_log_std, log_std[:, ap], atol=1e-4, rtol=1e-4)


def test_the_actor_for_export_is_the_policys_mean(learner: SACLearner) -> None:
    obs = learner.rollout.get_observations()["actor"]
    action, state = learner.actor()(obs, {})
    assert state == {}
    assert torch.equal(action, learner.policy(obs))
    noisy = torch.stack([learner.policy.sample(obs)[0] for _ in range(300)])
    assert (noisy.mean(0) - action).abs().max() < 0.25
    assert noisy.std(0).min() > 0.1


# ---- learning --------------------------------------------------------------------------------------------------------


def test_an_iteration_moves_every_weight_target_and_the_temperature(learner: SACLearner) -> None:
    before = {k: v.clone() for k, v in weights(learner).items()}
    curves = learner.iterate()
    assert set(curves) == {"loss/critic", "loss/actor", "value/mean", "policy/entropy", "policy/temperature"}
    assert all(np.isfinite(v) for v in curves.values())
    assert {k for k, v in weights(learner).items() if torch.equal(v, before[k])} == set()
    assert learner.steps_per_iteration == 12 * NUM == learner.replay.size
    assert learner.count == SMALL.updates * (12 - SMALL.warmup // NUM)


def test_nothing_is_learnt_before_the_warm_up(learner: SACLearner) -> None:
    before = {k: v.clone() for k, v in weights(learner).items()}
    for _ in range(SMALL.warmup // NUM):
        learner._control_step()
    assert learner.count == 0
    assert all(torch.equal(v, before[k]) for k, v in weights(learner).items())
    learner._control_step()
    assert learner.count == SMALL.updates


def test_the_target_follows_the_critic_by_its_share(learner: SACLearner) -> None:
    learner.iterate()
    before = [p.clone() for p in learner.target.parameters()]
    learner._update()
    for p, old, new in zip(learner.target.parameters(), before, learner.critic.parameters(), strict=True):
        torch.testing.assert_close(p, old + SMALL.tau * (new - old))
        assert not p.requires_grad


@pytest.mark.parametrize(("target", "rises"), [(1e3, True), (-1e3, False)])
def test_the_temperature_pulls_the_entropy_to_its_target(target: float, rises: bool) -> None:
    with closing(SACLearner(make_rollout(), replace(SMALL, target_entropy=target))) as learner:
        learner.iterate()
        assert (float(learner.log_temperature.detach().exp()) > SMALL.first_temperature) == rises


# ---- the worker thread -----------------------------------------------------------------------------------------------


def test_stepping_beside_the_updates_gives_what_stepping_before_them_gives() -> None:
    """The same run with the simulation stepped by the main thread, one after the other."""

    class Inline(Executor):
        def submit(self, function: Any, /, *args: Any, **_: Any) -> Future[Any]:
            future: Future[Any] = Future()
            future.set_result(function(*args))
            return future

    results = []
    for inline in (False, True):
        learner = SACLearner(make_rollout(), SMALL)
        if inline:
            learner.close()
            learner._worker = Inline()  # type: ignore[assignment]
        with closing(learner):
            curves = [learner.iterate() for _ in range(2)]
        results.append((curves, weights(learner), learner.replay.data))
    assert results[0][0] == results[1][0]
    assert all(torch.equal(v, results[1][1][k]) for k, v in results[0][1].items())
    assert torch.equal(results[0][2], results[1][2])


def test_closing_ends_the_worker_thread() -> None:
    before = set(threading.enumerate())
    learner = SACLearner(make_rollout(), SMALL)
    learner.iterate()
    assert len(set(threading.enumerate()) - before) == 1
    learner.close()
    assert set(threading.enumerate()) == before


def test_an_error_in_an_update_leaves_no_simulation_in_motion(
    learner: SACLearner, monkeypatch: pytest.MonkeyPatch
) -> None:
    learner.iterate()
    go, done = threading.Event(), []
    step = learner._step

    def slow(action: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        assert go.wait(10)
        done.append(True)
        return step(action)

    def fail() -> None:
        threading.Timer(0.05, go.set).start()
        raise KeyboardInterrupt

    monkeypatch.setattr(learner, "_step", slow)
    monkeypatch.setattr(learner, "_update", fail)
    with pytest.raises(KeyboardInterrupt):
        learner.iterate()
    assert done == [True]


def test_an_error_in_the_simulation_is_raised(learner: SACLearner, monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(_: Tensor) -> None:
        raise RuntimeError("the ground opened")

    monkeypatch.setattr(learner.rollout, "step", broken)
    with pytest.raises(RuntimeError, match="the ground opened"):
        learner.iterate()


# ---- state -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("before", [1, 3], ids=["part full", "wrapped"])
def test_a_restored_learner_goes_on_bit_by_bit(before: int) -> None:
    with closing(SACLearner(make_rollout(), SMALL)) as learner, closing(SACLearner(make_rollout(), SMALL)) as other:
        torch.manual_seed(5)
        for _ in range(before):
            learner.iterate()
        saved, environment, rng = learner.state(), learner.rollout.state(), torch.get_rng_state()
        assert len(saved["replay"]["data"]) == min(before * 96, SMALL.capacity)
        frozen = [v.clone() for v in tensors(saved)]
        expected = learner.iterate()
        assert all(torch.equal(a, b) for a, b in zip(tensors(saved), frozen, strict=True))
        other.rollout.restore(environment)
        other.restore(saved)
        torch.set_rng_state(rng)
        assert other.iterate() == expected
        assert all(torch.equal(v, weights(learner)[k]) for k, v in weights(other).items())
        assert torch.equal(learner.replay.data, other.replay.data)
        assert all(torch.equal(a, b) for a, b in zip(tensors(saved), frozen, strict=True))


def tensors(saved: dict[str, Any]) -> list[Tensor]:
    """Weights, optimizer moments and replay of a saved state."""
    networks = [v for k in ("policy", "critic", "target") for v in saved[k].values()]
    moments = [v for o in saved["optimizers"] for p in o["state"].values() for v in p.values()]
    return [*networks, *moments, saved["log_temperature"], saved["replay"]["data"]]


@pytest.mark.parametrize(("changes", "least"), [({"warmup": 300}, 300), ({"capacity": 4, "warmup": 1}, NUM)])
def test_a_replay_too_small_to_ever_learn_is_refused(changes: dict[str, int], least: int) -> None:
    with pytest.raises(UserError, match=f"at least {least}"):
        SACLearner(make_rollout(), replace(SMALL, **changes))
