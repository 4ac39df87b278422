"""A run's folder: configuration, checkpoints, curves, the exported policy. Nothing in it is ever half-written."""

import contextlib
import dataclasses
import json
import os
import secrets
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch

from robots.errors import UserError

CONFIG = "config.json"
CHECKPOINT = "checkpoint.pt"
POLICY = "policy.onnx"
FORMAT = 1


def save_checkpoint(folder: Path, state: Mapping[str, Any]) -> Path:
    """Write a checkpoint; the old one stays until the new one is complete on disk.

    Raises UserError when it cannot be written (disk full, no permission); the old checkpoint is still there then.
    """
    path = folder / CHECKPOINT
    trial = path.with_name(f".{CHECKPOINT}.{secrets.token_hex(4)}")
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with trial.open("wb") as file:
            torch.save({"format": FORMAT, **to_tensors(state)}, file)
            file.flush()
            os.fsync(file.fileno())
        trial.replace(path)
    except (OSError, RuntimeError) as error:
        with contextlib.suppress(OSError):
            trial.unlink(missing_ok=True)
        kept = "; the previous checkpoint is unchanged" if path.exists() else ""
        raise UserError(f"cannot write {path}: {error}{kept}") from error
    return path


def load_checkpoint(folder: Path) -> dict[str, Any]:
    """Read a run's checkpoint, tensors and plain values only (nothing in it is executed).

    Raises UserError when there is none, when it is damaged, or of another format.
    """
    path = folder / CHECKPOINT if folder.is_dir() else folder
    if not path.is_file():
        raise UserError(f"no checkpoint at {path}; a run folder holds {CHECKPOINT} after its first save")
    try:
        saved = torch.load(path, weights_only=True)
    except Exception as error:
        # torch.load raises many types for damaged files
        raise UserError(f"{path} is damaged or no checkpoint: {str(error).splitlines()[0]}") from error
    if not isinstance(saved, dict) or saved.get("format") != FORMAT:
        found = saved.get("format") if isinstance(saved, dict) else type(saved).__name__
        raise UserError(f"{path}: expected checkpoint format {FORMAT}, found {found}")
    restored: dict[str, Any] = to_arrays(saved)
    return restored


def to_tensors(value: Any) -> Any:
    """Nested state with numpy arrays made tensors (marked), so that loading needs no unpickling of code."""
    if isinstance(value, np.ndarray):
        return {"__array__": torch.from_numpy(np.ascontiguousarray(value))}
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
    """Write JSON by way of a file beside it, so that a reader never sees half of it."""
    trial = path.with_name(f".{path.name}.{secrets.token_hex(4)}")
    trial.write_text(json.dumps(value, indent=1, default=_plain) + "\n")
    trial.replace(path)


def _plain(value: Any) -> Any:
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return dataclasses.asdict(value)
    if isinstance(value, Path):
        return str(value)
    raise TypeError(f"{type(value).__name__} has no JSON form")
