"""One ONNX from signals to joint targets: interface, network and state in one graph, checked against torch."""

import contextlib
import datetime
import subprocess
import tempfile
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import torch
from torch import Tensor, nn

from policies.contract import (
    TARGETS,
    Dynamics,
    JointTargets,
    PolicyContract,
    Range,
    StateTensor,
    Training,
    embed,
    load_policy,
)
from policies.interface import StateSpec, WalkingInterface, initial_state
from policies.networks import Actor
from policies.runs import POLICY
from robots.errors import UserError
from sim.backend import PlantConfig

TOLERANCE = 1e-4
"""Largest difference between the exported graph and torch that is accepted, in joint targets [rad] and states."""
OPSET = 18
"""ONNX operator set of the graph."""
KNOWN_WARNINGS = (
    "You are using the legacy TorchScript-based ONNX export",
    "The feature will be removed",
    "Exporting a model to ONNX with a batch_size other than 1",
)
"""How torch's exporter always warns about itself."""


class PolicyGraph(nn.Module):
    """observe, network and act in one forward pass, on positional tensors."""

    def __init__(self, interface: WalkingInterface, actor: Actor) -> None:
        """Join an interface and the network from observation to action; they must not call two states the same."""
        super().__init__()
        self.interface, self.actor = interface, actor
        shared = interface.states.keys() & actor.states.keys()
        if shared:
            raise ValueError(f"interface and actor both have a state named {', '.join(sorted(shared))}")

    @property
    def states(self) -> dict[str, StateSpec]:
        """Recurrent state by name, the interface's first."""
        return self.interface.states | self.actor.states

    def forward(self, *tensors: Tensor) -> tuple[Tensor, ...]:
        """Signals in the interface's order, then states; returns targets (N, J), then the next states."""
        names = [*self.interface.inputs, *self.states]
        given = dict(zip(names, tensors, strict=True))
        obs = self.interface.observe(given, given)
        action, memory = self.actor(obs, given)
        targets, following = self.interface.act(action, obs, given, given)
        following |= memory
        return (targets, *(following[k] for k in self.states))


@dataclass(frozen=True, kw_only=True)
class Provenance:
    """Where a policy comes from."""

    task: str
    """Task name."""
    algorithm: str
    """Learner name."""
    seed: int
    """Seed of the run."""
    env_steps: int
    """Control steps seen, over all simulations."""
    plant: PlantConfig
    """Plant it was trained on."""


def export_policy(
    interface: WalkingInterface,
    actor: Actor,
    provenance: Provenance,
    path: Path,
    recorded: Mapping[str, np.ndarray],
) -> float:
    """Write the policy file and check it on recorded signals.

    Args:
        interface: Observations and actions of the policy.
        actor: Network from observation (N, num_obs) and its memory to action (N, num_actions).
        provenance: What goes into the contract.
        path: The file; an older one stays until the new one is complete.
        recorded: Signals by name, (T, N, ...), T steps of N robots from their start.

    Returns: largest difference between onnxruntime and torch over the recorded signals [rad], see `compare`.
    Raises: UserError when torch cannot export it, when that difference is above TOLERANCE, or when the file cannot be
        written; nothing is written then.
    """
    graph = PolicyGraph(interface, actor)
    with tempfile.TemporaryDirectory() as folder:
        raw, trial = Path(folder) / "graph.onnx", Path(folder) / "policy.onnx"
        try:
            _trace(graph, raw)
        except Exception as error:  # torch's exporter raises whatever the code it traces raises
            reason = next(iter(str(error).splitlines()), "") or type(error).__name__
            raise UserError(f"{path}: torch could not export the policy: {reason}") from error
        contract = build_contract(graph, provenance)
        embed(raw, contract, trial)
        difference = compare(graph, trial, recorded)
        if not difference <= TOLERANCE:
            found = f"the exported policy differs from torch by {difference:.2e}, at most {TOLERANCE:.0e} is accepted"
            raise UserError(f"{path}: {found}; no policy was written")
        embed(raw, contract, path)
    return difference


def export_run(folder: Path) -> Path:
    """Write the policy file of a run anew from its last checkpoint; returns the file. Raises UserError."""
    from policies.train import load_trainer  # late: a run exports through this module

    path = folder / POLICY
    with contextlib.closing(load_trainer(folder)) as trainer:
        trainer.export(path)
    return path


def build_contract(graph: PolicyGraph, provenance: Provenance) -> PolicyContract:
    """The contract of a policy with this graph and history."""
    interface, plant = graph.interface, provenance.plant
    spec = interface.spec
    delays = [r for r in plant.randomize if r.pattern.endswith(".delay")]
    return PolicyContract(
        robot=spec.name,
        model_hash=spec.model_hash,
        joint_order=spec.joint_names,
        task=provenance.task,
        inputs=interface.signals,
        states=tuple(
            StateTensor(name=k, shape=s.shape, initial=(s.initial,) * int(np.prod(s.shape)))
            for k, s in graph.states.items()
        ),
        output=JointTargets.of(spec, held=[n for n in spec.joint_names if n not in interface.legs]),
        rate_hz=1 / interface.dt,
        action_delay=(min((r.lo for r in delays), default=0.0), max((r.hi for r in delays), default=0.0)),
        dynamics=Dynamics(
            randomization={
                r.pattern: Range(kind="scale" if r.kind == "scale" else "uniform", lo=r.lo, hi=r.hi)
                for r in plant.randomize
            }
        ),
        training=Training(
            commit=current_commit(),
            algorithm=provenance.algorithm,
            seed=provenance.seed,
            env_steps=provenance.env_steps,
            date=datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        ),
    )


@torch.inference_mode()
def compare(graph: PolicyGraph, path: Path, recorded: Mapping[str, np.ndarray]) -> float:
    """Largest difference between torch and the policy file, over joint targets [rad] and next states.

    Both are fed the same signals (T, N, ...) step by step, and at each step the same state, torch's: a policy sees its
    last action, and one that reacts strongly to it would make much of the last bits.
    """
    steps, num = next(iter(recorded.values())).shape[:2]
    policy = load_policy(path, graph.interface.spec)
    policy.reset(num)
    state, worst = initial_state(graph.states, num), 0.0
    for t in range(steps):
        signals = {k: recorded[k][t] for k in graph.interface.inputs}
        wanted = graph(*(torch.from_numpy(v.copy()) for v in signals.values()), *state.values())
        policy.state = {k: v.numpy() for k, v in state.items()}
        found = [policy(signals), *(policy.state[k] for k in state)]
        worst = max(worst, *(float(np.abs(f - w.numpy()).max()) for f, w in zip(found, wanted, strict=True)))
        state = dict(zip(state, wanted[1:], strict=True))
    return worst


def current_commit() -> str:
    """Commit of the working tree this code runs from, with "+changes" if it differs; "unknown" outside git."""
    root = Path(__file__).resolve().parent.parent

    def git(*words: str) -> str:
        return subprocess.run(["git", "-C", root, *words], capture_output=True, text=True, check=True).stdout.strip()

    try:
        if Path(git("rev-parse", "--show-toplevel")) != root:
            return "unknown"  # installed inside someone else's repository
        return git("rev-parse", "HEAD") + ("+changes" if git("status", "--porcelain", "--untracked-files=no") else "")
    except (OSError, subprocess.CalledProcessError):
        return "unknown"


def _trace(graph: PolicyGraph, path: Path) -> None:
    """Write the graph as plain ONNX with a dynamic batch axis.

    torch's older exporter: the newer one takes thirty times as long for the same graph and writes an LSTM no better.
    """
    signals: dict[str, Any] = {s.name: torch.zeros(2, *s.shape) for s in graph.interface.signals}
    if "imu_quat" in signals:
        signals["imu_quat"][:, 0] = 1
    states = initial_state(graph.states, 2)
    inputs = [*signals, *(f"state.{k}" for k in states)]
    outputs = [TARGETS, *(f"next_state.{k}" for k in states)]
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        torch.onnx.export(
            graph,
            (*signals.values(), *states.values()),
            str(path),
            input_names=inputs,
            output_names=outputs,
            dynamic_axes={name: {0: "N"} for name in (*inputs, *outputs)},
            opset_version=OPSET,
            dynamo=False,
        )
    _judge(caught)
    sizes = [(len(graph.interface.spec.joints),), *(s.shape for s in graph.states.values())]
    _declare_shapes(path, dict(zip(outputs, sizes, strict=True)))


def _judge(caught: Sequence[warnings.WarningMessage]) -> None:
    """Raise RuntimeError for a branch that the trace froze; pass on what is new, leave out what is known.

    Known is what torch says about its own code: the exporter's age, the shape checks in `torch.nn.LSTM` and `GRU`, and
    the batch size of their example, which matters to graphs without explicit state only. `compare` and `load_policy`
    run the graph with other batch sizes.
    """
    for warning in caught:
        text, branch = str(warning.message), issubclass(warning.category, torch.jit.TracerWarning)  # type: ignore[attr-defined]
        if branch and Path(warning.filename) != Path(torch.nn.modules.rnn.__file__):
            raise RuntimeError(text)
        if not branch and not text.startswith(KNOWN_WARNINGS):
            warnings.warn_explicit(warning.message, warning.category, warning.filename, warning.lineno)


def _declare_shapes(path: Path, shapes: Mapping[str, tuple[int, ...]]) -> None:
    """Write the outputs' shapes (without the batch axis) into the graph: torch loses them behind a slice or a split."""
    model = onnx.load(path)
    for output in model.graph.output:
        _, *axes = output.type.tensor_type.shape.dim
        for axis, size in zip(axes, shapes[output.name], strict=True):
            axis.dim_value = size
    onnx.save(model, path)
