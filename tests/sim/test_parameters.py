import itertools

import mujoco
import numpy as np
import pytest
from mujoco.batch import MODEL_FIELDS, Batch

import robots
from robots.errors import UnknownNameError, UserError
from robots.model import ModelConfig, build_model
from sim.parameters import WIDTH, Parameters, Randomize

SPEC = robots.load("unitree_h1_2")
ATTRIBUTES = {
    "link": ("mass", "com", "inertia"),
    "joint": ("damping", "friction", "armature", "stiffness"),
    "actuator": ("kp", "kd", "gain", "delay"),
    "contact": ("friction",),
}
KNEE = "joint.left_knee_joint"


@pytest.fixture(scope="module")
def h1_2() -> mujoco.MjModel:
    return build_model(SPEC, ModelConfig(timestep=0.005, solver="fast", collision="feet", max_delay=0.02))


def clone(model: mujoco.MjModel) -> mujoco.MjModel:
    size = mujoco.mj_sizeModel(model)
    buffer = np.empty(size, np.uint8)
    mujoco.mj_saveModel(model, None, buffer)
    return mujoco.MjModel.from_binary_path("model.mjb", {"model.mjb": buffer.tobytes()})


def batched(model: mujoco.MjModel, num: int) -> tuple[Batch, Parameters]:
    batch = Batch(model, num, 1)
    return batch, Parameters(model, num, batch.expand, batch.set_const)


def other_value(parameters: Parameters, name: str) -> np.ndarray:
    """A value that differs from the nominal one by a little and has physical meaning."""
    nominal, attribute = parameters.nominal(name), name.rsplit(".", 1)[1]
    if attribute == "delay":
        return np.array([0.01])
    if attribute == "com":
        return nominal + np.array([0.01, 0.005, -0.01])
    return nominal * 1.2 if nominal.any() else nominal + 1.0


def commands(model: mujoco.MjModel, steps: int) -> np.ndarray:
    return SPEC.array("default_pos") + 0.2 * np.random.default_rng(1).uniform(-1, 1, (steps, model.nu))


def start(model: mujoco.MjModel, batch: Batch) -> None:
    """The robot in its default pose on the ground, all joints turning."""
    qpos, qvel = batch.bind("qpos"), batch.bind("qvel")
    qpos[:, 2], qpos[:, 7:] = SPEC.spawn_height, SPEC.array("default_pos")
    qvel[:] = np.random.default_rng(0).uniform(-0.5, 0.5, model.nv)


def roll_batch(model: mujoco.MjModel, batch: Batch, steps: int = 15) -> np.ndarray:
    """Joint and base positions (N, nq) after some control steps."""
    ctrl = batch.bind("ctrl")
    start(model, batch)
    for target in commands(model, steps):
        ctrl[:] = target
        batch.step(nstep=4)
    return batch.bind("qpos").copy()


def roll_plain(model: mujoco.MjModel, steps: int = 15) -> np.ndarray:
    """The same motion of one plain model, (nq,)."""
    data = mujoco.MjData(model)
    data.qpos[2], data.qpos[7:] = SPEC.spawn_height, SPEC.array("default_pos")
    data.qvel[:] = np.random.default_rng(0).uniform(-0.5, 0.5, model.nv)
    for target in commands(model, steps):
        data.ctrl[:] = target
        mujoco.mj_step(model, data, 4)
    return data.qpos.copy()


def touching(name: str) -> bool:
    """Whether a shape's friction can matter to a robot on its feet."""
    return not name.startswith("contact.") or any(part in name for part in ("_heel_", "_toe_"))


def test_the_vocabulary_is_the_documented_one(h1_2):
    names = Parameters(h1_2).names
    found = {(n.split(".")[0], n.rsplit(".", 1)[1]) for n in names}
    assert found == {(kind, a) for kind, attributes in ATTRIBUTES.items() for a in attributes}
    assert sum(n.startswith("actuator.") for n in names) == 4 * 27
    assert sum(n.startswith("link.") for n in names) == 3 * (h1_2.nbody - 1)


def test_setting_any_parameter_changes_the_motion_of_its_own_simulation_only(h1_2):
    names = [n for n in Parameters(h1_2).names if touching(n)]
    batch, parameters = batched(h1_2, len(names) + 1)
    parameters.assign("actuator.*.delay", 0.0)
    for i, name in enumerate(names):
        parameters.assign(name, other_value(parameters, name), np.array([i]))
    end = roll_batch(h1_2, batch)
    change = np.abs(end[:-1] - end[-1]).max(axis=1)
    assert [n for n, c in zip(names, change, strict=True) if c < 1e-9] == []
    untouched, parameters = batched(h1_2, 1)
    parameters.assign("actuator.*.delay", 0.0)
    np.testing.assert_array_equal(end[-1], roll_batch(h1_2, untouched)[0])


def test_setting_any_parameter_twice_equals_setting_it_once(h1_2):
    names = Parameters(h1_2).names
    once, parameters_once = batched(h1_2, len(names))
    twice, parameters_twice = batched(h1_2, len(names))
    for i, name in enumerate(names):
        value, sim = other_value(parameters_once, name), np.array([i])
        parameters_once.assign(name, value, sim)
        parameters_twice.assign(name, value, sim)
        parameters_twice.assign(name, value, sim)
    compared = 0
    for field in MODEL_FIELDS:
        a, b = once.expanded(field), twice.expanded(field)
        if a is not None:
            np.testing.assert_array_equal(a, b, err_msg=field)
            compared += 1
    assert compared > 10


def test_a_plain_model_and_a_batch_move_alike(h1_2):
    names = [f"link.left_knee_link.{a}" for a in ATTRIBUTES["link"]]
    names += [f"{KNEE}.{a}" for a in ATTRIBUTES["joint"]]
    names += [f"actuator.left_knee_joint.{a}" for a in ATTRIBUTES["actuator"]]
    names += ["contact.left_heel_left.friction"]
    batch, parameters = batched(h1_2, len(names))
    plain_ends = []
    for i, name in enumerate(names):
        parameters.assign(name, other_value(parameters, name), np.array([i]))
        model = clone(h1_2)
        Parameters(model).assign(name, other_value(parameters, name))
        plain_ends.append(roll_plain(model))
    np.testing.assert_array_equal(roll_batch(h1_2, batch), np.stack(plain_ends))


def test_nominal_values_change_nothing(h1_2):
    model = clone(h1_2)
    parameters = Parameters(model)
    before = roll_plain(model)
    for name in parameters.names:
        parameters.assign(name, parameters.nominal(name))
    np.testing.assert_allclose(roll_plain(model), before, atol=1e-9)


@pytest.mark.parametrize("order", list(itertools.permutations(("kp", "kd", "gain"))))
def test_gains_combine_in_any_order(h1_2, order):
    model = clone(h1_2)
    values = {"kp": 150.0, "kd": 3.0, "gain": 0.5}
    parameters = Parameters(model)
    for attribute in order:
        parameters.assign(f"actuator.left_knee.{attribute}", values[attribute])
    knee = model.actuator("left_knee_joint")
    assert knee.gainprm[0] == 75.0
    assert tuple(knee.biasprm[:3]) == (0.0, -75.0, -1.5)


def test_gain_scales_the_whole_force_of_a_servo(h1_2):
    model = clone(h1_2)
    Parameters(model).assign("actuator.*.delay", 0.0)
    data = mujoco.MjData(model)
    data.qpos[7:] = data.ctrl[:] = SPEC.array("default_pos")
    data.ctrl[:] += 0.05
    data.qvel[6:] = 0.3
    mujoco.mj_forward(model, data)
    full = data.actuator_force.copy()
    Parameters(model).assign("actuator.*.gain", 0.5)
    mujoco.mj_forward(model, data)
    np.testing.assert_allclose(data.actuator_force, full / 2, rtol=1e-12)
    assert np.abs(full).min() > 0.1


def test_a_motor_has_a_gain_and_no_servo_constants():
    model = mujoco.MjModel.from_xml_string(
        "<mujoco><worldbody><body name='arm'><joint name='j' axis='0 1 0'/><geom size='.1' pos='0 0 -1'/></body>"
        "</worldbody><actuator><motor name='m' joint='j' gear='2'/></actuator></mujoco>"
    )
    parameters = Parameters(model)
    assert [n for n in parameters.names if n.startswith("actuator.")] == ["actuator.m.gain"]
    data = mujoco.MjData(model)
    data.ctrl[0], data.qpos[0] = 3.0, 0.2
    mujoco.mj_forward(model, data)
    before = data.qfrc_actuator[0]
    parameters.assign("actuator.m.gain", 0.5)
    mujoco.mj_forward(model, data)
    assert data.qfrc_actuator[0] == pytest.approx(before / 2)


def test_mass_scales_the_inertia_along(h1_2):
    model = clone(h1_2)
    parameters = Parameters(model)
    mass = parameters.nominal("link.torso.mass")
    parameters.assign("link.torso.mass", 1.5 * mass)
    np.testing.assert_allclose(model.body("torso_link").inertia, 1.5 * h1_2.body("torso_link").inertia, rtol=1e-14)


def test_an_inertia_set_after_the_mass_holds_as_it_is(h1_2):
    model = clone(h1_2)
    parameters = Parameters(model)
    parameters.assign("link.torso.mass", 2 * parameters.nominal("link.torso.mass"))
    parameters.assign("link.torso.inertia", [0.5, 0.4, 0.3, 0.01, 0.02, 0.03])
    np.testing.assert_allclose(Parameters(model).nominal("link.torso.inertia"), [0.5, 0.4, 0.3, 0.01, 0.02, 0.03])


def test_the_same_values_set_again_in_any_order_give_the_last_one(h1_2):
    model = clone(h1_2)
    parameters = Parameters(model)
    mass, inertia = 2 * parameters.nominal("link.torso.mass"), np.array([0.5, 0.4, 0.3, 0.01, 0.02, 0.03])
    for _ in range(2):
        parameters.assign("link.torso.mass", mass)
        parameters.assign("link.torso.inertia", inertia)
    parameters.assign("link.torso.mass", mass)
    np.testing.assert_allclose(Parameters(model).nominal("link.torso.inertia"), inertia)
    parameters.assign("link.torso.mass", mass / 2)
    np.testing.assert_allclose(Parameters(model).nominal("link.torso.inertia"), inertia / 2)


def test_a_mass_set_after_the_inertia_scales_it(h1_2):
    model = clone(h1_2)
    parameters = Parameters(model)
    inertia = np.array([0.5, 0.4, 0.3, 0.01, 0.02, 0.03])
    parameters.assign("link.torso.inertia", inertia)
    for _ in range(2):
        parameters.assign("link.torso.mass", 2 * parameters.nominal("link.torso.mass"))
    np.testing.assert_allclose(Parameters(model).nominal("link.torso.inertia"), 2 * inertia)


def test_total_mass_follows_the_links(h1_2):
    batch, parameters = batched(h1_2, 3)
    parameters.assign("link.*.mass", 2 * parameters.nominal("link.pelvis.mass"), np.array([1]))
    total = batch.expanded("body_subtreemass")[:, 0]
    np.testing.assert_allclose(total, batch.expanded("body_mass").sum(axis=1), rtol=1e-14)
    assert total[0] == total[2] == h1_2.body_subtreemass[0]
    assert total[1] == pytest.approx((h1_2.nbody - 1) * 2 * h1_2.body("pelvis").mass[0])


def test_inertia_gives_the_mass_matrix_of_the_same_body_written_in_mjcf():
    def arm(inertia: str) -> mujoco.MjModel:
        return mujoco.MjModel.from_xml_string(
            "<mujoco><worldbody><body name='arm'><freejoint/>"
            f"<inertial pos='.1 .2 .3' mass='2' fullinertia='{inertia}'/><geom size='.1'/></body></worldbody></mujoco>"
        )

    wanted = arm("0.5 0.4 0.3 0.01 0.02 0.03")
    model = arm("0.2 0.2 0.2 0 0 0.01")
    Parameters(model).assign("link.arm.inertia", [0.5, 0.4, 0.3, 0.01, 0.02, 0.03])

    def mass_matrix(m: mujoco.MjModel) -> np.ndarray:
        data, full = mujoco.MjData(m), np.zeros((m.nv, m.nv))
        data.qpos[3:7] = np.array([0.5, 0.5, 0.1, 0.7]) / np.linalg.norm([0.5, 0.5, 0.1, 0.7])
        mujoco.mj_forward(m, data)
        mujoco.mj_fullM(m, data, full)
        return full

    np.testing.assert_allclose(mass_matrix(model), mass_matrix(wanted), atol=1e-12)


def test_links_whose_inertial_frame_was_shared_can_be_changed():
    model = mujoco.MjModel.from_xml_string(
        "<mujoco><worldbody><body name='a'><joint name='j' axis='0 1 0' pos='0 0 .5'/>"
        "<geom name='ball' size='.1' mass='1'/><geom name='fin' type='box' size='.1 .2 .3' mass='1'/></body>"
        "<body name='b' pos='0 1 0'><joint name='k' axis='0 1 0' pos='0 0 .5'/>"
        "<geom name='lump' type='box' pos='.1 .1 .1' euler='10 20 30' size='.1 .2 .3'/></body></worldbody></mujoco>"
    )
    assert model.body_sameframe[1]
    assert model.geom("lump").sameframe[0]
    data = mujoco.MjData(model)
    mujoco.mj_forward(model, data)
    shapes = data.geom_xpos.copy()
    parameters = Parameters(model)
    parameters.assign("link.*.com", [0.02, 0.03, 0.04])
    mujoco.mj_forward(model, data)
    np.testing.assert_allclose(data.xipos[1:], data.xpos[1:] + np.array([0.02, 0.03, 0.04]), atol=1e-12)
    np.testing.assert_allclose(data.geom_xpos, shapes, atol=1e-12)


def test_a_lone_centred_body_offers_only_its_mass():
    model = mujoco.MjModel.from_xml_string(
        "<mujoco><worldbody><body name='cube'><freejoint/><geom type='box' size='.1 .1 .1'/></body></worldbody>"
        "</mujoco>"
    )
    assert [n for n in Parameters(model).names if n.startswith("link.")] == ["link.cube.mass"]


RULES = (
    Randomize(pattern="link.*.mass", lo=0.8, hi=1.2),
    Randomize(pattern="link.*.inertia", lo=0.8, hi=1.2),
    Randomize(pattern="link.pelvis.com", lo=-0.02, hi=0.02, kind="add"),
    Randomize(pattern="joint.*.armature", lo=0.5, hi=1.5),
    Randomize(pattern="joint.*.friction", lo=0.5, hi=1.5),
    Randomize(pattern="joint.*.damping", lo=0.0, hi=1.0, kind="value"),
    Randomize(pattern="joint.*.stiffness", lo=0.0, hi=1.0, kind="add"),
    Randomize(pattern="actuator.*.kp", lo=0.9, hi=1.1),
    Randomize(pattern="actuator.*.kd", lo=0.8, hi=1.2),
    Randomize(pattern="actuator.*.gain", lo=0.9, hi=1.0),
    Randomize(pattern="actuator.*.delay", lo=0.0, hi=0.02, kind="value", shared=True),
    Randomize(pattern="contact.*_heel_*.friction", lo=0.4, hi=1.2, kind="value", shared=True),
)


def test_randomization_never_compounds(h1_2):
    batch, parameters = batched(h1_2, 8)
    rng, everyone = np.random.default_rng(0), np.arange(8)
    for _ in range(100):
        parameters.randomize(RULES, everyone, rng)
    knee = h1_2.joint("left_knee_joint").dofadr[0]
    nominal = {f: getattr(h1_2, f) for f in ("body_mass", "dof_armature", "dof_frictionloss", "actuator_gainprm")}
    moving = slice(6, None)
    for field, at, lo, hi in (
        ("body_mass", slice(1, None), 0.8, 1.2),
        ("dof_armature", moving, 0.5, 1.5),
        ("dof_frictionloss", moving, 0.5, 1.5),
        ("actuator_gainprm", (slice(None), 0), 0.81, 1.1),
    ):
        ratio = batch.expanded(field)[:, at] if isinstance(at, slice) else batch.expanded(field)[:, at[0], at[1]]
        ratio = ratio / nominal[field][at]
        assert ratio.min() >= lo - 1e-12, field
        assert ratio.max() <= hi + 1e-12, field
        assert np.ptp(ratio) > 0.6 * (hi - lo), field
    drawn = batch.expanded("dof_damping")[:, knee]
    assert 0 <= drawn.min() < drawn.max() <= 1
    inertia = batch.expanded("body_inertia")[:, 1:].sum(axis=2) / h1_2.body_inertia[1:].sum(axis=1)
    assert 0.8 - 1e-9 <= inertia.min() < inertia.max() <= 1.2 + 1e-9
    offset = batch.expanded("body_ipos")[:, 1] - h1_2.body_ipos[1]
    assert np.abs(offset).max() <= 0.02 + 1e-12


@pytest.mark.parametrize("rules", [RULES, RULES[:2], RULES[1::-1]], ids=["all", "mass-inertia", "inertia-mass"])
def test_what_is_drawn_does_not_depend_on_earlier_draws(h1_2, rules):
    fresh, parameters = batched(h1_2, 2)
    parameters.randomize(rules, np.arange(2), np.random.default_rng(7))
    used, parameters = batched(h1_2, 2)
    for seed in (1, 2, 3, 7):
        parameters.randomize(rules, np.arange(2), np.random.default_rng(seed))
    for field in MODEL_FIELDS:
        if fresh.expanded(field) is not None:
            np.testing.assert_array_equal(fresh.expanded(field), used.expanded(field), err_msg=field)


def test_randomizing_some_simulations_leaves_the_others(h1_2):
    batch, parameters = batched(h1_2, 4)
    parameters.randomize(RULES, np.arange(4), np.random.default_rng(0))
    before = batch.expanded("body_mass").copy()
    parameters.randomize(RULES, np.array([1, 3]), np.random.default_rng(1))
    after = batch.expanded("body_mass")
    np.testing.assert_array_equal(after[[0, 2]], before[[0, 2]])
    assert (after[[1, 3], 1:] != before[[1, 3], 1:]).all()


def test_draws_are_uniform_over_the_range_and_shared_only_where_asked(h1_2):
    batch, parameters = batched(h1_2, 400)
    rules = (
        Randomize(pattern="joint.*.damping", lo=1.0, hi=3.0, kind="value"),
        Randomize(pattern="joint.*.friction", lo=1.0, hi=3.0, kind="value", shared=True),
    )
    parameters.randomize(rules, np.arange(400), np.random.default_rng(0))
    own, shared = batch.expanded("dof_damping")[:, 6:], batch.expanded("dof_frictionloss")[:, 6:]
    assert own.mean() == pytest.approx(2.0, abs=0.02)
    assert own.std() == pytest.approx(2 / np.sqrt(12), abs=0.02)
    assert (np.ptp(own, axis=1) > 0.5).all()
    assert (np.ptp(shared, axis=1) == 0).all()
    assert np.ptp(shared[:, 0]) > 1.8


@pytest.mark.parametrize("variety", [0.0, 0.3])
def test_little_variety_draws_in_towards_the_nominal(h1_2, variety):
    batch, parameters = batched(h1_2, 50)
    parameters.randomize(RULES, np.arange(50), np.random.default_rng(0), variety)
    mass = batch.expanded("body_mass")[:, 1:] / h1_2.body_mass[1:] - 1
    assert np.abs(mass).max() == pytest.approx(0.2 * variety, rel=0.02, abs=1e-12)
    delay = batch.expanded("actuator_delay")
    assert delay.max() == pytest.approx(0.02 * variety, rel=0.1, abs=1e-12)
    heel = batch.expanded("geom_friction")[:, h1_2.geom("left_heel_left").id, 0]
    assert heel.min() == pytest.approx(1 - 0.6 * variety, rel=0.05)
    assert parameters.nominal("actuator.left_knee.delay") == [0.0]


def test_a_scaled_inertia_stays_that_of_a_body(h1_2):
    _, parameters = batched(h1_2, 50)
    rule = Randomize(pattern="link.*.inertia", lo=0.5, hi=1.5)
    parameters.randomize((rule,), np.arange(50), np.random.default_rng(0))


@pytest.mark.parametrize(
    ("pattern", "count"),
    [
        ("joint.left_knee_joint.damping", 1),
        ("joint.left_knee.damping", 1),
        ("joint.*_knee.damping", 2),
        ("joint.*_knee_joint.damping", 2),
        ("link.left_knee.mass", 1),
        ("link.left_knee_link.mass", 1),
        ("link.pelvis.mass", 1),
        ("actuator.*.k?", 54),
        ("joint.*.damping", 27),
        ("*.torso.*", 3 + 4 + 4),
    ],
)
def test_globs_match_with_and_without_suffix(h1_2, pattern, count):
    assert len(Parameters(h1_2).match(pattern)) == count


def test_joint_globs_leave_the_floating_base_alone(h1_2):
    batch, parameters = batched(h1_2, 1)
    parameters.assign("joint.*.damping", 2.0)
    assert (batch.expanded("dof_damping")[0, :6] == 0).all()
    assert (batch.expanded("dof_damping")[0, 6:] == 2).all()


@pytest.mark.parametrize(
    ("name", "nearest"),
    [
        ("joint.left_kne.damping", "joint.left_knee_joint.damping"),
        ("link.pelvs.mass", "link.pelvis.mass"),
        ("actuator.torso.kpp", "actuator.torso_joint.kp"),
    ],
)
def test_unknown_names_list_the_nearest(h1_2, name, nearest):
    with pytest.raises(UnknownNameError, match=name) as error:
        Parameters(h1_2).assign(name, 1.0)
    assert nearest in str(error.value)


@pytest.mark.parametrize(
    ("name", "value", "message"),
    [
        ("link.pelvis.mass", -1.0, "link.pelvis.mass must be positive, got -1"),
        ("link.pelvis.mass", 0.0, "must be positive"),
        ("link.*.mass", np.nan, "must be finite"),
        ("link.pelvis.com", [0.0, np.inf, 0.0], "must be finite"),
        ("link.pelvis.inertia", [1.0, 1.0, 3.0, 0, 0, 0], "not the inertia of any body"),
        ("link.pelvis.inertia", [1.0, 1.0, 1.0, 2.0, 0, 0], "not the inertia of any body"),
        ("link.pelvis.inertia", [-1.0, 1.0, 1.0, 0, 0, 0], "not the inertia of any body"),
        ("joint.left_knee.damping", -0.1, "must not be negative"),
        ("joint.left_knee.friction", -0.1, "must not be negative"),
        ("joint.left_knee.armature", -0.1, "must not be negative"),
        ("actuator.left_knee.kp", -0.1, "must not be negative"),
        ("actuator.left_knee.gain", -0.1, "must not be negative"),
        ("actuator.left_knee.delay", -0.001, "must not be negative"),
        ("actuator.left_knee.delay", 0.021, "must not be above 0.02 s"),
        ("contact.left_heel_left.friction", -0.1, "must not be negative"),
        ("link.pelvis.com", [1.0, 2.0], "takes one value, 3 values"),
        ("joint.left_knee.damping", [1.0, 2.0], "takes one value, 1 values"),
    ],
)
def test_values_without_physical_meaning_are_refused_and_nothing_is_set(h1_2, name, value, message):
    model = clone(h1_2)
    with pytest.raises(UserError, match=message):
        Parameters(model).assign(name, value)
    for field in ("body_mass", "body_inertia", "body_ipos", "actuator_delay", "dof_damping", "geom_friction"):
        np.testing.assert_array_equal(getattr(model, field), getattr(h1_2, field))


def test_a_rule_that_draws_nonsense_is_refused(h1_2):
    parameters = Parameters(clone(h1_2))
    rule = Randomize(pattern="link.pelvis.mass", lo=-2.0, hi=-1.0, kind="value")
    with pytest.raises(UserError, match="must be positive"):
        parameters.randomize((rule,), np.array([0]), np.random.default_rng(0))


def test_scaling_a_zero_is_refused(h1_2):
    rule = Randomize(pattern="joint.*.stiffness", lo=0.5, hi=1.5)
    with pytest.raises(UserError, match="nominally zero"):
        Parameters(clone(h1_2)).randomize((rule,), np.array([0]), np.random.default_rng(0))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"lo": 2.0, "hi": 1.0}, "lo <= hi"),
        ({"lo": float("nan"), "hi": 1.0}, "finite"),
        ({"lo": 0.0, "hi": 1.0, "kind": "scal"}, "did you mean scale"),
    ],
)
def test_a_rule_says_what_is_wrong_with_it(change, message):
    with pytest.raises(UserError, match=message):
        Randomize(pattern="link.*.mass", **change)


def test_values_may_be_given_once_per_width_per_simulation_or_per_match(h1_2):
    batch, parameters = batched(h1_2, 2)
    parameters.assign("joint.*_knee.damping", 1.0)
    parameters.assign("joint.torso.damping", [2.0, 3.0])
    parameters.assign("joint.*_hip_roll.damping", np.array([[[4.0], [5.0]], [[6.0], [7.0]]]))
    parameters.assign("link.pelvis.com", [0.1, 0.2, 0.3], np.array([1]))
    damping = batch.expanded("dof_damping")

    def of(joint: str) -> list[float]:
        return damping[:, h1_2.joint(joint).dofadr[0]].tolist()

    assert of("left_knee_joint") == of("right_knee_joint") == [1.0, 1.0]
    assert of("torso_joint") == [2.0, 3.0]
    assert of("left_hip_roll_joint") == [4.0, 6.0]
    assert of("right_hip_roll_joint") == [5.0, 7.0]
    np.testing.assert_array_equal(batch.expanded("body_ipos")[:, 1], [h1_2.body_ipos[1], [0.1, 0.2, 0.3]])


def test_nominal_means_one_parameter(h1_2):
    parameters = Parameters(h1_2)
    assert parameters.nominal("actuator.left_knee.kp") == [300.0]
    assert len(parameters.nominal("link.torso.inertia")) == WIDTH["inertia"]
    with pytest.raises(UserError, match="2 match"):
        parameters.nominal("actuator.*_knee.kp")


def test_bookkeeping_can_be_carried_over(h1_2):
    source, parameters = batched(h1_2, 2)
    parameters.randomize(RULES, np.arange(2), np.random.default_rng(0))
    target, restored = batched(h1_2, 2)
    restored.restore(parameters.state())
    for field in ("body_mass", "body_inertia", "body_iquat", "actuator_gainprm", "actuator_biasprm"):
        target.expand(field)[:] = source.expanded(field)
    for p in (parameters, restored):
        p.assign("actuator.*.gain", 0.7)
        p.assign("link.torso.mass", 20.0)
    for field in ("body_mass", "body_inertia", "actuator_gainprm", "actuator_biasprm"):
        np.testing.assert_array_equal(source.expanded(field), target.expanded(field))
