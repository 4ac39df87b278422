import subprocess
import warnings
from collections.abc import Iterator
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from policies import export
from policies.contract import load_policy, read_contract
from policies.export import PolicyGraph, Provenance, compare, current_commit, export_policy
from policies.interface import StateSpec, Tensors, WalkingConfig, WalkingInterface, initial_state, restarted
from policies.networks import Actor, FeedForwardActor
from policies.ppo import PPOConfig, PPOLearner
from policies.rollout import Rollout
from policies.sac import SACConfig, SACLearner
from robots.errors import UserError
from sim.backend import PlantConfig
from sim.environment import Environment, EpisodeConfig
from sim.parameters import Randomize
from sim.tasks.velocity import Velocity, flat

NUM, STEPS = 8, 60
PLANT = PlantConfig(
    max_delay=0.02,
    randomize=(
        Randomize(pattern="link.*.mass", lo=0.9, hi=1.1),
        Randomize(pattern="actuator.*.delay", lo=0.004, hi=0.02, kind="value", shared=True),
    ),
)
PROVENANCE = Provenance(task="velocity", algorithm="ppo", seed=7, env_steps=1234, plant=PLANT)


@pytest.fixture(autouse=True)
def no_warnings() -> Iterator[None]:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        yield


def make_rollout(history: int = 1) -> Rollout:
    torch.manual_seed(0)
    task = Velocity(replace(flat().config, episode=EpisodeConfig(seconds=0.5)))
    interface = WalkingInterface(
        task.spec, task.config.gait, task.plant.control_dt, replace(WalkingConfig(), history=history)
    )
    rollout = Rollout(Environment(task, NUM, 0, threads=1), interface)
    rollout.reset()
    return rollout


def make_actor(kind: str, rollout: Rollout) -> Actor:
    """As a learner makes it, with weights that act: training starts with actions near zero."""
    if kind == "sac":
        config = SACConfig(num_envs=NUM, warmup=8, capacity=64)
        with closing(SACLearner(rollout, config)) as learner:
            learner.policy.net.head.data *= 100
            return learner.actor()
    ppo = PPOLearner(rollout, PPOConfig(num_envs=NUM, recurrent=kind if kind in ("lstm", "gru") else "none"))
    head = ppo.algorithm.actor.mlp.head if kind == "ppo" else ppo.algorithm.actor.mlp[-1].weight
    head.data *= 100
    return ppo.actor()


def drive(rollout: Rollout, actor: Actor) -> tuple[dict[str, np.ndarray], np.ndarray, np.ndarray]:
    """Signals (T, N, ...) a robot meets, targets (T, N, J) that training sends it, and episodes that end (T, N)."""
    frames: dict[str, list[np.ndarray]] = {k: [] for k in rollout.interface.inputs}
    targets: list[np.ndarray] = []
    ends, memory, step = [], initial_state(actor.states, NUM), rollout.env.step

    def watched(sent: np.ndarray) -> Any:
        targets.append(sent.copy())
        return step(sent)

    rollout.env.step = watched  # type: ignore[method-assign]
    for _ in range(STEPS):
        for k, values in frames.items():
            values.append(rollout.env.signals[k].copy())
        action, memory = actor(rollout.get_observations()["actor"], memory)
        _, _, dones, _ = rollout.step(action)
        memory = restarted(memory, actor.states, dones.nonzero().flatten())
        ends.append(dones.numpy())
    return {k: np.stack(v) for k, v in frames.items()}, np.stack(targets), np.stack(ends)


@pytest.fixture(scope="module")
def recorded() -> dict[str, np.ndarray]:
    rollout = make_rollout()
    return drive(rollout, make_actor("ppo", rollout))[0]


# ---- the same as training --------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("kind", "history"), [("ppo", 1), ("ppo", 3), ("sac", 1), ("sac", 3), ("lstm", 1), ("gru", 3)])
def test_the_file_sends_a_robot_what_training_sent_it(tmp_path: Path, kind: str, history: int) -> None:
    rollout = make_rollout(history)
    actor = make_actor(kind, rollout)
    signals, targets, ends = drive(rollout, actor)
    path = tmp_path / "policy.onnx"
    difference = export_policy(rollout.interface, actor, PROVENANCE, path, signals)
    print(kind, history, difference)
    assert 0 <= difference < 1e-5
    policy = load_policy(path)
    policy.reset(NUM)
    for t in range(STEPS):
        sent = policy({k: v[t] for k, v in signals.items()})
        np.testing.assert_allclose(sent, targets[t], atol=1e-4)  # the file's own state, unlike in `compare`
        state = policy.state
        for s in policy.contract.states:
            state[s.name][ends[t]] = np.reshape(s.initial, s.shape)
        policy.state = state
    assert ends.any()
    assert np.abs(targets - targets.mean(0)).max() > 0.2


def test_one_robot_is_served_as_many_are(tmp_path: Path, recorded: dict[str, np.ndarray]) -> None:
    rollout, path = make_rollout(), tmp_path / "policy.onnx"
    export_policy(rollout.interface, make_actor("lstm", rollout), PROVENANCE, path, recorded)
    many, one = load_policy(path), load_policy(path)
    many.reset(NUM)
    for t in range(20):
        together = many({k: v[t] for k, v in recorded.items()})
        alone = one({k: v[t, 3] for k, v in recorded.items()})
        np.testing.assert_allclose(alone[0], together[3], atol=1e-6)
    one.reset()
    again = one({k: v[0, 3] for k, v in recorded.items()})
    many.reset(NUM)
    np.testing.assert_allclose(again[0], many({k: v[0] for k, v in recorded.items()})[3], atol=1e-6)


@pytest.mark.parametrize("wrong", ["action", "state"])
def test_compare_sees_a_difference(tmp_path: Path, recorded: dict[str, np.ndarray], wrong: str) -> None:
    rollout, path = make_rollout(), tmp_path / "policy.onnx"
    actor = make_actor("gru", rollout)
    export_policy(rollout.interface, actor, PROVENANCE, path, recorded)
    graph = PolicyGraph(rollout.interface, actor)
    assert compare(graph, path, recorded) < 1e-5
    with torch.no_grad():
        if wrong == "action":
            actor.network[-1].bias += 0.1
        else:
            actor.network[0].weight.zero_()  # what memory holds does not show in the targets any more
            export_policy(rollout.interface, actor, PROVENANCE, path, recorded)
            actor.memory.bias_hh_l0 += 0.1
    assert compare(graph, path, recorded) > 1e-3


# ---- the contract ----------------------------------------------------------------------------------------------------


def test_the_contract_says_what_the_policy_is(tmp_path: Path, recorded: dict[str, np.ndarray]) -> None:
    rollout, path = make_rollout(3), tmp_path / "policy.onnx"
    interface = rollout.interface
    export_policy(interface, make_actor("lstm", rollout), PROVENANCE, path, recorded)
    contract, spec = read_contract(path), interface.spec
    assert (contract.robot, contract.model_hash, contract.joint_order) == (spec.name, spec.model_hash, spec.joint_names)
    assert contract.inputs == interface.signals
    assert {s.name: s.shape for s in contract.states} == {
        "phase": (1,),
        "action": (12,),
        "history": (2 * interface.frame,),
        "hidden": (1, 128),
        "cell": (1, 128),
    }
    assert all(set(s.initial) == {0.0} for s in contract.states)
    assert contract.output.joints == spec.joint_names
    assert set(contract.output.held) == set(spec.joint_names) - set(interface.legs)
    assert contract.rate_hz == pytest.approx(50)
    assert contract.action_delay == (0.004, 0.02)
    ranges = contract.dynamics.randomization
    assert (ranges["link.*.mass"].kind, ranges["link.*.mass"].lo, ranges["link.*.mass"].hi) == ("scale", 0.9, 1.1)
    assert ranges["actuator.*.delay"].kind == "uniform"
    assert (contract.training.seed, contract.training.env_steps, contract.training.algorithm) == (7, 1234, "ppo")
    assert contract.training.commit == current_commit()


def test_the_commit_is_that_of_this_code_only(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    package = tmp_path / "site-packages" / "policies"
    package.mkdir(parents=True)
    monkeypatch.setattr(export, "__file__", str(package / "export.py"))
    assert current_commit() == "unknown"
    git = ["git", "-C", str(tmp_path), "-c", "user.name=a", "-c", "user.email=a@b.c"]
    for words in (["init", "-q"], ["commit", "-q", "--allow-empty", "-m", "of someone else"]):
        subprocess.run([*git, *words], check=True)
    assert current_commit() == "unknown"
    monkeypatch.setattr(export, "__file__", str(tmp_path / "policies" / "export.py"))
    head = subprocess.run([*git, "rev-parse", "HEAD"], check=True, capture_output=True, text=True).stdout.strip()
    assert current_commit() == head
    (tmp_path / "file").write_text("")
    subprocess.run([*git, "add", "file"], check=True)
    assert current_commit() == f"{head}+changes"


# ---- failure ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("difference", [1.1e-4, float("nan")])
def test_a_file_that_differs_from_torch_is_not_written(
    tmp_path: Path, recorded: dict[str, np.ndarray], monkeypatch: pytest.MonkeyPatch, difference: float
) -> None:
    rollout, path = make_rollout(), tmp_path / "policy.onnx"
    monkeypatch.setattr(export, "compare", lambda *_: difference)
    with pytest.raises(UserError, match=r"differs from torch by .*, at most 1e-04 is accepted"):
        export_policy(rollout.interface, make_actor("ppo", rollout), PROVENANCE, path, recorded)
    assert list(tmp_path.iterdir()) == []
    path.write_text("an older one")
    with pytest.raises(UserError, match="no policy was written"):
        export_policy(rollout.interface, make_actor("ppo", rollout), PROVENANCE, path, recorded)
    assert path.read_text() == "an older one"


class Branching(Actor):
    """Does one thing or the other: a trace would keep the first for ever."""

    def forward(self, obs: Tensor, state: Tensors) -> tuple[Tensor, dict[str, Tensor]]:
        return obs[:, :12] if obs.sum() > 0 else -obs[:, :12], {}


class Unknown(Actor):
    """Uses what ONNX has no word for."""

    def forward(self, obs: Tensor, state: Tensors) -> tuple[Tensor, dict[str, Tensor]]:
        return torch.special.bessel_j0(obs[:, :12]), {}


@pytest.mark.parametrize(("actor", "reason"), [(Branching(), "to a Python boolean"), (Unknown(), "bessel_j0")])
def test_what_torch_cannot_export_is_said_and_nothing_written(
    tmp_path: Path, recorded: dict[str, np.ndarray], actor: Actor, reason: str
) -> None:
    path = tmp_path / "policy.onnx"
    with pytest.raises(UserError, match=f"{path}: torch could not export the policy: .*{reason}"):
        export_policy(make_rollout().interface, actor, PROVENANCE, path, recorded)
    assert list(tmp_path.iterdir()) == []


def test_a_policy_that_is_not_finite_is_refused(tmp_path: Path, recorded: dict[str, np.ndarray]) -> None:
    rollout = make_rollout()
    actor = make_actor("ppo", rollout)
    with torch.no_grad():
        actor.network.head_bias.fill_(torch.nan)
    with pytest.raises(UserError, match="joint_targets"):
        export_policy(rollout.interface, actor, PROVENANCE, tmp_path / "policy.onnx", recorded)
    assert list(tmp_path.iterdir()) == []


def test_a_folder_that_is_not_there_is_said(tmp_path: Path, recorded: dict[str, np.ndarray]) -> None:
    rollout, path = make_rollout(), tmp_path / "nowhere" / "policy.onnx"
    with pytest.raises(UserError, match="could not write the policy file: No such file"):
        export_policy(rollout.interface, make_actor("ppo", rollout), PROVENANCE, path, recorded)


def test_two_states_of_one_name_are_refused() -> None:
    class Clash(FeedForwardActor):
        states = {"phase": StateSpec(shape=(1,))}  # noqa: RUF012 - stands in for the property

    with pytest.raises(ValueError, match="both have a state named phase"):
        PolicyGraph(make_rollout().interface, Clash(nn.Identity()))


def test_an_export_draws_no_random_number(tmp_path: Path, recorded: dict[str, np.ndarray]) -> None:
    rollout = make_rollout()
    actor = make_actor("ppo", rollout)
    before = torch.get_rng_state()
    export_policy(rollout.interface, actor, PROVENANCE, tmp_path / "policy.onnx", recorded)
    assert torch.equal(torch.get_rng_state(), before)
