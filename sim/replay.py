"""Repeat, with plain MuJoCo, the control step in which a simulation broke.

from sim.replay import load_failure, replay

print(replay("failure_1790000000000000000_17.npz").warning)   # what went wrong, and in which physics step
failure = load_failure("failure_1790000000000000000_17.npz")  # model and data, to look at or to step by hand
mujoco.viewer.launch(failure.model, failure.data)
"""

import zipfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import mujoco
import numpy as np
from numpy.typing import NDArray

import robots
from robots.errors import UserError
from robots.model import build_model
from sim.backend import PlantConfig, plant_from_json
from sim.mujoco_backend import BAD_WARNINGS, model_config

STATE = int(mujoco.mjtState.mjSTATE_INTEGRATION)


@dataclass(kw_only=True)
class Failure:
    """A simulation just before the control step in which it broke."""

    plant: PlantConfig
    """The simulated robot."""
    model: mujoco.MjModel
    """Its model with the parameters of that episode."""
    data: mujoco.MjData
    """Its state; `data.ctrl` holds the targets of the step to come."""
    mujoco_version: str
    """MuJoCo that ran it; another one may compute other last digits."""


@dataclass(frozen=True, kw_only=True)
class Replay:
    """What happened when the step was repeated."""

    states: NDArray[np.float64]
    """State (mjSTATE_INTEGRATION) before the first and after each physics step, (k + 1, S)."""
    broke: int | None
    """Physics step, from 0, in which MuJoCo found a number that is not finite or beyond 1e10; None if it found none."""
    warning: str
    """MuJoCo's name for what it found, empty if it found nothing."""


def load_failure(path: str | Path) -> Failure:
    """Read what `Environment` saved of a simulation that broke.

    Raises UserError for a file that is missing, damaged, or of a robot whose model has changed since.
    """
    saved = _read(Path(path))
    plant = plant_from_json(str(saved["plant"]))
    spec = robots.load(plant.robot)
    if str(saved["model_hash"]) != spec.model_hash:
        raise UserError(
            f"{path} is of a {plant.robot} with the model hash {str(saved['model_hash'])[:12]}, the model here has "
            f"{spec.model_hash[:12]}: replay it with the software that wrote it"
        )
    model = build_model(spec, model_config(plant), plant.ground.add if plant.ground else None)
    for name, values in saved.items():
        if name.startswith("field."):
            getattr(model, name.removeprefix("field."))[:] = values
    data = mujoco.MjData(model)
    mujoco.mj_setConst(model, data)
    mujoco.mj_setState(model, data, saved["state"], STATE)
    data.ctrl[:] = saved["targets"]
    return Failure(plant=plant, model=model, data=data, mujoco_version=str(saved["mujoco"]))


def replay(path: str | Path) -> Replay:
    """Repeat the control step in which a simulation broke, up to the physics step that breaks. Raises UserError."""
    failure = load_failure(path)
    model, data = failure.model, failure.data
    states = [_state(model, data)]
    for k in range(failure.plant.decimation):
        mujoco.mj_step(model, data)
        states.append(_state(model, data))
        found = [w for w in BAD_WARNINGS if data.warning[w].number]
        if found:
            return Replay(states=np.stack(states), broke=k, warning=mujoco.mjtWarning(found[0]).name)
    return Replay(states=np.stack(states), broke=None, warning="")


def _read(path: Path) -> dict[str, NDArray[Any]]:
    try:
        with np.load(path, allow_pickle=False) as archive:
            saved = dict(archive)
    except (OSError, ValueError, EOFError, zipfile.BadZipFile) as error:
        raise UserError(f"cannot read {path} as a saved failure: {error}") from error
    missing = {"state", "targets", "plant", "model_hash", "mujoco"} - saved.keys()
    if missing:
        raise UserError(f"{path} is no saved failure: it lacks {', '.join(sorted(missing))}")
    return saved


def _state(model: mujoco.MjModel, data: mujoco.MjData) -> NDArray[np.float64]:
    out = np.empty(mujoco.mj_stateSize(model, STATE))
    mujoco.mj_getState(model, data, out, STATE)
    return out
