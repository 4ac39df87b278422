import mujoco
import numpy as np
import pytest

from robots.errors import UserError
from sim.backend import PlantConfig, Start
from sim.mujoco_backend import MujocoBackend
from sim.parameters import Randomize
from sim.replay import STATE, load_failure, replay
from sim.terrain import RoughGround

PLANT = PlantConfig(
    lock=("waist", "arms", "wrists"),
    max_delay=0.02,
    randomize=(
        Randomize(pattern="link.*.mass", lo=0.8, hi=1.2),
        Randomize(pattern="link.*.com", lo=-0.01, hi=0.01, kind="add"),
        Randomize(pattern="actuator.*.delay", lo=0.0, hi=0.02, kind="value", shared=True),
        Randomize(pattern="joint.*.armature", lo=0.6, hi=1.4),
    ),
)
ROUGH = PlantConfig(lock=PLANT.lock, ground=RoughGround(levels=2))


@pytest.fixture(autouse=True)
def elsewhere(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)  # MuJoCo writes its warnings to a file in the working directory


def running(plant: PlantConfig, start_of) -> tuple[MujocoBackend, np.ndarray]:
    """Four simulations some steps into an episode, and the next targets."""
    backend, rng = MujocoBackend(plant, 4, 1), np.random.default_rng(0)
    start: Start = start_of(4)
    backend.reset(np.arange(4), start, rng)
    targets = (start.joint_pos + 0.1 * rng.uniform(-1, 1, start.joint_pos.shape)).astype(np.float32)
    for _ in range(5):
        backend.step(targets)
    return backend, targets + np.float32(0.05)


@pytest.mark.parametrize("plant", [PLANT, ROUGH], ids=["randomized", "rough"])
def test_a_replay_repeats_the_step_bit_by_bit(plant, start_of, tmp_path):
    backend, targets = running(plant, start_of)
    before, numbers = backend.batch.state.copy(), backend.batch.bind("qpos").shape[1]
    backend.step(targets)
    for sim in range(4):
        again = replay(backend.save_failure(sim, tmp_path))
        np.testing.assert_array_equal(again.states[0, 1 : 1 + numbers], before[sim, 1 : 1 + numbers])
        np.testing.assert_array_equal(again.states[-1], backend.batch.state[sim])
        assert (len(again.states), again.broke, again.warning) == (plant.decimation + 1, None, "")


@pytest.mark.parametrize(
    ("injury", "warning"), [("nan", "mjWARN_BADQVEL"), ("huge", "mjWARN_BADQACC"), ("command", "mjWARN_BADCTRL")]
)
def test_a_replay_breaks_as_the_simulation_did(start_of, tmp_path, injury, warning):
    backend, targets = running(PLANT, start_of)
    if injury == "command":
        targets[2, 4] = np.nan
    else:
        backend.batch.bind("qvel")[2, 8] = np.nan if injury == "nan" else 1e9
    assert backend.step(targets).tolist() == [2]
    wanted = targets[2, backend.free]
    np.testing.assert_array_equal(load_failure(backend.save_failure(2, tmp_path)).data.ctrl, wanted)
    again = replay(backend.save_failure(2, tmp_path / "failures"))
    assert again.warning == warning
    delay = backend.batch.expanded("actuator_delay")[2, 4] if injury == "command" else 0.0
    assert again.broke == np.ceil(delay / PLANT.timestep)


def test_a_failure_can_be_looked_at_and_stepped_by_hand(start_of, tmp_path):
    backend, targets = running(PLANT, start_of)
    backend.step(targets)
    failure = load_failure(backend.save_failure(1, tmp_path))
    assert failure.plant == PLANT
    assert failure.mujoco_version == mujoco.__version__
    np.testing.assert_array_equal(failure.data.ctrl, targets[1, backend.free])
    np.testing.assert_array_equal(failure.model.body_mass, backend.batch.expanded("body_mass")[1])
    np.testing.assert_array_equal(failure.model.body_subtreemass, backend.batch.expanded("body_subtreemass")[1])
    mujoco.mj_step(failure.model, failure.data, PLANT.decimation)
    out = np.empty(mujoco.mj_stateSize(failure.model, STATE))
    mujoco.mj_getState(failure.model, failure.data, out, STATE)
    np.testing.assert_array_equal(out, backend.batch.state[1])


def test_the_file_holds_no_pickled_objects(start_of, tmp_path):
    backend, targets = running(PLANT, start_of)
    backend.step(targets)
    with np.load(backend.save_failure(0, tmp_path), allow_pickle=False) as archive:
        assert {"state", "targets", "plant", "model_hash", "mujoco", "field.body_mass"} <= set(archive)
        assert all(archive[name].dtype != object for name in archive)


def test_what_is_no_saved_failure_is_refused(tmp_path):
    with pytest.raises(UserError, match=r"cannot read .*none\.npz"):
        replay(tmp_path / "none.npz")
    (tmp_path / "text.npz").write_text("nothing")
    with pytest.raises(UserError, match=r"cannot read .*text\.npz"):
        replay(tmp_path / "text.npz")
    np.savez(tmp_path / "other.npz", state=np.zeros(3))
    with pytest.raises(UserError, match="lacks model_hash, mujoco, plant, targets"):
        replay(tmp_path / "other.npz")


def test_a_truncated_file_is_refused(start_of, tmp_path):
    backend, targets = running(PLANT, start_of)
    backend.step(targets)
    path = backend.save_failure(0, tmp_path)
    path.write_bytes(path.read_bytes()[:2000])
    with pytest.raises(UserError, match="cannot read"):
        replay(path)


def test_a_failure_of_another_robot_model_is_refused(start_of, tmp_path):
    backend, targets = running(PLANT, start_of)
    backend.step(targets)
    path = backend.save_failure(0, tmp_path)
    with np.load(path) as archive:
        saved = dict(archive) | {"model_hash": np.array("0123456789abcdef")}
    np.savez(path, **saved)
    with pytest.raises(UserError, match="model hash 0123456789ab"):
        replay(path)
