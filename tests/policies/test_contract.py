import contextlib
import hashlib
import json
import math
import os
import pickle
import resource
import stat
import subprocess
import sys
import tracemalloc
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnxruntime
import pytest
from onnx import TensorProto, helper, numpy_helper

import robots
from policies.contract import (
    CHECKSUM_KEY,
    CONTRACT_KEY,
    ContractError,
    Dynamics,
    JointTargets,
    PolicyContract,
    Range,
    SignalError,
    StateTensor,
    Training,
    describe,
    embed,
    load_policy,
    read_contract,
)
from robots.errors import UserError
from robots.signals import Signal, robot_signals, select

ROOT = Path(__file__).parents[2]
H1_2 = robots.load("unitree_h1_2")
JOINTS = H1_2.joint_names
STEP = np.float32(0.125)
PHASE = StateTensor(name="phase", shape=(2,), initial=(0.25, -0.5))
CONTRACT = PolicyContract(
    robot=H1_2.name,
    model_hash=H1_2.model_hash,
    joint_order=JOINTS,
    task="velocity",
    inputs=select(robot_signals(H1_2), ["joint_pos", "imu_gyro", "command"]),
    states=(PHASE,),
    output=JointTargets.of(H1_2, held=H1_2.group("wrists")),
    rate_hz=50.0,
    action_delay=(0.0, 0.02),
    dynamics=Dynamics(randomization={"joint.*.armature": Range(kind="scale", lo=0.1 + 0.2, hi=1.3)}),
    training=Training(commit="0" * 40, algorithm="ppo", seed=1, env_steps=10**7, date="2030-01-02T03:04:05+00:00"),
    evaluation={"easy": {"E_vel": math.pi, "survival": 1.0, "episodes": 200, "seeds": [1, 2], "note": "ä", "x": None}},
)
INPUTS = {s.name: s.shape for s in CONTRACT.inputs} | {PHASE.input: PHASE.shape}


# ---- small policies --------------------------------------------------------------------------------------------------


def weights(hidden: int = 8) -> list[np.ndarray]:
    rng = np.random.default_rng(0)
    width = sum(math.prod(shape) for shape in INPUTS.values())
    shapes = [(width, hidden), (hidden, len(JOINTS))]
    return [rng.standard_normal(shape).astype(np.float32) / np.float32(math.sqrt(shape[0])) for shape in shapes]


def value_info(name: str, *shape: int | str | None, kind: int = TensorProto.FLOAT) -> onnx.ValueInfoProto:
    return helper.make_tensor_value_info(name, kind, shape)


def mlp(hidden: int = 8) -> onnx.ModelProto:
    """tanh(concat(inputs) W0) W1, and a phase that grows by STEP."""
    tensors = {f"w{i}": w for i, w in enumerate(weights(hidden))} | {"step": STEP}
    graph = helper.make_graph(
        [
            helper.make_node("Concat", list(INPUTS), ["x"], axis=1),
            helper.make_node("MatMul", ["x", "w0"], ["h"]),
            helper.make_node("Tanh", ["h"], ["a"]),
            helper.make_node("MatMul", ["a", "w1"], ["joint_targets"]),
            helper.make_node("Add", ["state.phase", "step"], ["next_state.phase"]),
        ],
        "policy",
        [value_info(name, "N", *shape) for name, shape in INPUTS.items()],
        [value_info("joint_targets", "N", len(JOINTS)), value_info("next_state.phase", "N", 2)],
        [numpy_helper.from_array(np.asarray(w), name) for name, w in tensors.items()],
    )
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", 18)], ir_version=10, producer_name="test")


MODEL = mlp().SerializeToString()


def expected_targets(signals: dict[str, np.ndarray], phase: np.ndarray) -> np.ndarray:
    w0, w1 = weights()
    x = np.concatenate([*(signals[s.name] for s in CONTRACT.inputs), phase], axis=1)
    targets: np.ndarray = np.tanh(x @ w0) @ w1
    return targets


def random_signals(n: int, seed: int = 0) -> dict[str, np.ndarray]:
    rng = np.random.default_rng(seed)
    return {s.name: rng.standard_normal((n, *s.shape)).astype(np.float32) for s in CONTRACT.inputs}


def sealed(text: str | bytes, model: bytes = MODEL) -> bytes:
    """A policy file written from the documented layout alone, with onnx and hashlib, around any contract text."""
    raw = text.encode() if isinstance(text, str) else text

    def entry(key: str, value: bytes) -> bytes:
        chunk = bytes([10, len(key)]) + key.encode() + b"\x12" + varint(len(value)) + value
        return b"\x72" + varint(len(chunk)) + chunk

    body = model + entry("tarsus.contract", raw)
    return body + entry("tarsus.sha256", hashlib.sha256(body).hexdigest().encode())


def varint(value: int) -> bytes:
    return (bytes([value % 128 + 128]) + varint(value // 128)) if value > 127 else bytes([value])


@pytest.fixture
def path(tmp_path: Path) -> Path:
    file = tmp_path / "policy.onnx"
    embed(MODEL, CONTRACT, file)
    return file


def refusal(path: Path, *args: Any, **kwargs: Any) -> str:
    """The one sentence that `load_policy` refuses with."""
    with pytest.raises(ContractError) as caught:
        load_policy(path, *args, **kwargs)
    sentence = str(caught.value)
    assert sentence.startswith(f"{path}: ")
    assert "expected" in sentence
    assert "found" in sentence
    assert len(sentence.splitlines()) == 1
    return sentence.removeprefix(f"{path}: ")


def tree() -> dict[str, Any]:
    parsed: dict[str, Any] = json.loads(CONTRACT.to_json())
    return parsed


Edit = Callable[[dict[str, Any]], None]
Step = str | int


def inside(node: Any, where: tuple[Step, ...]) -> Any:
    """What is at a place of a JSON tree."""
    for step in where:
        node = node[step]
    return node


def put(*where: Any) -> Edit:
    """An edit of a JSON tree: keys down to a place, then the value to put there."""
    *steps, last, value = where

    def edit(node: Any) -> None:
        inside(node, tuple(steps))[last] = value

    return edit


def places(node: Any, where: tuple[Step, ...] = ()) -> Iterator[tuple[tuple[Step, ...], Any]]:
    """Every place of a JSON tree with what is there."""
    if where:
        yield where, node
    items = node.items() if isinstance(node, dict) else enumerate(node) if isinstance(node, list) else ()
    for key, child in items:
        yield from places(child, (*where, key))


def spelled(where: tuple[Step, ...]) -> str:
    return "".join(f"[{s}]" if isinstance(s, int) else f".{s}" for s in where).removeprefix(".")


# ---- the contract as JSON --------------------------------------------------------------------------------------------


def test_contract_survives_json_exactly() -> None:
    again = PolicyContract.from_json(CONTRACT.to_json())
    assert again == CONTRACT
    assert again.to_json() == CONTRACT.to_json()
    assert PolicyContract.from_json(CONTRACT.to_json().encode()) == CONTRACT


@pytest.mark.parametrize("value", [0.1 + 0.2, math.pi, np.float64(np.pi), 5e-324, 1.7976931348623157e308, 1 / 3])
def test_floats_keep_every_bit(value: float) -> None:
    contract = replace(CONTRACT, rate_hz=value, evaluation={"score": value})
    again = PolicyContract.from_json(contract.to_json())
    assert np.float64(again.rate_hz).tobytes() == np.float64(value).tobytes()
    assert np.float64(again.evaluation["score"]).tobytes() == np.float64(value).tobytes()  # type: ignore[arg-type]


def test_whole_numbers_are_accepted_where_floats_are_due() -> None:
    edited = tree() | {"rate_hz": 50}
    assert PolicyContract.from_json(json.dumps(edited)) == CONTRACT


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("where", [w for w, v in places(tree()) if isinstance(v, float)][:40:3], ids=spelled)
def test_non_finite_numbers_are_refused_on_reading(where: tuple[Step, ...], bad: float) -> None:
    edited = tree()
    put(*where, bad)(edited)
    with pytest.raises(ContractError, match="finite") as caught:
        PolicyContract.from_json(json.dumps(edited))
    assert caught.value.where == spelled(where)


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize(
    ("change", "where"),
    [
        (lambda v: {"rate_hz": v}, "rate_hz"),
        (lambda v: {"action_delay": (0.0, v)}, "action_delay[1]"),
        (lambda v: {"states": (replace(PHASE, initial=(0.0, v)),)}, "states[0].initial[1]"),
        (lambda v: {"output": replace(CONTRACT.output, stiffness=(v,) * 27)}, "output.stiffness[0]"),
        (lambda v: {"output": replace(CONTRACT.output, pos_limit=((-1.0, v),) * 27)}, "output.pos_limit[0][1]"),
        (lambda v: {"inputs": (replace(CONTRACT.inputs[0], max_age=v),)}, "inputs[0].max_age"),
        (lambda v: {"dynamics": Dynamics(randomization={"g": Range(kind="scale", lo=v, hi=2.0)})}, ".g.lo"),
        (lambda v: {"evaluation": {"easy": {"E_vel": [1.0, v]}}}, "evaluation.easy.E_vel[1]"),
        (lambda v: {"training": replace(CONTRACT.training, details={"loss": v})}, "training.details.loss"),
    ],
)
def test_non_finite_numbers_are_refused_on_writing(change: Callable[[float], Any], where: str, bad: float) -> None:
    with pytest.raises(ContractError, match="a finite number") as caught:
        replace(CONTRACT, **change(bad)).to_json()
    assert caught.value.where.endswith(where)


@pytest.mark.parametrize(
    ("change", "where"),
    [
        ({"rate_hz": np.float32(50)}, "rate_hz"),
        ({"rate_hz": True}, "rate_hz"),
        ({"joint_order": "abc"}, "joint_order"),
        ({"evaluation": {"a": np.zeros(3)}}, "evaluation.a"),
        ({"evaluation": {"a": np.int64(3)}}, "evaluation.a"),
        ({"evaluation": {"a": {1: 2.0}}}, "key of evaluation.a"),
        ({"task": "\ud800"}, "task"),
    ],
)
def test_what_json_cannot_hold_is_refused_on_writing(change: dict[str, Any], where: str) -> None:
    with pytest.raises(ContractError) as caught:
        replace(CONTRACT, **change).to_json()
    assert caught.value.where == where


def test_every_missing_key_is_named() -> None:
    free = ("evaluation", "details", "randomization")
    keys = [w for w, _ in places(tree()) if isinstance(w[-1], str) and not set(w[:-1]) & set(free)]
    assert len(keys) > 50
    for where in keys:
        edited = tree()
        del inside(edited, where[:-1])[where[-1]]
        with pytest.raises(ContractError) as caught:
            PolicyContract.from_json(json.dumps(edited))
        assert (caught.value.where, caught.value.expected, caught.value.found) == (spelled(where), "this key", "none")


RECORDS = [(), ("inputs", 1), ("states", 0), ("output",), ("dynamics",), ("training",)]


@pytest.mark.parametrize("where", [*RECORDS, ("dynamics", "randomization", "joint.*.armature")], ids=spelled)
def test_every_extra_key_is_named(where: tuple[Step, ...]) -> None:
    edited = tree()
    put(*where, "surplus", 1)(edited)
    with pytest.raises(ContractError, match="no keys but") as caught:
        PolicyContract.from_json(json.dumps(edited))
    assert caught.value.where == spelled((*where, "surplus"))


@pytest.mark.parametrize("wrong", [None, True, "?", 3.5, [], {}], ids=repr)
def test_every_wrong_type_is_refused_naming_its_place(wrong: object) -> None:
    typed = [(w, v) for w, v in places(tree()) if w[0] != "evaluation" and type(v) is not type(wrong)]
    assert len(typed) > 100
    for where, _ in typed:
        edited = tree()
        put(*where, wrong)(edited)
        with pytest.raises(ContractError) as caught:
            PolicyContract.from_json(json.dumps(edited))
        assert caught.value.where == spelled(where)


@pytest.mark.parametrize(
    "text",
    [
        "",
        "{",
        "[]",
        "null",
        "1",
        '"a"',
        "[" * 100_000,
        "{}{}",
        "\x00",
        '{"a": 1e999}',
        "9" * 10_000,
        b"\xff\xfe",
        b"\x80",
    ],
)
def test_other_text_is_no_contract(text: str | bytes) -> None:
    with pytest.raises(ContractError):
        PolicyContract.from_json(text)


def test_a_key_given_twice_is_refused() -> None:
    text = CONTRACT.to_json().replace('"task":', '"rate_hz": 500.0, "task":')
    with pytest.raises(ContractError, match="'rate_hz' more than once"):
        PolicyContract.from_json(text)


# ---- the file --------------------------------------------------------------------------------------------------------


def test_file_is_the_documented_layout(path: Path) -> None:
    assert path.read_bytes() == sealed(CONTRACT.to_json())


def test_file_is_a_plain_onnx_for_other_tools(path: Path) -> None:
    proto = onnx.load(path)
    onnx.checker.check_model(proto)
    assert [p.key for p in proto.metadata_props] == [CONTRACT_KEY, CHECKSUM_KEY]
    assert PolicyContract.from_json(proto.metadata_props[0].value) == CONTRACT
    session = onnxruntime.InferenceSession(path, providers=["CPUExecutionProvider"])
    assert session.get_modelmeta().custom_metadata_map[CONTRACT_KEY] == CONTRACT.to_json()
    del proto.metadata_props[:]
    assert proto.SerializeToString() == MODEL


def test_read_contract_returns_what_was_embedded(path: Path) -> None:
    assert read_contract(path) == CONTRACT
    assert read_contract(str(path)) == load_policy(path).contract


def test_sha256_is_that_of_the_file(tmp_path: Path) -> None:
    file = tmp_path / "policy.onnx"
    returned = embed(MODEL, CONTRACT, file)
    assert returned == load_policy(file).sha256 == hashlib.sha256(file.read_bytes()).hexdigest()


def test_a_file_cut_at_any_byte_is_refused(path: Path) -> None:
    size = path.stat().st_size
    parses = 0
    for cut in reversed(range(size)):
        os.truncate(path, cut)
        if cut % 50 == 0 or cut > size - 200:
            refusal(path)
        with pytest.raises(ContractError) as caught:
            read_contract(path)
        assert caught.value.where in ("file", CONTRACT_KEY, CHECKSUM_KEY)
        parses += _parses_as_onnx(path.read_bytes())
    assert parses >= 6  # cuts at field boundaries, which no ONNX reader notices


def _parses_as_onnx(data: bytes) -> bool:
    try:
        return onnx.load_model_from_string(data) is not None
    except Exception:  # the answer, whatever protobuf raises
        return False


def test_a_changed_byte_is_noticed_anywhere(path: Path) -> None:
    good = path.read_bytes()
    rng = np.random.default_rng(0)
    seal = range(len(good) - 100, len(good))
    for at in [*seal, *rng.integers(len(MODEL), len(good), 1000), *rng.integers(0, len(MODEL), 300)]:
        bad = bytearray(good)
        bad[at] ^= 1 << int(rng.integers(8))
        path.write_bytes(bad)
        with pytest.raises(ContractError):
            read_contract(path)


def test_damage_under_a_fitting_checksum_is_a_contract_or_a_refusal(path: Path) -> None:
    good = CONTRACT.to_json().encode()
    rng = np.random.default_rng(1)
    outcomes = {"refused": 0, "read": 0}
    for _ in range(1000):
        bad = bytearray(good)
        bad[int(rng.integers(len(bad)))] ^= 1 << int(rng.integers(8))
        path.write_bytes(sealed(bytes(bad)))
        try:
            assert isinstance(read_contract(path), PolicyContract)
            outcomes["read"] += 1
        except ContractError:
            outcomes["refused"] += 1
    assert min(outcomes.values()) > 0


def test_bytes_behind_the_end_are_refused(path: Path) -> None:
    path.write_bytes(path.read_bytes() + b"\n")
    assert refusal(path).startswith("file: expected a complete ONNX file")
    path.write_bytes(path.read_bytes()[:-1] + b"\x08\x01")
    assert "checksum at the end" in refusal(path)


def test_two_contracts_are_refused(path: Path) -> None:
    path.write_bytes(sealed(CONTRACT.to_json(), sealed(CONTRACT.to_json())))
    assert refusal(path).startswith("tarsus.contract: expected one contract inside, found 2")


@pytest.mark.parametrize(
    ("content", "sentence"),
    [
        (b"", "file: expected an ONNX file, found an empty one"),
        (b"hello, robot\n", "file: expected a complete ONNX file"),
        (pickle.dumps({"weights": 1}), "file: expected a complete ONNX file"),
        (b"PK\x03\x04" + bytes(100), "file: expected a complete ONNX file"),
        (b"\x72\xff\xff\xff\xff\xff\xff\xff\xff\xff\xff\xff", "file: expected a complete ONNX file"),
        (b"\x72\x02\x0a\x7f", "file: expected a complete ONNX file"),
        (MODEL, "tarsus.contract: expected a contract in the ONNX metadata, found none"),
        (sealed("{}")[: len(MODEL) + 23], "tarsus.sha256: expected the checksum at the end of the file"),
        (sealed("{}", b""), "schema_version: expected this key, found none"),
        (sealed("not JSON"), "contract: expected JSON text in UTF-8"),
        (sealed(b"\xff"), "contract: expected JSON text in UTF-8"),
        (sealed(CONTRACT.to_json(), b""), "graph: expected an ONNX graph that onnxruntime can load"),
        (sealed(CONTRACT.to_json(), MODEL[:100]), "file: expected a complete ONNX file"),
    ],
)
def test_other_files_are_refused(path: Path, content: bytes, sentence: str) -> None:
    path.write_bytes(content)
    assert refusal(path).startswith(sentence)


def test_paths_that_are_no_file_are_refused(tmp_path: Path) -> None:
    fifo = tmp_path / "fifo"
    os.mkfifo(fifo)
    assert "No such file" in refusal(tmp_path / "missing.onnx")
    assert "found a folder" in refusal(tmp_path)
    assert "found no regular file" in refusal(fifo)
    assert "Not a directory" in refusal(fifo / "policy.onnx")
    assert "null" in refusal(Path("a\0b"))


def test_a_file_without_permission_is_refused(path: Path) -> None:
    path.chmod(0)
    with _ordinary_user():
        assert "Permission denied" in refusal(path)


@contextlib.contextmanager
def _ordinary_user() -> Iterator[None]:
    """Permissions do not bind root, so step down to nobody where the tests run as root."""
    user = os.geteuid()
    if user == 0:
        os.seteuid(65534)
    try:
        yield
    finally:
        os.seteuid(user)


# ---- contract against robot ------------------------------------------------------------------------------------------

JOINT_POS, GYRO = 0, 1
KNEE = JOINTS.index("left_knee_joint")
KP, KD, EFFORT = (getattr(H1_2.joints[KNEE], name) for name in ("stiffness", "damping", "effort_limit"))
LOWER, UPPER = H1_2.joints[KNEE].pos_limit
KNOWN = ", ".join(robots.names())


def swap(*where: Step) -> Edit:
    """Exchange the first two items of a list."""

    def edit(node: Any) -> None:
        items = inside(node, where)
        items[0], items[1] = items[1], items[0]

    return edit


def both(*edits: Edit) -> Edit:
    def edit(node: dict[str, Any]) -> None:
        for e in edits:
            e(node)

    return edit


QUAT = json.loads(json.dumps(vars(robot_signals(H1_2)["imu_quat"])))

REFUSED: dict[str, tuple[Edit, str]] = {
    "other schema version": (put("schema_version", 2), "schema_version: expected 1, found 2"),
    "schema version as text": (put("schema_version", "1"), "schema_version: expected 1, found '1'"),
    "schema version as float": (put("schema_version", 1.0), "schema_version: expected a whole number, found 1.0"),
    "other version with other keys": (
        both(put("schema_version", 7), put("surplus", 0)),
        "schema_version: expected 1, found 7",
    ),
    "unknown robot": (put("robot", "unitree_h2"), f"robot: expected one of {KNOWN}, found 'unitree_h2'"),
    "robot as path": (put("robot", "../secret"), f"robot: expected one of {KNOWN}, found '../secret'"),
    "permuted joints": (swap("joint_order"), "output.joints[0]: expected 'left_hip_pitch_joint'"),
    "joints permuted everywhere": (
        both(swap("joint_order"), swap("output", "joints")),
        "joint_order[0]: expected 'left_hip_yaw_joint', found 'left_hip_pitch_joint'",
    ),
    "renamed joint": (
        both(put("joint_order", 12, "waist"), put("output", "joints", 12, "waist"), put("output", "held", [])),
        "joint_order[12]: expected 'torso_joint', found 'waist'",
    ),
    "joint twice": (put("joint_order", 1, JOINTS[0]), "joint_order[1]: expected each name once"),
    "no joints": (put("joint_order", []), "joint_order: expected at least one joint"),
    "changed model": (put("model_hash", "0" * 64), f"model_hash: expected '{H1_2.model_hash}', found '0000"),
    "no hash": (put("model_hash", "abc"), "model_hash: expected 64 lower-case hex digits, found 'abc'"),
    "unknown signal": (put("inputs", GYRO, "name", "lidar"), "inputs: expected signals among command"),
    "signal twice": (put("inputs", GYRO, "name", "joint_pos"), "inputs[1]: expected each name once"),
    "no signals": (put("inputs", []), "inputs: expected at least one signal"),
    "signal with a state's name": (
        put("inputs", GYRO, "name", "state.x"),
        "inputs[state.x]: expected a signal name without the prefix 'state.'",
    ),
    "signal without a name": (put("inputs", GYRO, "name", ""), "inputs[1]: expected a printable name"),
    "wrong shape": (
        both(put("inputs", JOINT_POS, "shape", [26]), put("inputs", JOINT_POS, "order", list(JOINTS[:26]))),
        "inputs[joint_pos].shape[0]: expected 27, found 26",
    ),
    "wrong rank": (
        put("inputs", GYRO, "shape", [1, 3]),
        "inputs[imu_gyro].shape: expected (3,), found (1, 3)",
    ),
    "empty shape": (put("inputs", GYRO, "shape", [0]), "inputs[imu_gyro].shape: expected lengths above 0"),
    "shape unlike order": (
        put("inputs", GYRO, "order", ["x", "y"]),
        "inputs[imu_gyro].order: expected 3 elements as in shape, found 2",
    ),
    "signal permuted": (
        swap("inputs", JOINT_POS, "order"),
        "inputs[joint_pos].order[0]: expected 'left_hip_yaw_joint', found 'left_hip_pitch_joint'",
    ),
    "axes permuted": (swap("inputs", GYRO, "order"), "inputs[imu_gyro].order[0]: expected 'x', found 'y'"),
    "other unit": (put("inputs", GYRO, "unit", "deg/s"), "inputs[imu_gyro].unit: expected 'rad/s', found 'deg/s'"),
    "other frame": (put("inputs", GYRO, "frame", "base"), "inputs[imu_gyro].frame: expected 'imu', found 'base'"),
    "other dtype": (put("inputs", GYRO, "dtype", "uint8"), "inputs[imu_gyro].dtype: expected 'float32', found 'uint8'"),
    "no dtype": (
        put("inputs", GYRO, "dtype", "O"),
        "inputs[imu_gyro].dtype: expected one of float32, uint8, found 'O'",
    ),
    "no age": (put("inputs", GYRO, "max_age", 0.0), "inputs[imu_gyro].max_age: expected more than 0 s"),
    "quaternion scalar last": (
        put("inputs", GYRO, QUAT | {"order": ["x", "y", "z", "w"]}),
        "inputs[imu_quat].order: expected the quaternion order w, x, y, z, found ('x', 'y', 'z', 'w')",
    ),
    "state twice": (
        put("states", [json.loads(json.dumps(vars(PHASE)))] * 2),
        "states[1]: expected each name once, found 'phase'",
    ),
    "state too short": (put("states", 0, "initial", [0.0]), "states[phase].initial: expected 2 values"),
    "state not finite": (put("states", 0, "initial", [0.0, math.nan]), "states[0].initial[1]: expected a finite"),
    "state too large": (
        put("states", 0, "initial", [0.0, 1e39]),
        "states[phase].initial[1]: expected a value finite in",
    ),
    "state of no length": (put("states", 0, "shape", [0]), "states[phase].shape: expected lengths above 0"),
    "other output": (put("output", "name", "torques"), "output.name: expected 'joint_targets', found 'torques'"),
    "other kind": (put("output", "kind", "effort"), "output.kind: expected 'position', found 'effort'"),
    "target of unknown joint": (
        put("output", "joints", 0, "tail"),
        "output.joints[0]: expected a joint of joint_order",
    ),
    "targets permuted": (swap("output", "joints"), "output.joints[0]: expected 'left_hip_yaw_joint'"),
    "no targets": (put("output", "joints", []), "output.joints: expected at least one joint"),
    "unknown joint held": (put("output", "held", ["tail"]), "output.held[0]: expected a joint of output.joints"),
    "a gain too few": (
        put("output", "stiffness", [1.0]),
        "output.stiffness: expected 27 values, found 1",
    ),
    "stiffer than the robot": (
        put("output", "stiffness", KNEE, np.nextafter(KP, 2 * KP).item()),
        f"output.stiffness[left_knee_joint]: expected at most the robot's {KP} N m/rad",
    ),
    "negative stiffness": (
        put("output", "stiffness", KNEE, -1.0),
        "output.stiffness[left_knee_joint]: expected more than 0",
    ),
    "damped more": (
        put("output", "damping", KNEE, 2 * KD),
        "output.damping[left_knee_joint]: expected at most the robot's",
    ),
    "negative damping": (put("output", "damping", KNEE, -0.1), "output.damping[left_knee_joint]: expected at least 0"),
    "stronger": (
        put("output", "effort_limit", KNEE, EFFORT + 1.0),
        "output.effort_limit[left_knee_joint]: expected at most",
    ),
    "without strength": (
        put("output", "effort_limit", KNEE, 0.0),
        "output.effort_limit[left_knee_joint]: expected more",
    ),
    "reaching lower": (
        put("output", "pos_limit", KNEE, [LOWER - 0.5, UPPER]),
        f"output.pos_limit[left_knee_joint]: expected within the robot's {LOWER} to {UPPER} rad, found ({LOWER - 0.5},",
    ),
    "reaching higher": (
        put("output", "pos_limit", KNEE, [LOWER, UPPER + 0.5]),
        "output.pos_limit[left_knee_joint]: expected within",
    ),
    "limits crossed": (
        put("output", "pos_limit", KNEE, [1.0, 0.0]),
        "output.pos_limit[left_knee_joint]: expected lower",
    ),
    "limit of three": (
        put("output", "pos_limit", KNEE, [0.0, 1.0, 2.0]),
        f"output.pos_limit[{KNEE}]: expected a list of 2",
    ),
    "no rate": (put("rate_hz", 0.0), "rate_hz: expected more than 0 Hz, found 0.0"),
    "negative delay": (put("action_delay", [-0.01, 0.0]), "action_delay: expected 0 <= shortest <= longest"),
    "delay crossed": (put("action_delay", [0.02, 0.01]), "action_delay: expected 0 <= shortest <= longest"),
    "unknown dynamics": (put("dynamics", "source", "guess"), "dynamics.source: expected 'nominal' or 64"),
    "range crossed": (
        put("dynamics", "randomization", "joint.*.armature", "lo", 3.0),
        "dynamics.randomization.joint.*.armature: expected lo <= hi",
    ),
    "other distribution": (
        put("dynamics", "randomization", "joint.*.armature", "kind", "normal"),
        "dynamics.randomization.joint.*.armature.kind: expected 'scale' or 'uniform', found 'normal'",
    ),
    "no date": (put("training", "date", "yesterday"), "training.date: expected an ISO 8601 date, found 'yesterday'"),
    "negative steps": (put("training", "env_steps", -1), "training.env_steps: expected at least 0"),
    "endless number": (put("rate_hz", 10**400), "rate_hz: expected a finite number"),
    "missing key": (lambda t: t.pop("task"), "task: expected this key, found none"),
    "extra key": (put("pickle", "gASV"), "pickle: expected no keys but schema_version"),
    "wrong type": (put("output", "joints", 3, 4), "output.joints[3]: expected a text, found 4"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_contract_that_does_not_fit_is_refused(path: Path, case: str) -> None:
    edit, sentence = REFUSED[case]
    edited = tree()
    edit(edited)
    path.write_bytes(sealed(json.dumps(edited)))
    assert refusal(path).startswith(sentence)


def test_unedited_contract_is_not_refused(path: Path) -> None:
    path.write_bytes(sealed(json.dumps(tree())))
    assert load_policy(path).contract == CONTRACT


def test_another_robot_is_refused(path: Path) -> None:
    sentence = "robot: expected 'unitree_g1', found 'unitree_h1_2'; take a policy of unitree_g1"
    assert refusal(path, replace(H1_2, name="unitree_g1")) == sentence


def test_robot_with_permuted_joints_is_refused(path: Path) -> None:
    swapped = (H1_2.joints[1], H1_2.joints[0], *H1_2.joints[2:])
    assert refusal(path, replace(H1_2, joints=swapped)).startswith("joint_order[0]: expected 'left_hip_pitch_joint'")


def test_robot_with_fewer_joints_is_refused(path: Path) -> None:
    assert refusal(path, replace(H1_2, joints=H1_2.joints[:-1])).startswith("joint_order: expected ('left_hip_yaw")


def test_robot_with_changed_model_file_is_refused(path: Path, tmp_path: Path) -> None:
    heavier = tmp_path / "robot.xml"
    heavier.write_bytes(H1_2.mjcf.read_bytes() + b"<!-- -->")
    assert refusal(path, replace(H1_2, mjcf=heavier)).startswith("model_hash: expected")


def test_robot_with_changed_gain_is_refused(path: Path) -> None:
    softer = (replace(H1_2.joints[0], stiffness=1.0), *H1_2.joints[1:])
    assert refusal(path, replace(H1_2, joints=softer)).startswith("model_hash: expected")


def test_robot_that_lacks_a_signal_is_refused(path: Path) -> None:
    offered = robot_signals(H1_2)
    del offered["imu_gyro"]
    assert refusal(path, signals=offered).startswith("inputs: expected signals among command, imu_accel")


def test_robot_that_offers_more_signals_is_accepted(path: Path) -> None:
    wrench = Signal(name="wrench", shape=(6,), unit="N, N m", frame="sensor", order=tuple("abcdef"))
    assert load_policy(path, H1_2, signals=robot_signals(H1_2) | {"wrench": wrench}).contract == CONTRACT


def test_tighter_limits_and_softer_gains_are_accepted(path: Path) -> None:
    out = CONTRACT.output
    softer = replace(out, stiffness=tuple(k / 2 for k in out.stiffness), pos_limit=((0.0, 0.0),) * 27)
    embed(MODEL, replace(CONTRACT, output=softer), path)
    assert load_policy(path).contract.output == softer


def test_targets_may_cover_some_joints(tmp_path: Path) -> None:
    legs = H1_2.group("legs")
    proto = mlp()
    proto.graph.node.append(helper.make_node("Slice", ["joint_targets", "from", "to", "axis"], ["legs"]))
    for name, value in {"from": 0, "to": len(legs), "axis": 1}.items():
        proto.graph.initializer.append(numpy_helper.from_array(np.array([value]), name))
    for node in proto.graph.node:
        for names in (node.input, node.output):
            names[:] = [{"joint_targets": "all", "legs": "joint_targets"}.get(n, n) for n in names]
    proto.graph.output[0].CopyFrom(value_info("joint_targets", "N", len(legs)))
    contract = replace(CONTRACT, output=JointTargets.of(H1_2, legs))
    embed(proto.SerializeToString(), contract, tmp_path / "legs.onnx")
    signals = random_signals(1)
    full = expected_targets(signals, np.array([PHASE.initial], np.float32))
    np.testing.assert_allclose(load_policy(tmp_path / "legs.onnx")(signals), full[:, : len(legs)], atol=1e-6)


# ---- contract against graph ------------------------------------------------------------------------------------------


def _set_shape(which: str, i: int, *shape: int | str | None) -> Callable[[onnx.ModelProto], None]:
    def edit(proto: onnx.ModelProto) -> None:
        info = getattr(proto.graph, which)[i]
        info.CopyFrom(value_info(info.name, *shape))

    return edit


def _rename(old: str, new: str) -> Callable[[onnx.ModelProto], None]:
    def edit(proto: onnx.ModelProto) -> None:
        for node in proto.graph.node:
            node.input[:] = [new if n == old else n for n in node.input]
            node.output[:] = [new if n == old else n for n in node.output]
        for info in [*proto.graph.input, *proto.graph.output]:
            info.name = new if info.name == old else info.name

    return edit


def _extra_input(proto: onnx.ModelProto) -> None:
    proto.graph.input.append(value_info("odometry", "N", 3))


def _extra_output(proto: onnx.ModelProto) -> None:
    proto.graph.node.append(helper.make_node("Identity", ["h"], ["value"]))
    proto.graph.output.append(value_info("value", "N", 8))


def _no_state_output(proto: onnx.ModelProto) -> None:
    del proto.graph.output[1]


def _double_input(proto: onnx.ModelProto) -> None:
    proto.graph.input[1].type.tensor_type.elem_type = TensorProto.DOUBLE
    proto.graph.node.insert(0, helper.make_node("Cast", ["imu_gyro"], ["single"], to=TensorProto.FLOAT))
    proto.graph.node[1].input[1] = "single"


def _fixed_inside(proto: onnx.ModelProto) -> None:
    """Declares a dynamic batch, but gives one row for any, in a way that shape inference can't see."""
    for name, value in {"zero": np.float32(0), "from": np.array([0]), "one": np.array([1])}.items():
        proto.graph.initializer.append(numpy_helper.from_array(np.asarray(value), name))
    proto.graph.node[3].output[0] = "y"
    proto.graph.node.extend(
        [
            helper.make_node("Mul", ["command", "zero"], ["nothing"]),
            helper.make_node("ReduceMax", ["nothing"], ["none"], keepdims=0),
            helper.make_node("Cast", ["none"], ["whole"], to=TensorProto.INT64),
            helper.make_node("Add", ["whole", "one"], ["to"]),
            helper.make_node("Slice", ["y", "from", "to"], ["joint_targets"]),
        ]
    )


def _nan_weight(proto: onnx.ModelProto) -> None:
    bad = weights()[1]
    bad[0, KNEE] = np.nan
    proto.graph.initializer[1].CopyFrom(numpy_helper.from_array(bad, "w1"))


def _nan_state(proto: onnx.ModelProto) -> None:
    proto.graph.initializer[2].CopyFrom(numpy_helper.from_array(np.array([0, np.inf], np.float32), "step"))


def _unknown_operator(proto: onnx.ModelProto) -> None:
    proto.graph.node[2].op_type = "Tanhh"


GRAPHS: dict[str, tuple[Callable[[onnx.ModelProto], None], str]] = {
    "input not in the contract": (_extra_input, "graph input odometry: expected none but joint_pos, imu_gyro"),
    "input missing": (_rename("imu_gyro", "gyro"), "graph input imu_gyro: expected one of this name, as the contract"),
    "state input missing": (_rename("state.phase", "phase"), "graph input state.phase: expected one of this name"),
    "output not in the contract": (
        _extra_output,
        "graph output value: expected none but joint_targets, next_state.phase",
    ),
    "output missing": (_rename("joint_targets", "actions"), "graph output joint_targets: expected one of this name"),
    "state output missing": (_no_state_output, "graph output next_state.phase: expected one of this name"),
    "input of fixed batch": (_set_shape("input", 0, 1, 27), "graph input joint_pos shape: expected (N, 27)"),
    "input of free length": (
        _set_shape("input", 1, "N", "K"),
        "graph input imu_gyro shape: expected (N, 3) with a dynamic batch axis N, found ('N', 'K')",
    ),
    "input of unknown length": (_set_shape("input", 1, "N", None), "graph input imu_gyro shape: expected (N, 3)"),
    "input of other rank": (_set_shape("input", 2, "N"), "graph: expected an ONNX graph that onnxruntime can load"),
    "output of fixed batch": (_set_shape("output", 0, 1, 27), "graph output joint_targets shape: expected (N, 27)"),
    "output of other length": (_set_shape("output", 1, "N", 3), "graph output next_state.phase shape: expected (N, 2)"),
    "double input": (_double_input, "graph input imu_gyro type: expected 'tensor(float)', found 'tensor(double)'"),
    "batch fixed inside": (_fixed_inside, "graph run with a batch of 2: expected outputs of the contract's shapes"),
    "weight not finite": (_nan_weight, "graph output joint_targets[left_knee_joint] at rest: expected a finite value"),
    "state not finite": (_nan_state, "graph output next_state.phase[1] at rest: expected a finite value, found inf"),
    "unknown operator": (_unknown_operator, "graph: expected an ONNX graph that onnxruntime can load"),
}


@pytest.mark.parametrize("case", GRAPHS)
def test_graph_that_disagrees_is_refused_on_writing_and_loading(path: Path, case: str) -> None:
    edit, sentence = GRAPHS[case]
    proto = mlp()
    edit(proto)
    old = path.read_bytes()
    with pytest.raises(ContractError) as caught:
        embed(proto.SerializeToString(), CONTRACT, path)
    assert str(caught.value).startswith(sentence)
    assert path.read_bytes() == old
    path.write_bytes(sealed(CONTRACT.to_json(), proto.SerializeToString()))
    assert refusal(path).startswith(sentence)


def test_signal_missing_from_the_contract_is_refused(path: Path) -> None:
    fewer = replace(CONTRACT, inputs=CONTRACT.inputs[:2])
    path.write_bytes(sealed(fewer.to_json()))
    assert refusal(path).startswith("graph input command: expected none but joint_pos, imu_gyro, state.phase")


def test_state_of_another_length_is_refused(path: Path) -> None:
    longer = replace(CONTRACT, states=(replace(PHASE, shape=(3,), initial=(0.0,) * 3),))
    path.write_bytes(sealed(longer.to_json()))
    sentence = "graph input state.phase shape: expected (N, 3) with a dynamic batch axis N, found ('N', 2)"
    assert refusal(path) == sentence


def test_targets_for_other_joints_than_the_graph_gives_are_refused(path: Path) -> None:
    legs = replace(CONTRACT, output=JointTargets.of(H1_2, H1_2.group("legs")))
    path.write_bytes(sealed(legs.to_json()))
    assert refusal(path).startswith(
        "graph output joint_targets shape: expected (N, 12) with a dynamic batch axis N, found"
    )


def test_state_missing_from_the_contract_is_refused(path: Path) -> None:
    path.write_bytes(sealed(replace(CONTRACT, states=()).to_json()))
    assert refusal(path).startswith("graph input state.phase: expected none but joint_pos, imu_gyro, command")


# ---- writing ---------------------------------------------------------------------------------------------------------


def test_embed_replaces_an_older_contract_in_place_and_keeps_other_metadata(tmp_path: Path) -> None:
    proto = mlp()
    proto.metadata_props.add(key="exporter", value="torch")
    file = tmp_path / "policy.onnx"
    embed(proto.SerializeToString(), CONTRACT, file)
    scored = replace(CONTRACT, evaluation={"easy": {"E_vel": 0.1}})
    embed(file, scored, file)
    assert read_contract(file) == scored
    assert [p.key for p in onnx.load(file).metadata_props] == ["exporter", CONTRACT_KEY, CHECKSUM_KEY]
    assert file.read_bytes() == sealed(scored.to_json(), proto.SerializeToString())
    assert load_policy(file).contract == scored


def test_embed_draws_weights_in_from_side_files(tmp_path: Path) -> None:
    source, file = tmp_path / "source", tmp_path / "policy.onnx"
    source.mkdir()
    onnx.save(mlp(), source / "m.onnx", save_as_external_data=True, location="w.bin", size_threshold=0)
    embed(source / "m.onnx", CONTRACT, file)
    (source / "w.bin").unlink()
    signals = random_signals(1)
    targets = expected_targets(signals, np.array([PHASE.initial], np.float32))
    np.testing.assert_allclose(load_policy(file)(signals), targets, atol=1e-6)


def test_weights_in_side_files_are_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    model, file = tmp_path / "m.onnx", tmp_path / "policy.onnx"
    onnx.save(mlp(), model, save_as_external_data=True, location="w.bin", size_threshold=0)
    with pytest.raises(ContractError, match="graph: expected"):
        embed(model.read_bytes(), CONTRACT, file)
    file.write_bytes(sealed(CONTRACT.to_json(), model.read_bytes()))
    assert refusal(file).startswith("graph: expected an ONNX graph that onnxruntime can load")
    (tmp_path / "w.bin").unlink()
    with pytest.raises(ContractError, match="model: expected an ONNX model"):
        embed(model, CONTRACT, file)


@pytest.mark.parametrize("model", [b"", b"hello, robot", MODEL[:-3], MODEL[: len(MODEL) // 2]])
def test_embed_refuses_what_is_no_onnx(tmp_path: Path, model: bytes) -> None:
    with pytest.raises(ContractError, match="expected an ONNX"):
        embed(model, CONTRACT, tmp_path / "policy.onnx")
    assert list(tmp_path.iterdir()) == []


def test_embed_refuses_an_inconsistent_contract(path: Path) -> None:
    old = path.read_bytes()
    with pytest.raises(ContractError, match="rate_hz"):
        embed(MODEL, replace(CONTRACT, rate_hz=math.nan), path)
    assert path.read_bytes() == old


def test_a_full_disk_keeps_the_old_file(path: Path) -> None:
    old = path.read_bytes()
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (len(old) // 2, hard))  # the system itself then fails the write half-way
    try:
        with pytest.raises(UserError, match="could not write the policy file: File too large"):
            embed(MODEL, replace(CONTRACT, task="other"), path)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert path.read_bytes() == old
    assert list(path.parent.iterdir()) == [path]


@pytest.mark.parametrize("broken", ["fsync", "replace"])
def test_a_failure_at_the_last_moment_keeps_the_old_file(
    path: Path, monkeypatch: pytest.MonkeyPatch, broken: str
) -> None:
    def fail(*_: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os if broken == "fsync" else Path, broken, fail)
    old = path.read_bytes()
    with pytest.raises(UserError, match="No space left on device"):
        embed(MODEL, replace(CONTRACT, task="other"), path)
    assert path.read_bytes() == old
    assert list(path.parent.iterdir()) == [path]


def test_places_that_cannot_be_written_are_named(tmp_path: Path) -> None:
    for place in (tmp_path / "missing" / "policy.onnx", tmp_path):
        with pytest.raises(UserError, match=f"{place}: could not write"):
            embed(MODEL, CONTRACT, place)
    assert list(tmp_path.iterdir()) == []


def test_written_file_has_ordinary_permissions(path: Path, tmp_path: Path) -> None:
    (tmp_path / "other").touch()
    assert stat.S_IMODE(path.stat().st_mode) == stat.S_IMODE((tmp_path / "other").stat().st_mode)


# ---- running ---------------------------------------------------------------------------------------------------------


def test_policy_computes_what_the_graph_says_and_carries_its_state(path: Path) -> None:
    policy = load_policy(path)
    session = onnxruntime.InferenceSession(path, providers=["CPUExecutionProvider"])
    phase = np.array([PHASE.initial], np.float32)
    for step in range(20):
        signals = random_signals(1, seed=step)
        targets = policy(signals)
        assert targets.shape == (1, len(JOINTS))
        assert targets.dtype == np.float32
        reference, next_phase = session.run(None, signals | {PHASE.input: phase})
        np.testing.assert_array_equal(targets, reference)
        np.testing.assert_allclose(targets, expected_targets(signals, phase), atol=1e-6)
        np.testing.assert_array_equal(policy.state["phase"], next_phase)
        phase = next_phase


def test_loading_leaves_the_state_at_its_initial_value(path: Path) -> None:
    policy = load_policy(path)
    assert policy.batch == 1
    np.testing.assert_array_equal(policy.state["phase"], [PHASE.initial])


def test_reset_forgets(path: Path) -> None:
    policy = load_policy(path)
    signals = random_signals(1)
    first = policy(signals)
    assert not np.array_equal(policy(signals), first)
    policy.reset()
    np.testing.assert_array_equal(policy(signals), first)


def test_a_batch_is_as_many_single_robots(path: Path) -> None:
    policy, single = load_policy(path), load_policy(path)
    policy.reset(5)
    signals = random_signals(5)
    policy(signals)
    targets = policy(signals)
    assert targets.shape == (5, len(JOINTS))
    for i in range(5):
        single.reset()
        one = {name: value[i] for name, value in signals.items()}
        single(one)
        np.testing.assert_allclose(single(one)[0], targets[i], atol=1e-6)
    policy.reset(2)
    assert policy({name: value[:2] for name, value in signals.items()}).shape == (2, len(JOINTS))


def test_signals_may_be_unbatched_float64_lists_and_more_than_needed(path: Path) -> None:
    policy = load_policy(path)
    signals = random_signals(1)
    first = policy(signals)
    policy.reset()
    loose = {name: value[0].astype(np.float64).tolist() for name, value in signals.items()}
    np.testing.assert_array_equal(policy(loose | {"imu_accel": "unused"}), first)


def test_state_can_be_saved_and_put_back(path: Path) -> None:
    policy = load_policy(path)
    signals = random_signals(1)
    policy(signals)
    saved = policy.state
    second = policy(signals)
    np.testing.assert_array_equal(saved["phase"], np.array([PHASE.initial], np.float32) + STEP)
    policy.state = saved
    np.testing.assert_array_equal(policy(signals), second)


def test_returned_arrays_are_the_callers(path: Path) -> None:
    policy = load_policy(path)
    signals = random_signals(1)
    first, state = policy(signals), policy.state
    kept, kept_state = first.copy(), state["phase"].copy()
    policy(random_signals(1, seed=1))
    np.testing.assert_array_equal(first, kept)
    np.testing.assert_array_equal(state["phase"], kept_state)
    policy.reset()
    first[:] = state["phase"][:] = np.nan
    np.testing.assert_array_equal(policy(signals), kept)


@pytest.mark.parametrize(
    ("values", "sentence"),
    [
        ({}, "state.phase: expected a value of shape (1, 2), found none"),
        ({"phase": [0, 0], "gait": [0]}, "state.gait: expected no states but ['phase'], found this one"),
        ({"phase": [0, 0, 0]}, "state.phase: expected shape (1, 2), found shape (3,)"),
        ({"phase": [0, math.inf]}, "state.phase[1]: expected a finite value, found inf"),
    ],
)
def test_bad_state_is_refused_and_changes_nothing(path: Path, values: dict[str, Any], sentence: str) -> None:
    policy = load_policy(path)
    with pytest.raises(SignalError) as caught:
        policy.state = values
    assert str(caught.value) == sentence
    np.testing.assert_array_equal(policy.state["phase"], [PHASE.initial])


@pytest.mark.filterwarnings("error")
@pytest.mark.parametrize(
    ("name", "value", "sentence"),
    [
        ("imu_gyro", None, "imu_gyro: expected a value of shape (1, 3) [rad/s], found none"),
        ("imu_gyro", np.zeros(4), "imu_gyro: expected shape (1, 3), found shape (4,)"),
        ("imu_gyro", np.zeros((2, 3)), "imu_gyro: expected shape (1, 3), found shape (2, 3)"),
        ("imu_gyro", 0.0, "imu_gyro: expected shape (1, 3), found shape ()"),
        ("imu_gyro", [[1], [2, 3]], "imu_gyro: expected an array of shape (1, 3), found rows of different lengths"),
        ("imu_gyro", ["0", "0", "0"], "imu_gyro: expected elements of type float32, found type <U1"),
        ("imu_gyro", [0, 0, 1j], "imu_gyro: expected elements of type float32, found type complex128"),
        ("imu_gyro", [0.0, None, 0.0], "imu_gyro: expected elements of type float32, found type object"),
        ("imu_gyro", [0.0, 0.0, np.nan], "imu_gyro[z]: expected a finite value, found nan"),
        ("command", [[0.0, 1e39, 0.0]], "command[left]: expected a finite value, found inf"),
        (
            "joint_pos",
            np.where(np.arange(27) == KNEE, np.inf, 0),
            "joint_pos[left_knee_joint]: expected a finite value, found inf",
        ),
    ],
)
def test_bad_signal_is_named_and_leaves_the_state(path: Path, name: str, value: Any, sentence: str) -> None:
    policy = load_policy(path)
    signals: dict[str, Any] = dict(random_signals(1))
    good = policy(signals)
    policy.reset()
    bad = signals | {name: value}
    if value is None:
        del bad[name]
    with pytest.raises(SignalError) as caught:
        policy(bad)
    assert str(caught.value) == sentence
    np.testing.assert_array_equal(policy.state["phase"], [PHASE.initial])
    np.testing.assert_array_equal(policy(signals), good)


def test_bad_signal_in_a_batch_names_the_row(path: Path) -> None:
    policy = load_policy(path)
    policy.reset(3)
    signals = random_signals(3)
    signals["joint_pos"][2, KNEE] = np.nan
    with pytest.raises(SignalError, match=r"joint_pos\[row 2, left_knee_joint\]: expected a finite value, found nan"):
        policy(signals)
    with pytest.raises(SignalError, match=r"joint_pos: expected shape \(3, 27\), found shape \(27,\)"):
        policy({name: value[0] for name, value in random_signals(3).items()})


def test_bad_output_is_named_and_leaves_the_state(tmp_path: Path) -> None:
    proto = mlp()
    proto.graph.node[3].output[0] = "y"  # 1 / (joint_pos - 1) is finite but for joint_pos = 1
    proto.graph.initializer.append(numpy_helper.from_array(np.float32(1), "one"))
    proto.graph.node.append(helper.make_node("Sub", ["joint_pos", "one"], ["d"]))
    proto.graph.node.append(helper.make_node("Div", ["y", "d"], ["joint_targets"]))
    file = tmp_path / "policy.onnx"
    embed(proto.SerializeToString(), CONTRACT, file)
    policy = load_policy(file)
    signals = random_signals(1)
    signals["joint_pos"][0, KNEE] = 1.0
    with pytest.raises(SignalError, match=r"joint_targets\[left_knee_joint\]: expected a finite value, found -?inf"):
        policy(signals)
    np.testing.assert_array_equal(policy.state["phase"], [PHASE.initial])


def test_overflowing_state_is_named(path: Path) -> None:
    huge = replace(PHASE, initial=(3e38, 0.0))
    proto = mlp()
    proto.graph.node[4].CopyFrom(helper.make_node("Mul", ["state.phase", "state.phase"], ["next_state.phase"]))
    with pytest.raises(ContractError, match=r"next_state.phase\[0\] at rest: expected a finite value, found inf"):
        embed(proto.SerializeToString(), replace(CONTRACT, states=(huge,)), path)


def test_graphs_may_pass_inputs_and_constants_straight_through(tmp_path: Path) -> None:
    """Buffers are bound to the graph: an output that is an input, or does not depend on any, must fill them too."""
    nodes = [
        helper.make_node("Identity", ["joint_pos"], ["joint_targets"]),
        helper.make_node("Identity", ["state.kept"], ["next_state.kept"]),
        helper.make_node("Mul", ["state.kept", "zero"], ["z"]),
        helper.make_node("Add", ["z", "two"], ["next_state.constant"]),
        helper.make_node("Identity", ["state.constant"], ["unused"]),
        helper.make_node("Identity", ["image"], ["unused_image"]),
    ]
    tensors = {"zero": np.float32(0), "two": np.float32(2)}
    graph = helper.make_graph(
        nodes,
        "policy",
        [
            value_info("joint_pos", "N", 27),
            value_info("image", "N", 4, 5, 3, kind=TensorProto.UINT8),
            value_info("state.kept", "N"),
            value_info("state.constant", "N"),
        ],
        [
            value_info("joint_targets", "N", 27),
            value_info("next_state.kept", "N"),
            value_info("next_state.constant", "N"),
        ],
        [numpy_helper.from_array(v, k) for k, v in tensors.items()],
    )
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 18)], ir_version=10)
    image = Signal(name="image", shape=(4, 5, 3), unit="1", frame="camera", order=("r", "g", "b"), dtype="uint8")
    offered = robot_signals(H1_2) | {"image": image}
    states = tuple(StateTensor(name=n, shape=(), initial=(v,)) for n, v in (("kept", 7.0), ("constant", 0.0)))
    contract = replace(CONTRACT, inputs=(offered["joint_pos"], image), states=states)
    embed(model.SerializeToString(), contract, tmp_path / "policy.onnx")
    policy = load_policy(tmp_path / "policy.onnx", signals=offered)
    for step in range(3):
        pos = np.full((1, 27), step, np.float32)
        np.testing.assert_array_equal(policy({"joint_pos": pos, "image": np.zeros((4, 5, 3), np.uint8)}), pos)
        assert {k: v.tolist() for k, v in policy.state.items()} == {"kept": [7.0], "constant": [2.0]}
    with pytest.raises(SignalError, match="image: expected elements of type uint8, found type float64"):
        policy({"joint_pos": pos, "image": np.zeros((4, 5, 3))})


def test_a_policy_may_normalise_what_is_never_zero_on_a_robot(tmp_path: Path) -> None:
    offered = robot_signals(H1_2)
    names = ["imu_quat", "imu_accel"]
    nodes = [helper.make_node("ReduceL2", [n], [f"{n}.norm"], keepdims=1, axes=[1]) for n in names]
    nodes += [helper.make_node("Div", [n, f"{n}.norm"], [f"{n}.unit"]) for n in names]
    nodes.append(helper.make_node("Concat", [f"{n}.unit" for n in names], ["joint_targets"], axis=1))
    graph = helper.make_graph(
        nodes, "policy", [value_info(n, "N", *offered[n].shape) for n in names], [value_info("joint_targets", "N", 7)]
    )
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 13)], ir_version=10)
    output = JointTargets.of(H1_2, JOINTS[:7])
    contract = replace(CONTRACT, inputs=select(offered, names), states=(), output=output)
    embed(model.SerializeToString(), contract, tmp_path / "policy.onnx")
    policy = load_policy(tmp_path / "policy.onnx")
    targets = policy({"imu_quat": [0, 0, 2, 0], "imu_accel": [0, 0, -9.81]})
    np.testing.assert_array_equal(targets, [[0, 0, 1, 0, 0, 0, -1]])
    with pytest.raises(SignalError, match="joint_targets"):
        policy({"imu_quat": np.zeros(4), "imu_accel": np.zeros(3)})


def test_a_control_loop_allocates_little_and_keeps_nothing(path: Path) -> None:
    policy = load_policy(path)
    signals = random_signals(1)
    for _ in range(10):
        policy(signals)
    tracemalloc.start()
    try:
        policy(signals)
        before, _ = tracemalloc.get_traced_memory()
        tracemalloc.reset_peak()
        for _ in range(200):
            policy(signals)
        after, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert after - before < 1000
    assert peak - before < 8000


@pytest.mark.parametrize("n", [0, -1])
def test_less_than_one_robot_or_thread_is_refused(path: Path, n: int) -> None:
    with pytest.raises(UserError, match="at least 1"):
        load_policy(path, threads=n)
    with pytest.raises(UserError, match="at least 1"):
        load_policy(path).reset(n)


def test_threads_do_not_change_the_result(path: Path) -> None:
    signals = random_signals(1)
    np.testing.assert_allclose(load_policy(path, threads=2)(signals), load_policy(path)(signals), atol=1e-6)


# ---- reading by people, and by a robot's computer --------------------------------------------------------------------


def test_description_names_everything() -> None:
    text = describe(CONTRACT)
    for word in (*JOINTS, "joint_pos", "imu_gyro", "command", "phase", "velocity", "50.0 Hz", "ppo", "rad/s", "held"):
        assert word in text
    assert f"{0.1 + 0.2} to 1.3" in text
    assert f"easy.E_vel     {math.pi}" in text
    assert len([line for line in text.splitlines() if line.endswith(" held")]) == len(CONTRACT.output.held)


def test_description_of_a_bare_contract_has_no_empty_sections() -> None:
    text = describe(replace(CONTRACT, states=(), dynamics=Dynamics(), evaluation={}))
    assert not {"state", "randomization", "evaluation", "training details"} & set(text.splitlines())


def test_runs_where_torch_mujoco_and_onnx_are_missing(path: Path) -> None:
    script = """
import sys
for name in ("torch", "mujoco", "onnx", "rich", "sim"):
    sys.modules[name] = None
import numpy as np
from policies.contract import describe, load_policy, read_contract
policy = load_policy(sys.argv[1])
targets = policy({s.name: np.zeros(s.shape) for s in policy.contract.inputs})
assert targets.shape == (1, 27) and np.isfinite(targets).all()
print(describe(read_contract(sys.argv[1])).splitlines()[0])
"""
    done = subprocess.run(
        [sys.executable, "-c", script, str(path)],
        env=os.environ | {"PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        check=False,
    )
    assert (done.returncode, done.stderr) == (0, "")
    assert "unitree_h1_2" in done.stdout


def test_the_package_itself_imports_nothing() -> None:
    script = "import sys; before = set(sys.modules); import policies; print(*(set(sys.modules) - before))"
    done = subprocess.run(
        [sys.executable, "-c", script],
        env=os.environ | {"PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        check=True,
    )
    assert done.stdout.split() == ["policies"]
