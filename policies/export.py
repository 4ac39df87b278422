"""One ONNX from signals to joint targets: interface, network and state in one graph, checked against torch."""

import datetime
import subprocess
import tempfile
import warnings
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from policies.contract import Dynamics, JointTargets, PolicyContract, Range, StateTensor, Training, embed, load_policy
from policies.interface import WalkingInterface
from robots.errors import UserError
from sim.backend import PlantConfig

TOLERANCE = 1e-4
"""Largest difference between the exported graph and torch that is accepted [rad]."""
PREFIX = "state."


class PolicyGraph(nn.Module):
    """observe, network and act in one forward pass, on positional tensors."""

    def __init__(self, interface: WalkingInterface, actor: nn.Module) -> None:
        """Join an interface and the network from observation to action."""
        super().__init__()
        self.interface, self.actor = interface, actor

    def forward(self, *tensors: Tensor) -> tuple[Tensor, ...]:
        """Signals in the interface's order, then states; returns targets (N, J), then the next states."""
        names = [*self.interface.inputs, *self.interface.states]
        given = dict(zip(names, tensors, strict=True))
        state = {k: given[k] for k in self.interface.states}
        obs = self.interface.observe(given, state)
        targets, following = self.interface.act(self.actor(obs), obs, given, state)
        return (targets, *(following[k] for k in self.interface.states))


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
    actor: nn.Module,
    provenance: Provenance,
    path: Path,
    recorded: Mapping[str, np.ndarray],
) -> float:
    """Write the policy file and check it on recorded signals.

    Args:
        interface: Observations and actions of the policy.
        actor: Network from observation (N, num_obs) to action (N, num_actions).
        provenance: What goes into the contract.
        path: The file; an older one stays until the new one is complete.
        recorded: Signals by name, (T, N, ...), T steps of N robots from their start.

    Returns: largest difference between onnxruntime and torch over the recorded signals [rad].
    Raises: UserError when that difference is above TOLERANCE (nothing is written then) or the file cannot be written.
    """
    graph = PolicyGraph(interface, actor).eval()
    with tempfile.TemporaryDirectory() as folder:
        raw = Path(folder) / "graph.onnx"
        _trace(graph, raw)
        trial = Path(folder) / "policy.onnx"
        contract = build_contract(interface, provenance)
        embed(raw, contract, trial)
        difference = compare(graph, trial, recorded)
        if not difference <= TOLERANCE:
            raise UserError(f"{path}: the exported policy differs from torch by {difference:.2e} rad, above {TOLERANCE:.0e}")
        embed(raw, contract, path)
    return difference


def build_contract(interface: WalkingInterface, provenance: Provenance) -> PolicyContract:
    """The contract of a policy with this interface and history."""
    spec, plant = interface.spec, provenance.plant
    delays = [r for r in plant.randomize if r.pattern.endswith(".delay")]
    return PolicyContract(
        robot=spec.name,
        model_hash=spec.model_hash,
        joint_order=spec.joint_names,
        task=provenance.task,
        inputs=interface.signals,
        states=tuple(
            StateTensor(name=k, shape=s.shape, initial=(s.initial,) * int(np.prod(s.shape)))
            for k, s in interface.states.items()
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
    """Largest difference [rad] between torch and the policy file, fed the same signals (T, N, ...) step by step."""
    steps, num = next(iter(recorded.values())).shape[:2]
    policy = load_policy(path, graph.interface.spec)
    policy.reset(num)
    state = [torch.full((num, *s.shape), s.initial) for s in graph.interface.states.values()]
    worst = 0.0
    for t in range(steps):
        signals = {k: recorded[k][t] for k in graph.interface.inputs}
        targets, *state = graph(*(torch.from_numpy(v.copy()) for v in signals.values()), *state)
        worst = max(worst, float(np.abs(policy(signals) - targets.numpy()).max()))
    return worst


def current_commit() -> str:
    """Commit of the working tree this code runs from, with "+changes" if it differs; "unknown" outside git."""
    root = Path(__file__).parent.parent

    def git(*words: str) -> str:
        return subprocess.run(["git", "-C", root, *words], capture_output=True, text=True, check=True).stdout.strip()

    try:
        return git("rev-parse", "HEAD") + ("+changes" if git("status", "--porcelain", "--untracked-files=no") else "")
    except (OSError, subprocess.CalledProcessError):
        return "unknown"


def _trace(graph: PolicyGraph, path: Path) -> None:
    interface = graph.interface
    example: dict[str, Any] = {s.name: torch.zeros(2, *s.shape) for s in interface.signals}
    if "imu_quat" in example:
        example["imu_quat"][:, 0] = 1
    states = {PREFIX + k: torch.full((2, *s.shape), s.initial) for k, s in interface.states.items()}
    inputs = [*example, *states]
    outputs = ["joint_targets", *(f"next_{k}" for k in states)]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch's exporter announces its own deprecations
        torch.onnx.export(
            graph,
            (*example.values(), *states.values()),
            str(path),
            input_names=inputs,
            output_names=outputs,
            dynamic_axes={name: {0: "N"} for name in (*inputs, *outputs)},
            opset_version=18,
            dynamo=False,
        )
