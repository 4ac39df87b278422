from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from onnx import TensorProto, helper, numpy_helper

import robots
from policies.contract import JointTargets, PolicyContract, Training, embed
from policies.play import choose_gl
from robots.errors import UserError
from robots.signals import robot_signals, select
from robots.spec import RobotSpec

MakePolicy = Callable[..., Path]


@pytest.fixture(scope="session")
def h1_2() -> RobotSpec:
    return robots.load("unitree_h1_2")


@pytest.fixture(scope="session")
def make_policy(h1_2: RobotSpec, tmp_path_factory: pytest.TempPathFactory) -> MakePolicy:
    """Writes a policy file that holds the default pose of `joints`; with `breaks`, NaN for commands to the right."""

    def build(joints: tuple[str, ...] = h1_2.joint_names, breaks: bool = False, **changes: Any) -> Path:
        contract = PolicyContract(
            robot=h1_2.name,
            model_hash=h1_2.model_hash,
            joint_order=h1_2.joint_names,
            task="velocity",
            inputs=select(robot_signals(h1_2), ["command"]),
            output=JointTargets.of(h1_2, joints),
            rate_hz=50.0,
            action_delay=(0.0, 0.0),
            training=Training(commit="0" * 40, algorithm="none", seed=0, env_steps=0, date="2030-01-02T03:04:05+00:00"),
        )
        path = tmp_path_factory.mktemp("policy") / "policy.onnx"
        embed(holding_graph(h1_2.array("default_pos", joints), breaks), replace(contract, **changes), path)
        return path

    return build


@pytest.fixture(scope="session")
def hold(make_policy: MakePolicy) -> Path:
    """A policy file that holds the default pose."""
    return make_policy()


def holding_graph(pose: np.ndarray, breaks: bool) -> bytes:
    """joint_targets = pose + 0 * sqrt(+-left)."""
    constants = {
        "pose": pose.astype(np.float32),
        "select": np.array([[0], [1 if breaks else 0], [0]], np.float32),
        "zero": np.zeros((1, len(pose)), np.float32),
    }
    nodes = [
        helper.make_node("MatMul", ["command", "select"], ["left"]),
        helper.make_node("Sqrt", ["left"], ["root"]),
        helper.make_node("MatMul", ["root", "zero"], ["nothing"]),
        helper.make_node("Add", ["nothing", "pose"], ["joint_targets"]),
    ]
    graph = helper.make_graph(
        nodes,
        "hold",
        [helper.make_tensor_value_info("command", TensorProto.FLOAT, ["N", 3])],
        [helper.make_tensor_value_info("joint_targets", TensorProto.FLOAT, ["N", len(pose)])],
        [numpy_helper.from_array(v, k) for k, v in constants.items()],
    )
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 18)], ir_version=10)
    serialised: bytes = model.SerializeToString()
    return serialised


@pytest.fixture
def drawing() -> None:
    """Skips where no OpenGL works."""
    try:
        choose_gl()
    except UserError as error:
        pytest.skip(str(error))
