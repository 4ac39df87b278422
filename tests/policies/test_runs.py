import errno
import json
import os
import pickle
import re
import resource
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import numpy as np
import pytest
import torch

from policies.runs import (
    CHECKPOINT,
    differences,
    from_plain,
    load_checkpoint,
    read_json,
    save_checkpoint,
    to_arrays,
    to_plain,
    to_tensors,
    write_json,
)
from robots.errors import UserError

OLD = {"iteration": 1}
BIG = {"iteration": 2, "weights": torch.randn(200_000)}


@contextmanager
def file_size_limit(size: int) -> Iterator[None]:
    """No file of this process may grow beyond `size` bytes: writing fails as on a full disk."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


def names(folder: Path) -> list[str]:
    return sorted(p.name for p in folder.iterdir())


# ---- round trip ------------------------------------------------------------------------------------------------------


def test_what_is_saved_is_what_is_loaded(tmp_path: Path) -> None:
    rng = np.random.Generator(np.random.SFC64(3))
    rng.random(5, dtype=np.float32)
    state = {
        "tensor": torch.randn(3, 4),
        "half": torch.randn(2).half(),
        "views": torch.randn(6, 6)[::2, 1:3],
        "array": rng.normal(size=(3, 2)),
        "scalar array": np.array(2.5),
        "strided": np.arange(12.0).reshape(3, 4)[:, ::2],
        "flags": np.array([True, False]),
        "unsigned": np.array([2**64 - 1], np.uint64),
        "rng": rng.bit_generator.state,
        "numbers": {"int": 2**62, "float": 0.1, "none": None, "yes": True, "numpy": np.float64(1 / 3)},
        "optimizer": {"state": {0: {"step": torch.tensor(3.0)}}, "groups": [{"betas": [0.9, 0.999]}]},
        "empty": [],
    }
    path = save_checkpoint(tmp_path, state)
    loaded = load_checkpoint(tmp_path)
    assert path == tmp_path / CHECKPOINT
    assert loaded.pop("format") == 1
    assert_same(loaded, state)
    rng.bit_generator.state = loaded["rng"]
    assert names(tmp_path) == [CHECKPOINT]


def assert_same(got: Any, expected: Any) -> None:
    if isinstance(expected, dict):
        assert list(got) == list(expected)
        for k, v in expected.items():
            assert_same(got[k], v)
    elif isinstance(expected, (torch.Tensor, np.ndarray)):
        assert type(got) is type(expected)
        assert got.dtype == expected.dtype
        assert got.shape == expected.shape
        assert (got == expected).all()
    else:
        assert got == expected


def test_tuples_come_back_as_lists_and_the_rest_as_it_was() -> None:
    state = {"a": (1, np.arange(3), {"b": (torch.ones(2),)})}
    back = to_arrays(to_tensors(state))
    assert_same(back["a"][1], np.arange(3))
    assert isinstance(back["a"], list)
    assert isinstance(back["a"][2]["b"], list)


# ---- saving that fails -----------------------------------------------------------------------------------------------


def test_a_full_disk_leaves_the_old_checkpoint_alone(tmp_path: Path) -> None:
    save_checkpoint(tmp_path, OLD)
    with file_size_limit(100_000), pytest.raises(UserError, match=r"cannot write .*large.*previous checkpoint is un"):
        save_checkpoint(tmp_path, BIG)
    assert load_checkpoint(tmp_path)["iteration"] == 1
    assert names(tmp_path) == [CHECKPOINT]
    save_checkpoint(tmp_path, BIG)
    assert load_checkpoint(tmp_path)["iteration"] == 2


def test_a_full_disk_at_the_first_save_leaves_nothing(tmp_path: Path) -> None:
    with file_size_limit(100_000), pytest.raises(UserError, match="cannot write") as caught:
        save_checkpoint(tmp_path, BIG)
    assert "previous" not in str(caught.value)
    assert names(tmp_path) == []


@pytest.mark.parametrize("step", ["fsync", "replace"])
def test_a_disk_that_fills_up_at_the_last_moment_leaves_the_old_checkpoint_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, step: str
) -> None:
    save_checkpoint(tmp_path, OLD)

    def full(*_: object) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    owner = os if step == "fsync" else Path
    with monkeypatch.context() as patch:
        patch.setattr(owner, step, full)
        with pytest.raises(UserError, match="No space left on device; the previous checkpoint is unchanged"):
            save_checkpoint(tmp_path, BIG)
    assert load_checkpoint(tmp_path)["iteration"] == 1
    assert names(tmp_path) == [CHECKPOINT]


def test_remains_of_a_save_that_was_killed_do_not_pile_up(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    save_checkpoint(tmp_path, OLD)

    def killed(*_: object) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(os, "fsync", killed)
        for _ in range(2):
            with pytest.raises(KeyboardInterrupt):
                save_checkpoint(tmp_path, BIG)
    assert len(names(tmp_path)) == 2
    assert load_checkpoint(tmp_path)["iteration"] == 1
    save_checkpoint(tmp_path, BIG)
    assert names(tmp_path) == [CHECKPOINT]


def test_a_folder_that_cannot_be_made_is_said(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(UserError, match=r"cannot write .*Not a directory"):
        save_checkpoint(tmp_path / "file" / "run", OLD)


# ---- loading that fails ----------------------------------------------------------------------------------------------


def test_a_missing_checkpoint_is_said(tmp_path: Path) -> None:
    for path in (tmp_path, tmp_path / "nowhere"):
        with pytest.raises(UserError, match=f"no checkpoint at {re.escape(str(path))}"):
            load_checkpoint(path)


@pytest.mark.parametrize("share", [0.0, 0.1, 0.5, 0.9, 0.999])
def test_a_truncated_checkpoint_is_refused(tmp_path: Path, share: float) -> None:
    path = save_checkpoint(tmp_path, BIG)
    data = path.read_bytes()
    path.write_bytes(data[: int(share * len(data))])
    with pytest.raises(UserError, match=re.escape(f"{path} is damaged or no checkpoint: ") + "."):
        load_checkpoint(tmp_path)


@pytest.mark.parametrize("content", [b"", b"no checkpoint", b"PK\x03\x04", json.dumps({"a": 1}).encode()])
def test_a_file_that_is_no_checkpoint_is_refused(tmp_path: Path, content: bytes) -> None:
    (tmp_path / CHECKPOINT).write_bytes(content)
    with pytest.raises(UserError, match=r"damaged or no checkpoint: ."):
        load_checkpoint(tmp_path)


@pytest.mark.parametrize("share", [0.1, 0.5, 0.9])
def test_a_flipped_bit_is_found(tmp_path: Path, share: float) -> None:
    path = save_checkpoint(tmp_path, BIG)
    data = bytearray(path.read_bytes())
    data[int(share * len(data))] ^= 1
    path.write_bytes(data)
    with pytest.raises(UserError, match="damaged or no checkpoint"):
        load_checkpoint(tmp_path)


class Bomb:
    """Writes a file when it is unpickled."""

    def __init__(self, target: Path) -> None:
        self.target = target

    def __reduce__(self) -> tuple[Any, ...]:
        return Path.write_text, (self.target, "boom")


@pytest.mark.parametrize("way", ["torch", "pickle"])
def test_nothing_in_a_checkpoint_is_executed(tmp_path: Path, way: str) -> None:
    crater = tmp_path / "crater"
    bomb = {"format": 1, "payload": Bomb(crater)}
    path = tmp_path / CHECKPOINT
    torch.save(bomb, path) if way == "torch" else path.write_bytes(pickle.dumps(bomb))
    with pytest.raises(UserError, match="damaged or no checkpoint"):
        load_checkpoint(tmp_path)
    assert not crater.exists()
    torch.load(path, weights_only=False) if way == "torch" else pickle.loads(path.read_bytes())
    assert crater.exists()  # it is a live one


@pytest.mark.parametrize(("content", "found"), [({"format": 2}, "2"), ({"weights": 1}, "None"), ([1], "list")])
def test_another_format_is_refused(tmp_path: Path, content: Any, found: str) -> None:
    torch.save(content, tmp_path / CHECKPOINT)
    with pytest.raises(UserError, match=f"expected checkpoint format 1, found {found}"):
        load_checkpoint(tmp_path)


# ---- configuration ---------------------------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class Inner:
    rate: float = 0.1
    sizes: tuple[int, ...] = (4, 2)


@dataclass(frozen=True, kw_only=True)
class Outer:
    name: str = "a"
    count: int = 3
    flag: bool = False
    kind: Literal["x", "y"] = "x"
    where: Path | None = None
    inner: Inner = field(default_factory=Inner)


@pytest.mark.parametrize(
    "config",
    [
        Outer(),
        Outer(name="ü", count=-1, flag=True, kind="y", where=Path("a/b"), inner=Inner(rate=1 / 3, sizes=())),
    ],
)
def test_a_configuration_survives_json(tmp_path: Path, config: Outer) -> None:
    path = tmp_path / "config.json"
    write_json(path, config)
    assert read_json(Outer, path) == config
    assert names(tmp_path) == ["config.json"]
    assert from_plain(Outer, to_plain(config), "here") == config


def test_a_whole_number_will_do_for_a_float() -> None:
    rate = from_plain(Inner, {"rate": 1, "sizes": []}, "here").rate
    assert (rate, type(rate)) == (1.0, float)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"count": "3"}, r"here, count: expected int, found '3'"),
        ({"count": True}, r"here, count: expected int, found True"),
        ({"flag": 1}, r"here, flag: expected bool, found 1"),
        ({"kind": "z"}, r"here, kind: expected 'x' or 'y', found 'z'"),
        ({"where": 1}, r"here, where: expected a path, found 1"),
        ({"inner": [1]}, r"here, inner: expected settings by name, found \[1\]"),
        ({"inner": {"rate": 0.1, "sizes": [1, 2.5]}}, r"here, inner, sizes\[1\]: expected int, found 2.5"),
        ({"inner": {"rate": 0.1, "sizes": 4}}, r"here, inner, sizes: expected a list, found 4"),
        ({"inner": {"rate": 0.1}}, r"here, inner was written by another version .*: sizes is missing"),
        ({"colour": 1}, r"here was written by another version .*: colour is unknown"),
    ],
)
def test_a_setting_that_does_not_fit_is_named(change: dict[str, Any], message: str) -> None:
    with pytest.raises(UserError, match=message):
        from_plain(Outer, to_plain(Outer()) | change, "here")


@pytest.mark.parametrize("content", ["", "{", "\udcff"])
def test_a_configuration_that_is_no_json_is_refused(tmp_path: Path, content: str) -> None:
    path = tmp_path / "config.json"
    path.write_bytes(content.encode(errors="surrogateescape"))
    with pytest.raises(UserError, match=f"cannot read {re.escape(str(path))}: ."):
        read_json(Outer, path)


def test_differences_are_named_setting_by_setting() -> None:
    wanted = {"seed": 0, "ppo": {"gamma": 0.99, "hidden": [256, 128]}, "new": 1}
    found = {"seed": 0, "ppo": {"gamma": 0.9, "hidden": [256]}, "old": 2}
    assert differences(wanted, wanted) == []
    assert differences(wanted, found) == [
        "ppo.gamma: expected 0.99, found 0.9",
        "ppo.hidden: expected [256, 128], found [256]",
        "new: expected 1, found 'nothing'",
        "old: expected 'nothing', found 2",
    ]
    assert differences(wanted, None) == [f": expected {str(wanted)[:57]}..., found None"]
