"""The policy file: one ONNX with its contract inside, and the loader that refuses what does not fit the robot.

Runs on a robot's computer: numpy, onnxruntime and `robots` only. The `onnx` package is needed by `embed` alone.

File layout: a serialised ONNX ModelProto whose last two top-level fields are `metadata_props` entries. The last but
one holds the contract as JSON under `tarsus.contract`; the last one holds, under `tarsus.sha256`, the SHA-256 (64 hex
digits) of every byte before that entry. It has a fixed length, so a file cut at any byte lacks it, and no byte can
change unseen. Other tools read such a file as plain ONNX; one that writes it anew breaks the seal: `embed` again.

Graph: axis 0 of every input and output is a dynamic batch axis N. Inputs are the signals of the contract, raw and by
name, and `state.<name>`; outputs are `joint_targets` (N, J) [rad] and `next_state.<name>`.
"""

import datetime
import hashlib
import json
import math
import os
import secrets
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, fields, is_dataclass
from pathlib import Path
from typing import Any, BinaryIO, Literal, NoReturn, Self, get_args, get_origin, get_type_hints

import numpy as np
import onnxruntime
from numpy.typing import ArrayLike, NDArray

import robots
from robots.errors import UnknownNameError, UserError
from robots.signals import Signal, robot_signals
from robots.spec import RobotSpec

SCHEMA_VERSION = 1
CONTRACT_KEY = "tarsus.contract"
CHECKSUM_KEY = "tarsus.sha256"
TARGETS = "joint_targets"

GRAVITY = 9.81
QUATERNION = ("w", "x", "y", "z")
GRAPH_TYPES = {"float32": "tensor(float)", "uint8": "tensor(uint8)"}

Float32Array = NDArray[np.float32]
Tensor = tuple[tuple[int, ...], str]


class ContractError(UserError):
    """A policy file, or a contract, that is refused: which field, what was expected and what was found."""

    def __init__(self, where: str, expected: str, found: str, *, hint: str = "", file: str = "") -> None:
        """Name the field `where`, what was `expected` there and `found` instead, what to do, and in which file."""
        self.where, self.expected, self.found, self.hint, self.file = where, expected, found, hint, file
        sentence = f"{where}: expected {expected}, found {found}" + (f"; {hint}" if hint else "")
        super().__init__(f"{file}: {sentence}" if file else sentence)


class SignalError(UserError):
    """A value given to a policy or made by it that cannot be used: which signal, which element, expected and found."""

    def __init__(self, signal: str, element: str, expected: str, found: str) -> None:
        """Name the `signal`, its `element` ("" for all of it), what was `expected` and what was `found`."""
        self.signal, self.element, self.expected, self.found = signal, element, expected, found
        super().__init__(f"{signal}{f'[{element}]' if element else ''}: expected {expected}, found {found}")


@dataclass(frozen=True, kw_only=True)
class StateTensor:
    """Memory of a recurrent policy: fed back from one step to the next, reset to `initial`."""

    name: str
    """Name without prefix, e.g. phase."""
    shape: tuple[int, ...]
    """Shape without the batch axis."""
    initial: tuple[float, ...]
    """Value after a reset, row-major, as many as `shape` holds."""

    @property
    def input(self) -> str:
        """Name of the graph input, `state.<name>`."""
        return f"state.{self.name}"

    @property
    def output(self) -> str:
        """Name of the graph output, `next_state.<name>`."""
        return f"next_state.{self.name}"


@dataclass(frozen=True, kw_only=True)
class JointTargets:
    """What the policy puts out, for which servo. Every tuple is per joint, in the order of `joints`."""

    name: Literal["joint_targets"] = "joint_targets"
    """Name of the graph output, (N, J)."""
    kind: Literal["position"] = "position"
    """position: target angles [rad] of a servo, effort = stiffness (target - pos) - damping vel."""
    joints: tuple[str, ...]
    """Joints that get a target, in the order of the robot spec, (J,)."""
    stiffness: tuple[float, ...]
    """Position gain kp [N m/rad], at most the spec's."""
    damping: tuple[float, ...]
    """Velocity gain kd [N m s/rad], at most the spec's."""
    effort_limit: tuple[float, ...]
    """Largest torque [N m], at most the spec's."""
    pos_limit: tuple[tuple[float, float], ...]
    """Lower and upper target [rad], within the spec's."""
    held: tuple[str, ...] = ()
    """Those of `joints` whose target never changes."""

    @classmethod
    def of(cls, spec: RobotSpec, joints: Sequence[str] | None = None, held: Sequence[str] = ()) -> Self:
        """Position targets for `joints` (all by default) with the spec's gains and limits. Raises UnknownNameError."""
        chosen = [spec.joint(n) for n in (spec.joint_names if joints is None else joints)]
        spec.index(held)
        return cls(
            joints=tuple(j.name for j in chosen),
            stiffness=tuple(j.stiffness for j in chosen),
            damping=tuple(j.damping for j in chosen),
            effort_limit=tuple(j.effort_limit for j in chosen),
            pos_limit=tuple(j.pos_limit for j in chosen),
            held=tuple(held),
        )


@dataclass(frozen=True, kw_only=True)
class Range:
    """Interval a physical parameter was drawn from."""

    kind: Literal["scale", "uniform"]
    """scale: the nominal value times a draw; uniform: the draw itself, in the parameter's unit."""
    lo: float
    """Lower end."""
    hi: float
    """Upper end."""


@dataclass(frozen=True, kw_only=True)
class Dynamics:
    """Physics the policy was trained on."""

    source: str = "nominal"
    """nominal: the robot's own model; otherwise the SHA-256 of the identified file."""
    randomization: Mapping[str, Range] = field(default_factory=dict)
    """Parameter glob, e.g. `joint.*_knee.damping`, to the interval it was drawn from."""


@dataclass(frozen=True, kw_only=True)
class Training:
    """Where the policy comes from."""

    commit: str
    """Commit of the training code."""
    algorithm: str
    """Learner, e.g. ppo."""
    seed: int
    """Seed of the run."""
    env_steps: int
    """Control steps seen, summed over environments."""
    date: str
    """When the training ended, ISO 8601."""
    details: Mapping[str, object] = field(default_factory=dict)
    """Anything else worth keeping, as JSON values."""


@dataclass(frozen=True, kw_only=True)
class PolicyContract:
    """Everything a robot must know to run a policy, and a person to trust it."""

    schema_version: int = SCHEMA_VERSION
    """Version of this schema; a loader accepts its own only."""
    robot: str
    """Registry name of the robot."""
    model_hash: str
    """`RobotSpec.model_hash` of the robot it was trained for."""
    joint_order: tuple[str, ...]
    """All joints of the robot spec, in order."""
    task: str
    """Task it was trained on."""
    inputs: tuple[Signal, ...]
    """Signals the graph reads, raw and by name; `max_age` is the policy's own."""
    states: tuple[StateTensor, ...] = ()
    """Recurrent state."""
    output: JointTargets
    """What the graph puts out."""
    rate_hz: float
    """Calls per second [Hz]."""
    action_delay: tuple[float, float]
    """Shortest and longest delay from observation to actuation it was trained with [s]."""
    dynamics: Dynamics = field(default_factory=Dynamics)
    """Physics it was trained on."""
    training: Training
    """Where it comes from."""
    evaluation: Mapping[str, object] = field(default_factory=dict)
    """Scores, nested as the evaluation likes, as JSON values."""

    def to_json(self) -> str:
        """The contract as JSON with every float exact. Raises ContractError for what `from_json` would refuse."""
        tree = _plain(self)
        _contract(tree)
        return json.dumps(tree, allow_nan=False, indent=1)

    @classmethod
    def from_json(cls, text: str | bytes) -> "PolicyContract":
        """Read a contract; every key must be there, no other, each of its type. Raises ContractError."""
        try:
            text = text.decode() if isinstance(text, bytes) else text
            return _contract(json.loads(text, object_pairs_hook=_unique_keys))
        except (ValueError, RecursionError) as error:
            found = "nesting too deep to read" if isinstance(error, RecursionError) else _first_line(error)
            raise ContractError("contract", "JSON text in UTF-8", found) from error


def embed(model: bytes | str | Path, contract: PolicyContract, out_path: str | Path) -> str:
    """Write the policy file: the ONNX `model` (a path or the serialised bytes) with `contract` inside.

    An older contract in `model` is replaced, other metadata kept, weights in side files drawn in. The finished file is
    loaded and run once before anything is written, and the old file at `out_path` stays until the new one is complete
    on disk. Needs the `onnx` package.

    Returns: SHA-256 of the file written.
    Raises: ContractError for a contract that is inconsistent or that the graph does not agree with, or no ONNX;
        UserError if the file cannot be written (the old one is still there then).
    """
    text = contract.to_json()
    data = _seal(_bare_model(model), text)
    _start(data, PolicyContract.from_json(text), threads=1)
    _write_atomically(Path(out_path), data)
    return hashlib.sha256(data).hexdigest()


def read_contract(path: str | Path) -> PolicyContract:
    """The contract inside a policy file, after checking the file's checksum; runs nothing. Raises ContractError."""
    with _naming(path):
        return PolicyContract.from_json(_unseal(_read(Path(path))))


def load_policy(
    path: str | Path,
    spec: RobotSpec | None = None,
    threads: int = 1,
    signals: Mapping[str, Signal] | None = None,
) -> "Policy":
    """Load a policy file for a robot, or refuse it.

    Args:
        path: The policy file.
        spec: The robot it is to run on; by default the robot that the contract names.
        threads: Threads inside one operator; one is quickest for the small networks of a control loop.
        signals: Signals the robot offers, by name; by default `robot_signals(spec)`.

    Returns: The policy, warmed up and reset for one robot.
    Raises: ContractError, with one sentence, for a file that is missing, damaged or no policy, and for any
        disagreement between contract, graph and robot; nothing is loaded then.
    """
    if threads < 1:
        raise UserError(f"threads: expected at least 1, found {threads}")
    with _naming(path):
        data = _read(Path(path))
        contract = PolicyContract.from_json(_unseal(data))
        spec = _named_robot(contract.robot) if spec is None else spec
        check_robot(contract, spec, robot_signals(spec) if signals is None else signals)
        return _start(data, contract, threads)


def check_robot(contract: PolicyContract, spec: RobotSpec, signals: Mapping[str, Signal]) -> None:
    """Check a contract against a robot and the `signals` it offers, by name. Raises ContractError.

    The servo gains and limits of a policy may be tighter than the spec's, never beyond them.
    """
    again = f"train or export the policy again for this {spec.name}"
    _same("robot", spec.name, contract.robot, f"take a policy of {spec.name}")
    _same("joint_order", spec.joint_names, contract.joint_order, again)
    _same("model_hash", spec.model_hash, contract.model_hash, again)
    for signal in contract.inputs:
        _check_signal(signal, signals)
    out = contract.output
    for i, joint in enumerate(spec.joint(n) for n in out.joints):
        for name, unit in (("stiffness", "N m/rad"), ("damping", "N m s/rad"), ("effort_limit", "N m")):
            most, value = getattr(joint, name), getattr(out, name)[i]
            _require(value <= most, f"output.{name}[{joint.name}]", f"at most the robot's {most} {unit}", value)
        (lower, upper), (lo, hi) = joint.pos_limit, out.pos_limit[i]
        inside = lower <= lo and hi <= upper
        _require(inside, f"output.pos_limit[{joint.name}]", f"within the robot's {lower} to {upper} rad", (lo, hi))


class Policy:
    """A loaded policy: raw signals in, joint targets out, recurrent state inside.

    Buffers are allocated by `reset` and bound to the graph, so that a control loop allocates little. Not for use from
    several threads at once. Made by `load_policy`.
    """

    def __init__(self, session: onnxruntime.InferenceSession, contract: PolicyContract, sha256: str) -> None:
        """Bind a session whose graph agrees with `contract`; `sha256` is that of the whole file."""
        self._session, self._contract, self._sha256 = session, contract, sha256
        self._buffers: dict[str, NDArray[Any]] = {}
        self._finite: dict[str, NDArray[np.bool_]] = {}
        self._batch = 0
        self.reset()

    @property
    def contract(self) -> PolicyContract:
        """The contract inside the file."""
        return self._contract

    @property
    def sha256(self) -> str:
        """SHA-256 of the policy file, 64 hex digits."""
        return self._sha256

    @property
    def batch(self) -> int:
        """Number of robots N served by one call."""
        return self._batch

    @property
    def state(self) -> dict[str, Float32Array]:
        """Copies of the recurrent state, name to (N, *shape); assign a mapping of all of it to set it.

        Assigning raises SignalError for a state that is missing, unknown, of another shape or not finite, and changes
        nothing then.
        """
        return {s.name: self._buffers[s.input].copy() for s in self._contract.states}

    @state.setter
    def state(self, values: Mapping[str, ArrayLike]) -> None:
        states = {s.name: s for s in self._contract.states}
        for name in values:
            if name not in states:
                raise SignalError(f"state.{name}", "", f"no states but {list(states)}", "this one")
        for s in states.values():
            if s.name not in values:
                raise SignalError(s.input, "", f"a value of shape {(self._batch, *s.shape)}", "none")
        # The outputs' buffers are free between calls: check there, so that a bad value leaves the state as it was.
        for s in states.values():
            self._fill(s.input, s.output, s.shape, (), values[s.name])
        for s in states.values():
            np.copyto(self._buffers[s.input], self._buffers[s.output])

    def reset(self, n: int = 1) -> None:
        """Set the recurrent state of `n` robots to its initial value. Raises UserError for n < 1."""
        if n < 1:
            raise UserError(f"batch: expected at least 1 robot, found {n}")
        if n != self._batch:
            self._allocate(n)
        for s in self._contract.states:
            self._buffers[s.input][:] = np.reshape(s.initial, s.shape)

    def __call__(self, signals: Mapping[str, ArrayLike]) -> Float32Array:
        """One control step: joint targets (N, J) [rad] in the order of `contract.output.joints`, advancing the state.

        Args:
            signals: Name to value, (N, *shape), or (*shape) for a single robot, in the units, frames and order of
                `contract.inputs`. Further signals are ignored, so a driver may pass all it has.

        Raises: SignalError, naming signal and element, for a signal that is missing, of another shape or type, or not
            finite, and for an output that is not finite; the state stays as it was before the call then.
        """
        for s in self._contract.inputs:
            if s.name not in signals:
                raise SignalError(s.name, "", f"a value of shape {(self._batch, *s.shape)} [{s.unit}]", "none")
            self._fill(s.name, s.name, s.shape, s.order, signals[s.name])
        self._session.run_with_iobinding(self._binding)
        self._check_finite(TARGETS, TARGETS, self._contract.output.joints)
        for state in self._contract.states:
            self._check_finite(state.output, state.output, ())
        for state in self._contract.states:
            np.copyto(self._buffers[state.input], self._buffers[state.output])
        targets: Float32Array = self._buffers[TARGETS].copy()
        return targets

    def _allocate(self, n: int) -> None:
        inputs, outputs = _tensors(self._contract)
        self._binding = self._session.io_binding()
        for tensors, bind in ((inputs, self._binding.bind_input), (outputs, self._binding.bind_output)):
            for name, (shape, dtype) in tensors.items():
                buffer = np.zeros((n, *shape), dtype)
                bind(name, "cpu", 0, buffer.dtype.type, buffer.shape, buffer.ctypes.data)
                self._buffers[name], self._finite[name] = buffer, np.empty(buffer.shape, np.bool_)
        self._batch = n

    def _fill(self, label: str, name: str, shape: tuple[int, ...], order: tuple[str, ...], value: ArrayLike) -> None:
        """Copy `value` into the buffer of the tensor `name`; errors call it `label` and its elements by `order`."""
        buffer = self._buffers[name]
        try:
            array = np.asarray(value)
        except ValueError as error:
            raise SignalError(label, "", f"an array of shape {buffer.shape}", "rows of different lengths") from error
        if array.shape != buffer.shape and not (self._batch == 1 and array.shape == shape):
            raise SignalError(label, "", f"shape {buffer.shape}", f"shape {array.shape}")
        if not np.can_cast(array.dtype, buffer.dtype, "same_kind"):
            raise SignalError(label, "", f"elements of type {buffer.dtype}", f"type {array.dtype}")
        # A float64 beyond the range of float32 becomes infinite: reported below, by name, instead of a warning here.
        with np.errstate(over="ignore"):
            np.copyto(buffer, array, casting="same_kind")
        self._check_finite(label, name, order)

    def _check_finite(self, label: str, name: str, order: tuple[str, ...]) -> None:
        buffer, finite = self._buffers[name], self._finite[name]
        if buffer.dtype.kind != "f" or np.isfinite(buffer, out=finite).all():
            return
        row, *rest = (int(i) for i in np.argwhere(~finite)[0])
        last = [order[rest[-1]]] if order else [str(i) for i in rest[-1:]]
        place = [f"row {row}"] if self._batch > 1 else []
        element = ", ".join([*place, *(str(i) for i in rest[:-1]), *last])
        raise SignalError(label, element, "a finite value", str(buffer[(row, *rest)]))


def describe(contract: PolicyContract) -> str:
    """The contract as lines of plain text for a person, every number exact."""
    out, training, dynamics = contract.output, contract.training, contract.dynamics
    lo, hi = contract.action_delay
    head = [
        ("robot", f"{contract.robot} ({len(contract.joint_order)} joints), model {contract.model_hash[:12]}"),
        ("task", contract.task),
        ("rate", f"{contract.rate_hz} Hz, trained with an action delay of {lo} to {hi} s"),
        ("training", f"{training.algorithm}, {training.env_steps} steps, seed {training.seed}, {training.date}"),
        ("commit", training.commit),
        ("dynamics", dynamics.source),
        ("schema", str(contract.schema_version)),
    ]
    ranges = [(glob, r.kind, f"{r.lo} to {r.hi}") for glob, r in dynamics.randomization.items()]
    inputs = [(s.name, str(s.shape), s.unit, s.frame, f"{s.max_age} s") for s in contract.inputs]
    states = [(s.name, str(s.shape)) for s in contract.states]
    joints = [
        (name, str(kp), str(kd), str(effort), str(lower), str(upper), "held" if name in out.held else "")
        for name, kp, kd, effort, (lower, upper) in zip(
            out.joints, out.stiffness, out.damping, out.effort_limit, out.pos_limit, strict=True
        )
    ]
    joint_head = ("joint", "kp [N m/rad]", "kd [N m s/rad]", "effort [N m]", "lower [rad]", "upper [rad]", "")
    sections: list[tuple[str, list[tuple[str, ...]]]] = [
        ("", [*head]),
        ("randomization", [*ranges]),
        ("inputs", [("signal", "shape", "unit", "frame", "max age"), *inputs]),
        ("state", [*states]),
        (f"{out.name} ({out.kind})", [joint_head, *joints]),
        ("evaluation", list(_leaves(contract.evaluation, ""))),
        ("training details", list(_leaves(training.details, ""))),
    ]
    return "\n".join("\n".join([*([title] if title else []), *_columns(rows)]) for title, rows in sections if rows)


# ---- agreement -------------------------------------------------------------------------------------------------------


def _require(ok: bool, where: str, expected: str, found: object, hint: str = "") -> None:
    if not ok:
        raise ContractError(where, expected, _show(found), hint=hint)


def _same(where: str, expected: object, found: object, hint: str = "") -> None:
    """Refuse unless equal; of two sequences of one length, name the first element that differs."""
    if expected == found:
        return
    if isinstance(expected, tuple) and isinstance(found, tuple) and len(expected) == len(found):
        i = next(i for i, (a, b) in enumerate(zip(expected, found, strict=True)) if a != b)
        where, expected, found = f"{where}[{i}]", expected[i], found[i]
    raise ContractError(where, _show(expected), _show(found), hint=hint)


def _named_robot(name: str) -> RobotSpec:
    try:
        return robots.load(name)
    except UnknownNameError as error:
        raise ContractError("robot", f"one of {', '.join(error.known)}", _show(name)) from error


def _check_signal(signal: Signal, offered: Mapping[str, Signal]) -> None:
    if signal.name not in offered:
        raise ContractError("inputs", f"signals among {', '.join(sorted(offered))}", _show(signal.name))
    for name in ("shape", "unit", "frame", "order", "dtype"):
        _same(f"inputs[{signal.name}].{name}", getattr(offered[signal.name], name), getattr(signal, name))


def _check_consistent(contract: PolicyContract) -> None:
    """Refuse a contract that contradicts itself, whatever the robot."""
    _check_names("joint_order", contract.joint_order)
    _require(bool(contract.joint_order), "joint_order", "at least one joint", contract.joint_order)
    _require(_is_sha256(contract.model_hash), "model_hash", "64 lower-case hex digits", contract.model_hash)
    _require(contract.rate_hz > 0.0, "rate_hz", "more than 0 Hz", contract.rate_hz)
    lo, hi = contract.action_delay
    _require(0.0 <= lo <= hi, "action_delay", "0 <= shortest <= longest [s]", contract.action_delay)
    _check_names("inputs", tuple(s.name for s in contract.inputs))
    _require(bool(contract.inputs), "inputs", "at least one signal", contract.inputs)
    for signal in contract.inputs:
        _check_input(signal)
    _check_names("states", tuple(s.name for s in contract.states))
    for state in contract.states:
        _check_state(state)
    _check_output(contract.output, contract.joint_order)
    _check_origin(contract.dynamics, contract.training)


def _check_input(signal: Signal) -> None:
    where = f"inputs[{signal.name}]"
    _require(not signal.name.startswith("state."), where, "a signal name without the prefix 'state.'", signal.name)
    _require(all(n > 0 for n in signal.shape), f"{where}.shape", "lengths above 0", signal.shape)
    _require(signal.dtype in GRAPH_TYPES, f"{where}.dtype", f"one of {', '.join(GRAPH_TYPES)}", signal.dtype)
    _require(signal.max_age > 0.0, f"{where}.max_age", "more than 0 s", signal.max_age)
    if set(signal.order) == set(QUATERNION):
        _require(signal.order == QUATERNION, f"{where}.order", "the quaternion order w, x, y, z", signal.order)
    if signal.order:
        _check_names(f"{where}.order", signal.order)
        last = signal.shape[-1] if signal.shape else 0
        _require(len(signal.order) == last, f"{where}.order", f"{last} elements as in shape", len(signal.order))


def _check_state(state: StateTensor) -> None:
    where = f"states[{state.name}]"
    _require(all(n > 0 for n in state.shape), f"{where}.shape", "lengths above 0", state.shape)
    count = math.prod(state.shape)
    _require(len(state.initial) == count, f"{where}.initial", f"{count} values for {state.shape}", len(state.initial))
    largest = float(np.finfo(np.float32).max)
    for i, value in enumerate(state.initial):
        _require(abs(value) <= largest, f"{where}.initial[{i}]", "a value finite in float32", value)


def _check_output(out: JointTargets, joint_order: tuple[str, ...]) -> None:
    _check_names("output.joints", out.joints)
    _require(bool(out.joints), "output.joints", "at least one joint", out.joints)
    _check_subset("output.joints", out.joints, joint_order, "joint_order")
    _check_subset("output.held", out.held, out.joints, "output.joints")
    _same("output.joints", tuple(n for n in joint_order if n in set(out.joints)), out.joints)
    for name in ("stiffness", "damping", "effort_limit", "pos_limit"):
        values = getattr(out, name)
        _require(len(values) == len(out.joints), f"output.{name}", f"{len(out.joints)} values", len(values))
    for i, joint in enumerate(out.joints):
        _require(out.stiffness[i] > 0.0, f"output.stiffness[{joint}]", "more than 0 N m/rad", out.stiffness[i])
        _require(out.damping[i] >= 0.0, f"output.damping[{joint}]", "at least 0 N m s/rad", out.damping[i])
        _require(out.effort_limit[i] > 0.0, f"output.effort_limit[{joint}]", "more than 0 N m", out.effort_limit[i])
        lower, upper = out.pos_limit[i]
        _require(lower <= upper, f"output.pos_limit[{joint}]", "lower <= upper [rad]", (lower, upper))


def _check_origin(dynamics: Dynamics, training: Training) -> None:
    known = dynamics.source == "nominal" or _is_sha256(dynamics.source)
    _require(known, "dynamics.source", "'nominal' or 64 lower-case hex digits", dynamics.source)
    for glob, r in dynamics.randomization.items():
        _require(r.lo <= r.hi, _key("dynamics.randomization", glob), "lo <= hi", (r.lo, r.hi))
    _require(training.env_steps >= 0, "training.env_steps", "at least 0", training.env_steps)
    try:
        datetime.datetime.fromisoformat(training.date)
    except ValueError as error:
        raise ContractError("training.date", "an ISO 8601 date", _show(training.date)) from error


def _check_names(where: str, names: tuple[str, ...]) -> None:
    for i, name in enumerate(names):
        _require(name.isprintable() and name != "", f"{where}[{i}]", "a printable name", name)
        _require(name not in names[:i], f"{where}[{i}]", "each name once", name)


def _check_subset(where: str, names: tuple[str, ...], known: tuple[str, ...], of: str) -> None:
    for i, name in enumerate(names):
        _require(name in known, f"{where}[{i}]", f"a joint of {of}", name)


def _is_sha256(text: str) -> bool:
    return len(text) == 64 and set(text) <= set("0123456789abcdef")


# ---- graph -----------------------------------------------------------------------------------------------------------


def _start(data: bytes, contract: PolicyContract, threads: int) -> Policy:
    """A session on the file's bytes that agrees with its contract and has run once. Raises ContractError."""
    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads, options.inter_op_num_threads = threads, 1
    options.add_session_config_entry("session.intra_op.allow_spinning", "0")
    # Weights in a side file would be looked for in the working directory: a policy is one file, so offer no folder.
    options.add_session_config_entry("session.model_external_initializers_file_folder_path", os.devnull)
    options.log_severity_level = 4  # failures reach the caller as exceptions; the runtime's own lines only repeat them
    try:
        session = onnxruntime.InferenceSession(data, options, providers=["CPUExecutionProvider"])
    except Exception as error:  # onnxruntime's exceptions share no narrower base class
        raise ContractError("graph", "an ONNX graph that onnxruntime can load", _first_line(error)) from error
    _check_graph(session, contract)
    return _warmed_up(Policy(session, contract, hashlib.sha256(data).hexdigest()))


def _check_graph(session: onnxruntime.InferenceSession, contract: PolicyContract) -> None:
    inputs, outputs = _tensors(contract)
    _check_tensors("graph input", inputs, session.get_inputs())
    _check_tensors("graph output", outputs, session.get_outputs())


def _tensors(contract: PolicyContract) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """Inputs and outputs of the graph by name: shape without the batch axis, and element type."""
    inputs: dict[str, Tensor] = {s.name: (s.shape, s.dtype) for s in contract.inputs}
    inputs |= {s.input: (s.shape, "float32") for s in contract.states}
    outputs: dict[str, Tensor] = {TARGETS: ((len(contract.output.joints),), "float32")}
    outputs |= {s.output: (s.shape, "float32") for s in contract.states}
    return inputs, outputs


def _check_tensors(kind: str, wanted: Mapping[str, Tensor], tensors: Sequence[Any]) -> None:
    for name in sorted(wanted.keys() - {t.name for t in tensors}):
        raise ContractError(f"{kind} {name}", "one of this name, as the contract lists it", "none")
    for t in tensors:
        if t.name not in wanted:
            raise ContractError(f"{kind} {t.name}", f"none but {', '.join(wanted)} of the contract", "this one")
        shape, dtype = wanted[t.name]
        _same(f"{kind} {t.name} type", GRAPH_TYPES[dtype], t.type)
        batch, *rest = t.shape or [0]
        if isinstance(batch, int) or tuple(rest) != shape:
            expected = f"({', '.join(['N', *map(str, shape)])}) with a dynamic batch axis N"
            raise ContractError(f"{kind} {t.name} shape", expected, _show(tuple(t.shape)))


def _warmed_up(policy: Policy) -> Policy:
    """Run one robot, then two, at rest: a graph that fixes its batch, or holds non-finite weights, fails here."""
    for n in (1, 2):
        policy.reset(n)
        rest = {s.name: np.broadcast_to(_at_rest(s), (n, *s.shape)) for s in policy.contract.inputs}
        try:
            policy(rest)
        except SignalError as error:
            element = f"[{error.element}]" if error.element else ""
            where = f"graph output {error.signal}{element} at rest"
            raise ContractError(where, error.expected, error.found) from error
        except Exception as error:  # onnxruntime's exceptions share no narrower base class
            where = f"graph run with a batch of {n}"
            raise ContractError(where, "outputs of the contract's shapes", _first_line(error)) from error
    policy.reset()
    return policy


def _at_rest(signal: Signal) -> NDArray[Any]:
    """A value of the signal's shape that a resting robot could give, so that no observer divides by zero."""
    value = np.zeros(signal.shape, signal.dtype)
    if signal.order == QUATERNION:
        value[..., 0] = 1
    if signal.unit == "m/s^2" and signal.order == ("x", "y", "z"):
        value[..., 2] = GRAVITY
    return value


# ---- file ------------------------------------------------------------------------------------------------------------

_TRAILER_SIZE = len(CHECKSUM_KEY) + 64 + 6


def _seal(model: bytes, text: str) -> bytes:
    """The policy file: model, contract, checksum. Protobuf fields may come in any order, so they are appended."""
    body = model + _metadata_entry(CONTRACT_KEY, text.encode())
    return body + _trailer(body)


def _trailer(body: bytes) -> bytes:
    return _metadata_entry(CHECKSUM_KEY, hashlib.sha256(body).hexdigest().encode())


def _unseal(data: bytes) -> bytes:
    """The contract's JSON inside a policy file. Raises ContractError for anything but a complete, unchanged file."""
    body, trailer = data[:-_TRAILER_SIZE], data[-_TRAILER_SIZE:]
    again = "copy or export the file again"
    if trailer[:-64] != _trailer(b"")[:-64]:
        _explain_unsealed(data)
    if trailer != _trailer(body):
        raise ContractError(CHECKSUM_KEY, f"{_trailer(body)[-64:].decode()} over this file", "another", hint=again)
    found = [value for key, value in _metadata(body) if key == CONTRACT_KEY.encode()]
    if len(found) != 1:
        raise ContractError(CONTRACT_KEY, "one contract inside", f"{len(found)}", hint=again)
    return found[0]


def _explain_unsealed(data: bytes) -> NoReturn:
    keys = [key for key, _ in _metadata(data)]
    if CONTRACT_KEY.encode() not in keys:
        raise ContractError(
            CONTRACT_KEY, "a contract in the ONNX metadata", "none", hint="export the policy with tarsus"
        )
    hint = "the file was cut short, or written anew by another tool: copy or export it again"
    raise ContractError(CHECKSUM_KEY, "the checksum at the end of the file", "another end", hint=hint)


def _metadata_entry(key: str, value: bytes) -> bytes:
    """ModelProto.metadata_props (field 14), a StringStringEntryProto of key (1) and value (2), encoded."""
    entry = _chunk(1, key.encode()) + _chunk(2, value)
    return _chunk(14, entry)


def _chunk(number: int, payload: bytes) -> bytes:
    size, length = len(payload), bytearray()
    while size > 127:
        length.append(size & 127 | 128)
        size >>= 7
    return bytes([number << 3 | 2, *length, size]) + payload


def _metadata(data: bytes) -> Iterator[tuple[bytes, bytes]]:
    """Key and value of every metadata entry of a serialised ModelProto. Raises ContractError if it is none."""
    if not data:
        raise ContractError("file", "an ONNX file", "an empty one")
    for number, payload in _fields(memoryview(data)):
        if number == 14:
            entry = dict(_fields(payload))
            yield bytes(entry.get(1, b"")), bytes(entry.get(2, b""))


def _fields(data: memoryview) -> Iterator[tuple[int, memoryview]]:
    """Number and payload of each field of a protobuf message (empty payload for numbers)."""
    at = 0
    while at < len(data):
        tag, start = _varint(data, at)
        kind = tag & 7
        if kind == 0:
            _, end = _varint(data, start)
        elif kind == 2:
            size, start = _varint(data, start)
            end = start + size
        elif kind in (1, 5):
            end = start + (8 if kind == 1 else 4)
        else:
            raise _no_onnx(at)
        if end > len(data) or tag >> 3 == 0:
            raise _no_onnx(at)
        yield tag >> 3, data[start:end] if kind == 2 else data[:0]
        at = end


def _varint(data: memoryview, at: int) -> tuple[int, int]:
    value = 0
    for i in range(10):
        if at + i >= len(data):
            break
        value |= (data[at + i] & 127) << 7 * i
        if data[at + i] < 128:
            return value, at + i + 1
    raise _no_onnx(at)


def _no_onnx(at: int) -> ContractError:
    hint = "the file was cut short or is no ONNX: copy or export it again"
    return ContractError("file", "a complete ONNX file", f"a field at byte {at} that does not end in it", hint=hint)


def _read(path: Path) -> bytes:
    try:
        if path.exists() and not path.is_file():
            raise ContractError("file", "a policy file", "a folder" if path.is_dir() else "no regular file")
        return path.read_bytes()
    except (OSError, ValueError) as error:  # ValueError: a path that no system can hold
        found = error.strerror if isinstance(error, OSError) and error.strerror else _first_line(error)
        raise ContractError("file", "a policy file that can be read", found) from error


def _bare_model(model: bytes | str | Path) -> bytes:
    """The serialised model without our own metadata, its weights inside. Raises ContractError."""
    import onnx  # late: a robot's computer only reads policy files
    from google.protobuf.message import DecodeError  # type: ignore[import-untyped]

    data = model if isinstance(model, bytes) else _read(Path(model))
    try:
        proto = onnx.load_model_from_string(data)
        if not isinstance(model, bytes):
            onnx.load_external_data_for_model(proto, str(Path(model).parent))
    except (DecodeError, onnx.checker.ValidationError) as error:
        raise ContractError("model", "an ONNX model", _first_line(error)) from error
    for i in reversed(range(len(proto.metadata_props))):
        if proto.metadata_props[i].key in (CONTRACT_KEY, CHECKSUM_KEY):
            del proto.metadata_props[i]
    bare: bytes = proto.SerializeToString(deterministic=True)
    return bare


def _write_atomically(path: Path, data: bytes) -> None:
    temporary = path.with_name(f".{path.name}.{secrets.token_hex(4)}.tmp")
    try:
        with temporary.open("xb") as file:
            _replace_when_complete(file, temporary, path, data)
    except OSError as error:
        found = error.strerror or type(error).__name__
        raise UserError(
            f"{path}: could not write the policy file: {found}; what stood there before still does"
        ) from error


def _replace_when_complete(file: BinaryIO, temporary: Path, path: Path, data: bytes) -> None:
    try:
        file.write(data)
        file.flush()
        os.fsync(file.fileno())
        temporary.replace(path)
    except BaseException:
        temporary.unlink()
        raise


@contextmanager
def _naming(path: str | Path) -> Iterator[None]:
    """Put the file's name in front of what is refused inside."""
    try:
        yield
    except ContractError as error:
        named = ContractError(error.where, error.expected, error.found, hint=error.hint, file=str(path))
        raise named from error


# ---- JSON ------------------------------------------------------------------------------------------------------------


def _contract(tree: object) -> PolicyContract:
    """The contract of a JSON tree. The version comes first: another one may have any other keys."""
    if isinstance(tree, dict) and "schema_version" in tree:
        _same("schema_version", SCHEMA_VERSION, tree["schema_version"], "use the tarsus version that wrote the file")
    contract: PolicyContract = _decode(PolicyContract, tree, "")
    _check_consistent(contract)
    return contract


def _plain(value: object) -> object:
    """Dataclasses to dicts and tuples to lists, as JSON has them."""
    if is_dataclass(value):
        return {f.name: _plain(getattr(value, f.name)) for f in fields(value)}
    if isinstance(value, Mapping):
        return {k: _plain(v) for k, v in value.items()}
    if isinstance(value, tuple | list):
        return [_plain(v) for v in value]
    return value


def _decode(kind: Any, value: object, where: str) -> Any:
    """`value`, a JSON tree, as `kind`: a dataclass, tuple, mapping, literal, scalar or `object` for any JSON value."""
    origin = get_origin(kind)
    if is_dataclass(kind):
        return _decode_record(kind, value, where)
    if origin is tuple:
        return _decode_tuple(get_args(kind), value, where)
    if origin is Mapping:
        return _decode_mapping(get_args(kind)[1], value, where)
    if origin is Literal:
        _require(value in get_args(kind), where, " or ".join(map(repr, get_args(kind))), value)
        return value
    return _decode_free(value, where) if kind is object else _decode_scalar(kind, value, where)


def _decode_record(kind: Any, value: object, where: str) -> Any:
    tree = _decode_mapping(None, value, where)
    hints = get_type_hints(kind)
    for name in hints:
        if name not in tree:
            raise ContractError(_key(where, name), "this key", "none")
    for name in tree:
        if name not in hints:
            raise ContractError(_key(where, name), f"no keys but {', '.join(hints)}", "this one")
    return kind(**{name: _decode(hint, tree[name], _key(where, name)) for name, hint in hints.items()})


def _decode_tuple(kinds: tuple[Any, ...], value: object, where: str) -> tuple[Any, ...]:
    _require(isinstance(value, list), where, "a list", value)
    items: list[object] = value  # type: ignore[assignment]  # checked above
    if kinds[-1] is ...:
        kinds = (kinds[0],) * len(items)
    _require(len(items) == len(kinds), where, f"a list of {len(kinds)}", value)
    return tuple(_decode(k, v, f"{where}[{i}]") for i, (k, v) in enumerate(zip(kinds, items, strict=True)))


def _decode_mapping(kind: Any, value: object, where: str) -> dict[str, Any]:
    """A dict with string keys; its values decoded as `kind`, left alone for None."""
    if not isinstance(value, dict):
        raise ContractError(where or "contract", "an object with keys", _show(value))
    for key in value:
        _decode_scalar(str, key, f"key of {where or 'contract'}")
    return value if kind is None else {k: _decode(kind, v, _key(where, k)) for k, v in value.items()}


def _decode_free(value: object, where: str) -> object:
    if isinstance(value, dict):
        return _decode_mapping(object, value, where)
    if isinstance(value, list):
        return [_decode_free(v, f"{where}[{i}]") for i, v in enumerate(value)]
    if value is None or isinstance(value, bool):
        return value
    for kind in (str, int, float):
        if isinstance(value, kind):
            return _decode_scalar(kind, value, where)
    raise ContractError(where, "a JSON value", f"{type(value).__name__} {_show(value)}")


def _decode_scalar(kind: type, value: object, where: str) -> object:
    names = {str: "a text", int: "a whole number", float: "a finite number"}
    accepted = (int, float) if kind is float else (kind,)
    fits = isinstance(value, accepted) and not isinstance(value, bool)
    _require(fits, where, names[kind], value)
    if isinstance(value, str):
        _require(_is_unicode(value), where, "a text in Unicode", value)
        return value
    if kind is int:
        return value
    try:
        number = float(value)  # type: ignore[arg-type]  # int or float, checked above
    except OverflowError:
        number = math.inf
    _require(math.isfinite(number), where, names[float], value)
    return number


def _is_unicode(text: str) -> bool:
    """False for a lone surrogate, which JSON can spell but no terminal or file can hold."""
    return not any("\ud800" <= c <= "\udfff" for c in text)


def _unique_keys(pairs: list[tuple[str, object]]) -> dict[str, object]:
    tree = dict(pairs)
    if len(tree) < len(pairs):
        names = [k for k, _ in pairs]
        twice = next(k for k in names if names.count(k) > 1)
        raise ContractError("contract", "each key once", f"{_show(twice)} more than once")
    return tree


# ---- text ------------------------------------------------------------------------------------------------------------


def _key(where: str, name: str) -> str:
    shown = name if name.isprintable() else repr(name)
    return f"{where}.{shown}" if where else shown


def _show(value: object) -> str:
    """A value on one line, short enough for a sentence."""
    text = ascii(value)
    return text if len(text) <= 100 else f"{text[:97]}..."


def _first_line(error: Exception) -> str:
    lines = str(error).splitlines() or [type(error).__name__]
    return lines[0][:200]


def _leaves(tree: object, where: str) -> Iterator[tuple[str, str]]:
    """Dotted name and value of each leaf of a JSON tree."""
    if isinstance(tree, Mapping):
        for key, value in tree.items():
            yield from _leaves(value, _key(where, key))
    else:
        yield where, json.dumps(tree, ensure_ascii=False)


def _columns(rows: Sequence[tuple[str, ...]]) -> list[str]:
    """Rows as aligned lines, indented by two."""
    widths = [max(len(row[i]) for row in rows) for i in range(len(rows[0]))]
    return ["  " + "  ".join(c.ljust(w) for c, w in zip(row, widths, strict=True)).rstrip() for row in rows]
