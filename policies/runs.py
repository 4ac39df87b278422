"""A run's folder: configuration, checkpoints, curves, the exported policy. Nothing in it is ever half-written."""

import contextlib
import dataclasses
import json
import os
import types
import zipfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal, TypeVar, Union, get_args, get_origin, get_type_hints

import numpy as np
import torch

from robots.errors import UserError

CONFIG = "config.json"
CHECKPOINT = "checkpoint.pt"
POLICY = "policy.onnx"
FORMAT = 1

T = TypeVar("T")


def save_checkpoint(folder: Path, state: Mapping[str, Any]) -> Path:
    """Write a checkpoint; the old one stays until the new one is complete on disk.

    Raises UserError when it cannot be written (disk full, no permission); the old checkpoint is still there then.
    """
    path, trial = folder / CHECKPOINT, _beside(folder / CHECKPOINT)
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with trial.open("wb") as file:
            torch.save({"format": FORMAT, **to_tensors(state)}, file)
            file.flush()
            os.fsync(file.fileno())
        trial.replace(path)
    except (OSError, RuntimeError) as error:  # torch.save turns some errors of the disk into RuntimeError
        with contextlib.suppress(OSError):  # what is left of it is overwritten by the next save
            trial.unlink(missing_ok=True)
        kept = "; the previous checkpoint is unchanged" if path.exists() else ""
        raise UserError(f"cannot write {path}: {_first_line(_cause(error))}{kept}") from error
    return path


def load_checkpoint(folder: Path) -> dict[str, Any]:
    """Read a run's checkpoint, tensors and plain values only (nothing in it is executed).

    Raises UserError when there is none, when it is damaged, or of another format.
    """
    path = folder / CHECKPOINT if folder.is_dir() else folder
    if not path.is_file():
        raise UserError(f"no checkpoint at {path}; a run folder holds {CHECKPOINT} after its first save")
    try:
        with zipfile.ZipFile(path) as archive:  # torch itself does not compare checksums
            damaged = archive.testzip()
        if damaged is not None:
            raise zipfile.BadZipFile(f"wrong checksum of {damaged}")
        saved = torch.load(path, weights_only=True)
    except Exception as error:  # torch.load raises many types for damaged files
        raise UserError(f"{path} is damaged or no checkpoint: {_first_line(error)}") from error
    if not isinstance(saved, dict) or saved.get("format") != FORMAT:
        found = saved.get("format") if isinstance(saved, dict) else type(saved).__name__
        raise UserError(f"{path}: expected checkpoint format {FORMAT}, found {found}")
    restored: dict[str, Any] = to_arrays(saved)
    return restored


def to_tensors(value: Any) -> Any:
    """Nested state with numpy arrays made tensors (marked), so that loading needs no unpickling of code."""
    if isinstance(value, np.ndarray):
        return {"__array__": torch.from_numpy(np.asarray(value, order="C"))}
    if isinstance(value, Mapping):
        return {k: to_tensors(v) for k, v in value.items()}
    if isinstance(value, (list, tuple)):
        return [to_tensors(v) for v in value]
    return value.item() if isinstance(value, np.generic) else value


def to_arrays(value: Any) -> Any:
    """The inverse of `to_tensors`; tuples come back as lists."""
    if isinstance(value, Mapping):
        if set(value) == {"__array__"}:
            return value["__array__"].numpy()
        return {k: to_arrays(v) for k, v in value.items()}
    return [to_arrays(v) for v in value] if isinstance(value, list) else value


def write_json(path: Path, value: Any) -> None:
    """Write JSON by way of a file beside it, so that a reader never sees half of it. Raises OSError."""
    trial = _beside(path)
    trial.write_text(json.dumps(to_plain(value), indent=1) + "\n", encoding="utf-8")
    trial.replace(path)


def read_json(kind: type[T], path: Path) -> T:
    """The configuration `kind` that `write_json` wrote. Raises UserError for anything else."""
    try:
        tree = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise UserError(f"cannot read {path}: {_first_line(_cause(error))}") from error
    return from_plain(kind, tree, str(path))


def to_plain(value: Any) -> Any:
    """Nested dataclasses, mappings, tuples and paths as JSON has them: objects, lists and texts."""
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return {f.name: to_plain(getattr(value, f.name)) for f in dataclasses.fields(value)}
    if isinstance(value, Mapping):
        return {k: to_plain(v) for k, v in value.items()}
    if isinstance(value, (list, tuple)):
        return [to_plain(v) for v in value]
    return str(value) if isinstance(value, Path) else value


def from_plain(kind: type[T], tree: Any, where: str) -> T:
    """The configuration `kind`, a dataclass, of what `to_plain` made of it, found at `where`.

    Raises UserError for a setting that is missing, unknown or of another type, as another version would write it.
    """
    decoded: T = _decode(kind, tree, where)
    return decoded


def differences(wanted: Any, found: Any, where: str = "") -> list[str]:
    """What differs between two plain trees, one sentence a setting."""
    if isinstance(wanted, Mapping) and isinstance(found, Mapping):
        keys = [*wanted, *(k for k in found if k not in wanted)]
        parts = ((wanted.get(k, "nothing"), found.get(k, "nothing"), f"{where}.{k}" if where else str(k)) for k in keys)
        return [line for part in parts for line in differences(*part)]
    return [] if wanted == found else [f"{where}: expected {_short(wanted)}, found {_short(found)}"]


def _decode(kind: Any, tree: Any, where: str) -> Any:
    if dataclasses.is_dataclass(kind):
        return _decode_record(kind, tree, where)
    origin, arguments = get_origin(kind), get_args(kind)
    if origin is Literal:
        _require(tree in arguments, where, " or ".join(map(repr, arguments)), tree)
        return tree
    if origin in (Union, types.UnionType):
        inner = next(a for a in arguments if a is not type(None))
        return None if tree is None else _decode(inner, tree, where)
    if origin is tuple:
        _require(isinstance(tree, list), where, "a list", tree)
        return tuple(_decode(arguments[0], v, f"{where}[{i}]") for i, v in enumerate(tree))
    if kind is Path:
        _require(isinstance(tree, str), where, "a path", tree)
        return Path(tree)
    accepted = (int, float) if kind is float else (kind,)
    _require(isinstance(tree, accepted) and isinstance(tree, bool) == (kind is bool), where, kind.__name__, tree)
    return kind(tree)


def _decode_record(kind: Any, tree: Any, where: str) -> Any:
    _require(isinstance(tree, Mapping), where, "settings by name", tree)
    hints = get_type_hints(kind)
    missing, unknown = sorted(hints.keys() - tree.keys()), sorted(tree.keys() - hints.keys())
    if missing or unknown:
        listed = [f"{name} is missing" for name in missing] + [f"{name} is unknown" for name in unknown]
        raise UserError(f"{where} was written by another version of this software: {', '.join(listed)}")
    return kind(**{name: _decode(hint, tree[name], f"{where}, {name}") for name, hint in hints.items()})


def _require(fits: bool, where: str, expected: str, found: Any) -> None:
    if not fits:
        raise UserError(f"{where}: expected {expected}, found {_short(found)}")


def _beside(path: Path) -> Path:
    """Where a file is written before it takes its place; one name, so that no remains pile up after a power cut."""
    return path.with_name(f".{path.name}.part")


def _short(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 60 else f"{text[:57]}..."


def _cause(error: BaseException) -> BaseException:
    """The error of the system behind torch's, where there is one: it says "No space left on device"."""
    while error.__context__ is not None and not isinstance(error, OSError):
        error = error.__context__
    return error


def _first_line(error: BaseException) -> str:
    if isinstance(error, OSError) and error.strerror:
        return error.strerror
    return next(iter(str(error).splitlines()), "") or type(error).__name__
