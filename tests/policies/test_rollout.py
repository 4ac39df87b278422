from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from policies.interface import WalkingInterface, initial_state
from policies.rollout import Rollout
from sim.environment import Environment, EpisodeConfig
from sim.tasks.velocity import Velocity, flat, rough

NUM, LIMIT = 8, 12
PREVIOUS_ACTION = slice(33, 45)
"""Where the observation of 12 legs' joints holds it."""


def make(stagger: str = "none", maker: Any = flat, seed: int = 0, limit: int = LIMIT, threads: int = 1) -> Rollout:
    """Episodes of `limit` control steps."""
    config = maker().config
    episode = EpisodeConfig(seconds=limit * config.plant.control_dt, stagger=stagger)
    task = Velocity(replace(config, episode=episode))
    env = Environment(task, NUM, seed, threads=threads)
    interface = WalkingInterface(task.spec, task.config.gait, task.plant.control_dt)
    rollout = Rollout(env, interface)
    rollout.reset()
    return rollout


def actions(steps: int, seed: int = 0) -> Tensor:
    return 0.3 * torch.randn(steps, NUM, 12, generator=torch.Generator().manual_seed(seed))


def let_fall(rollout: Rollout, sim: int) -> None:
    """Put a robot on its knees, and below the height that ends an episode."""
    rollout.env.backend.batch.bind("qpos")[sim, 2] = 0.4


# ---- observations ----------------------------------------------------------------------------------------------------


def test_the_critic_sees_what_the_actor_sees_and_more() -> None:
    rollout = make()
    obs, interface = rollout.get_observations(), rollout.interface
    assert obs["actor"].shape == (NUM, interface.num_obs)
    assert torch.equal(obs["critic"][:, : interface.num_obs], obs["actor"])
    assert obs["critic"].shape[1] == interface.num_obs + len(interface.mirror_privileged()[0])


def test_the_last_observation_of_an_episode_is_kept_and_the_next_one_is_of_a_new_episode() -> None:
    rollout = make()
    for t, action in enumerate(actions(LIMIT), start=1):
        obs, _, dones, extras = rollout.step(action)
        assert "time_outs" not in extras  # rsl_rl would add the value of the wrong state
        if t < LIMIT:
            assert extras["ended"] is None
            assert not dones.any()
    ended = extras["ended"]
    assert dones.all()
    assert ended.timed_out.all()
    assert torch.equal(ended.ids, torch.arange(NUM))
    assert torch.equal(ended.obs["actor"][:, PREVIOUS_ACTION], action)
    assert torch.equal(obs["actor"][:, PREVIOUS_ACTION], torch.zeros(NUM, 12))
    np.testing.assert_array_equal(obs["actor"][:, 45:47], [[0, 1]] * NUM)  # the clock starts anew
    assert torch.equal(rollout.get_observations()["critic"], obs["critic"])


def test_the_last_observation_is_the_one_a_longer_episode_goes_on_with() -> None:
    """Same seed, same actions: an episode cut after 12 steps ends in the state that an uncut one passes through."""
    short, long = make(limit=12), make(limit=40)
    for action in actions(12):
        _, _, _, extras = short.step(action)
        obs, _, _, _ = long.step(action)
    for group in ("actor", "critic"):
        assert torch.equal(extras["ended"].obs[group], obs[group])


def test_a_fall_and_a_time_limit_are_told_apart() -> None:
    rollout = make()
    for action in actions(LIMIT - 1):
        rollout.step(action)
    let_fall(rollout, 3)
    _, _, dones, extras = rollout.step(actions(1)[0])
    assert dones.all()
    assert extras["ended"].timed_out.tolist() == [i != 3 for i in range(NUM)]
    let_fall(rollout, 5)
    obs, _, dones, extras = rollout.step(actions(1)[0])
    assert dones.nonzero().tolist() == [[5]]
    assert extras["ended"].ids.tolist() == [5]
    assert extras["ended"].timed_out.tolist() == [False]
    assert extras["ended"].obs["actor"].shape == (1, rollout.interface.num_obs)
    assert (obs["actor"][:, PREVIOUS_ACTION] == 0).all(dim=1).tolist() == [i == 5 for i in range(NUM)]


# ---- episodes --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("stagger", ["none", "random", "blocks"])
def test_only_episodes_seen_from_their_start_count(stagger: str) -> None:
    rollout = make(stagger)
    phase = rollout.env.steps.copy()
    assert torch.equal(rollout.episode_length_buf, torch.from_numpy(phase))
    sums, lengths, whole = np.zeros(NUM, np.float32), np.zeros(NUM, int), phase == 0
    expected = []
    for t, action in enumerate(actions(3 * LIMIT)):
        if t == LIMIT + 5:
            let_fall(rollout, 2)
        _, reward, dones, extras = rollout.step(action)
        sums += reward.numpy()
        lengths += 1
        for i in dones.nonzero().flatten().tolist():
            if whole[i]:
                timed_out = bool(extras["ended"].timed_out[extras["ended"].ids.tolist().index(i)])
                expected.append((float(sums[i]), int(lengths[i]), timed_out))
            sums[i], lengths[i], whole[i] = 0, 0, True
    assert rollout.finished == expected
    assert {length for _, length, timed_out in expected if timed_out} == {LIMIT}
    assert [timed_out for _, _, timed_out in expected].count(False) == 1
    assert (phase == 0).all() == (stagger == "none")


def test_a_reset_forgets_the_episodes_under_way() -> None:
    rollout = make()
    for action in actions(LIMIT + 3):
        rollout.step(action)
    rollout.reset()
    assert rollout.finished == []
    for action in actions(LIMIT):
        rollout.step(action)
    assert [length for _, length, _ in rollout.finished] == [LIMIT] * NUM
    assert (rollout.get_observations()["actor"][:, PREVIOUS_ACTION] == 0).all()


# ---- state -----------------------------------------------------------------------------------------------------------


def played(rollout: Rollout, steps: Tensor) -> list[Tensor]:
    """All that a learner sees of these steps."""
    seen = []
    for action in steps:
        obs, reward, dones, extras = rollout.step(action)
        seen += [obs["critic"].clone(), reward.clone(), dones.clone()]
        if extras["ended"] is not None:
            seen += [extras["ended"].ids, extras["ended"].timed_out, extras["ended"].obs["critic"]]
    return seen


@pytest.mark.parametrize("maker", [flat, rough])
@pytest.mark.parametrize("fresh", [True, False], ids=["elsewhere", "back in time"])
def test_a_restored_rollout_goes_on_bit_by_bit(maker: Any, fresh: bool) -> None:
    rollout, steps = make("random", maker), actions(2 * LIMIT)
    played(rollout, steps[:7])
    saved = rollout.state()
    before = rollout.get_observations()["critic"].clone()
    rollout.finished.clear()
    expected, finished = played(rollout, steps[7:]), list(rollout.finished)
    other = make("random", maker, seed=1, threads=2) if fresh else rollout
    other.restore(saved)
    other.finished.clear()
    assert torch.equal(other.get_observations()["critic"], before)
    again = played(other, steps[7:])
    assert len(again) == len(expected)
    assert all(torch.equal(a, b) for a, b in zip(again, expected, strict=True))
    assert other.finished == finished
    assert finished


def test_a_saved_state_does_not_change_with_the_rollout() -> None:
    rollout = make("random")
    saved = rollout.state()
    copy = {k: v.clone() for k, v in saved["state"].items()}, saved["lengths"].clone(), saved["env"]["steps"].copy()
    played(rollout, actions(5))
    assert all(torch.equal(saved["state"][k], v) for k, v in copy[0].items())
    assert torch.equal(saved["lengths"], copy[1])
    np.testing.assert_array_equal(saved["env"]["steps"], copy[2])


def test_the_policys_own_state_starts_as_the_interface_says() -> None:
    rollout = make()
    state, first = rollout.state()["state"], initial_state(rollout.interface.states, NUM)
    assert all(torch.equal(state[k], v) for k, v in first.items())
