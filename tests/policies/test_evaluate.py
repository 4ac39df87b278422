import json
import math
import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from rich.console import Console

from policies import evaluate as room
from policies.contract import ContractError, JointTargets, load_policy, read_contract
from policies.evaluate import (
    PERTURBATIONS,
    SCENARIOS,
    TARGETS,
    Episodes,
    Estimate,
    EvaluateConfig,
    Evaluation,
    Perturbation,
    ScenarioConfig,
    Servo,
    Setup,
    bootstrap,
    change_rules,
    cycle_error,
    drift,
    evaluate,
    measure,
    parse_changes,
    robustness,
    run_evaluate,
    score_policy,
    set_up,
    wilson,
)
from robots.errors import UnknownNameError, UserError

ROOT = Path(__file__).parents[2]
DT = 0.02
QUICK = {"episodes": 3, "seconds": 0.2, "threads": 1}
NAN = float("nan")


def episodes_of(velocity=None, command=(0.7, 0.0, 0.2), alive=None, **changes) -> Episodes:
    """Robots (T, N) that follow the command exactly unless told otherwise."""
    steps, num = np.shape(alive) if alive is not None else (100, 2)
    alive = np.ones((steps, num), bool) if alive is None else np.asarray(alive)
    velocity = np.tile(command[:2], (steps, num, 1)) if velocity is None else velocity
    zeros = np.zeros((steps, num))
    fields = {
        "yaw_rate": np.full((steps, num), command[2]),
        "position": np.zeros((steps + 1, num, 2)),
        **dict.fromkeys(("power", "torque_hits", "velocity_hits", "position_hits"), zeros),
    }
    return Episodes(dt=DT, command=command, alive=alive, velocity=velocity, **fields | changes)


def values(episodes: Episodes) -> dict[str, float | None]:
    return {k: v.value for k, v in measure(episodes, cycle=0.8, mass=70.0).items()}


# metrics


def test_a_robot_that_does_as_told_has_no_error():
    found = values(episodes_of())
    assert (found["e_vel"], found["e_ang"], found["survival"]) == (0.0, 0.0, 1.0)
    assert found["e_vel_mean"] == pytest.approx(0.0, abs=1e-12)
    assert found["yaw_ratio"] == pytest.approx(1.0)
    assert found["seconds"] == pytest.approx(2.0)
    assert found["forward"] == pytest.approx(0.7)


def test_errors_are_distances_in_the_plane_and_absolute_rates():
    velocity = np.tile([0.7 + 0.3, -0.4], (100, 2, 1))
    found = values(episodes_of(velocity, yaw_rate=np.full((100, 2), -0.1)))
    assert found["e_vel"] == pytest.approx(0.5)
    assert found["e_vel_mean"] == pytest.approx(0.5)
    assert found["e_ang"] == pytest.approx(0.3)
    assert found["yaw_ratio"] == pytest.approx(-0.5)


def test_sway_within_a_gait_cycle_counts_in_e_vel_only():
    sway = 0.2 * np.sin(2 * np.pi * np.arange(100) * DT / 0.8)
    velocity = np.tile([0.7, 0.0], (100, 2, 1)) + sway[:, None, None] * [0.0, 1.0]
    found = values(episodes_of(velocity))
    assert found["e_vel"] == pytest.approx(0.2 * 2 / np.pi, rel=0.02)
    assert found["e_vel_mean"] == pytest.approx(0.0, abs=1e-12)


def test_what_comes_after_a_fall_does_not_count():
    alive = np.ones((100, 2), bool)
    alive[50:, 1] = False
    velocity = np.tile([0.7, 0.0], (100, 2, 1))
    velocity[:50, 1, 0] += 0.2
    velocity[50:, 1] = NAN
    broken = np.zeros((100, 2))
    broken[50:, 1] = NAN
    found = measure(episodes_of(velocity, alive=alive, power=broken, yaw_rate=broken + 0.2), cycle=0.8, mass=70.0)
    assert found["survival"] == wilson(1, 2)
    assert found["seconds"].value == pytest.approx(1.5)
    assert found["e_vel"].value == pytest.approx(0.1)  # mean over episodes, not over steps
    assert found["e_vel_mean"].value == pytest.approx(0.1)
    assert (found["e_ang"].value, found["power"].value) == (0.0, 0.0)


def test_a_robot_that_falls_in_its_first_step_counts_for_survival_alone():
    alive = np.ones((100, 2), bool)
    alive[:, 1] = False
    found = values(episodes_of(np.tile([0.8, 0.0], (100, 2, 1)), alive=alive))
    assert found["survival"] == 0.5
    assert found["e_vel"] == pytest.approx(0.1)
    assert values(episodes_of(alive=np.zeros((100, 2), bool)))["e_vel"] is None


def test_lives_shorter_than_a_gait_cycle_have_no_cycle_error():
    alive = np.ones((100, 2), bool)
    alive[39:, 1] = False
    assert np.isnan(cycle_error(episodes_of(alive=alive), window=40)).tolist() == [False, True]
    assert np.isnan(cycle_error(episodes_of(alive=alive), window=101)).all()


def test_drift_is_net_displacement_over_the_time_alive():
    time = np.arange(101) * DT
    circle = np.stack([np.cos(np.pi * time), np.sin(np.pi * time)], axis=1)  # one turn in 2 s, half of it in 1 s
    line = np.stack([0.03 * time, -0.04 * time], axis=1)
    alive = np.ones((100, 3), bool)
    alive[50:, 2] = False
    position = np.stack([circle, line, circle], axis=1)
    found = drift(episodes_of(alive=alive, position=position))
    np.testing.assert_allclose(found, [0.0, 0.05, 2.0], atol=1e-12)


def test_drift_ratio_and_cost_are_given_only_where_they_mean_something():
    standing, turning = values(episodes_of(command=(0.0, 0.0, 0.0))), values(episodes_of(command=(0.0, 0.0, 0.6)))
    assert "drift" in standing
    assert not {"yaw_ratio", "cost_of_transport"} & set(standing)
    assert "yaw_ratio" in turning
    assert not {"drift", "cost_of_transport"} & set(turning)


def test_cost_of_transport_is_power_over_weight_and_speed():
    found = values(episodes_of(power=np.full((100, 2), 140.0)))
    assert found["cost_of_transport"] == pytest.approx(140.0 / (70.0 * 9.81 * 0.7))
    still = values(episodes_of(np.zeros((100, 2, 2)), power=np.full((100, 2), 140.0)))
    assert still["cost_of_transport"] is None


@pytest.mark.parametrize(
    ("successes", "trials", "lo", "hi"), [(0, 10, 0.0, 0.2775), (10, 10, 0.7225, 1.0), (5, 10, 0.2366, 0.7634)]
)
def test_wilson_intervals_agree_with_published_ones(successes, trials, lo, hi):
    found = wilson(successes, trials)
    assert found.value == successes / trials
    assert (found.lo, found.hi) == (pytest.approx(lo, abs=5e-5), pytest.approx(hi, abs=5e-5))


def test_bootstrap_agrees_with_the_normal_interval_of_many_values():
    drawn = np.random.default_rng(1).normal(3.0, 2.0, 1000)
    found = bootstrap(np.append(drawn, NAN))
    assert found.value == pytest.approx(drawn.mean())
    assert found.hi - found.lo == pytest.approx(2 * 1.96 * drawn.std() / math.sqrt(1000), rel=0.1)
    assert found.lo < drawn.mean() < found.hi


def test_one_value_has_no_interval_and_none_no_mean():
    assert bootstrap(np.array([2.0])) == Estimate(value=2.0)
    assert bootstrap(np.array([NAN])) == Estimate(value=None)


# the plant


def test_the_plant_is_the_reference_whatever_was_trained_on(hold):
    _, task = set_up(read_contract(hold), Setup(num=1, seconds=1.0, seed=0))
    plant = task.plant
    assert (plant.timestep, plant.decimation, plant.collision, plant.solver) == (0.002, 10, "full", "accurate")
    assert (plant.lock, plant.fuse, plant.ground, plant.randomize, dict(plant.sensors)) == ((), False, None, (), {})


def test_the_plant_runs_at_the_rate_of_the_policy(make_policy):
    _, task = set_up(read_contract(make_policy(rate_hz=100.0)), Setup(num=1, seconds=1.0, seed=0))
    assert (task.plant.timestep, task.plant.decimation) == (0.002, 5)
    with pytest.raises(UserError, match="no multiple"):
        evaluate(make_policy(rate_hz=30.0), ["stand"], **QUICK)


@pytest.mark.parametrize("name", sorted(PERTURBATIONS))
def test_a_perturbation_changes_what_it_names_by_that_much(hold, name):
    setup = Setup(num=2, seconds=1.0, seed=0, threads=1)
    perturbation = PERTURBATIONS[name]
    nominal, _ = set_up(read_contract(hold), setup)
    env, task = set_up(read_contract(hold), replace(setup, perturbation=perturbation))

    def field(environment, name):
        return np.array(environment.backend.batch.expand(name))

    for pattern, change in perturbation.set_parameters.items():
        attribute = pattern.rpartition(".")[2]
        column = {"armature": "dof_armature", "mass": "body_mass", "delay": "actuator_delay"}.get(attribute)
        if column is None:
            soles = [g for g in range(env.backend.model.ngeom) if "_heel_" in env.backend.model.geom(g).name]
            assert len(soles) == 4
            np.testing.assert_allclose(field(env, "geom_friction")[:, soles, 0], change)
        elif isinstance(change, str):
            now, before = field(env, column), field(nominal, column)
            np.testing.assert_allclose(now, before * float(change[1:]))
            assert not np.allclose(now, before)
        else:
            np.testing.assert_allclose(field(env, column), change)
    assert bool(task.plant.sensors) == (name == "sensor_noise")


def test_a_delay_beyond_that_of_training_can_be_asked_for(hold):
    setup = Setup(num=1, seconds=1.0, seed=0, perturbation=Perturbation(set_parameters={"actuator.*.delay": 0.05}))
    env, _ = set_up(read_contract(hold), setup)
    np.testing.assert_allclose(env.backend.batch.expand("actuator_delay"), 0.05)


def test_the_servos_have_the_gains_of_the_contract(make_policy, h1_2):
    output = JointTargets.of(h1_2)
    softer = replace(output, stiffness=tuple(0.5 * k for k in output.stiffness))
    env, _ = set_up(read_contract(make_policy(output=softer)), Setup(num=1, seconds=1.0, seed=0))
    np.testing.assert_allclose(env.backend.batch.expand("actuator_gainprm")[0, :, 0], softer.stiffness)
    np.testing.assert_allclose(env.backend.batch.expand("actuator_biasprm")[0, :, 2], [-kd for kd in output.damping])


def test_an_effort_limit_that_the_plant_cannot_have_is_refused(make_policy, h1_2):
    output = JointTargets.of(h1_2)
    weaker = replace(output, effort_limit=(output.effort_limit[0] / 2, *output.effort_limit[1:]))
    with pytest.raises(UserError, match=r"output\.effort_limit\[left_hip_yaw_joint\]"):
        evaluate(make_policy(output=weaker), ["stand"], **QUICK)


def test_joints_that_a_policy_leaves_out_hold_the_default_pose(make_policy, h1_2):
    legs = h1_2.group("legs")
    servo = Servo(load_policy(make_policy(joints=legs)), h1_2, 2)
    np.testing.assert_array_equal(
        servo({"command": np.zeros((2, 3))}), np.tile(h1_2.array("default_pos"), (2, 1)).astype("f")
    )


def test_targets_are_kept_within_the_limits_of_the_contract(make_policy, h1_2):
    output = JointTargets.of(h1_2)
    narrow = replace(output, pos_limit=((0.1, 0.2), *output.pos_limit[1:]))
    servo = Servo(load_policy(make_policy(output=narrow)), h1_2, 1)
    assert servo({"command": np.zeros((1, 3))})[0, 0] == np.float32(0.1)


def test_a_push_sets_the_base_velocity_at_its_time_and_not_before(hold):
    def velocities(push_at):
        setup = Setup(num=4, seconds=0.4, seed=3, threads=1, push_at=push_at)
        env, task = set_up(read_contract(hold), setup)
        servo, seen = Servo(load_policy(hold), task.spec, 4), []
        for _ in range(20):
            env.step(servo(env.signals))
            seen.append(env.backend.batch.bind("qvel")[:, :2].copy())
        return np.array(seen)

    pushed, free = velocities((0.2,)), velocities(())
    np.testing.assert_array_equal(pushed[:9], free[:9])
    assert (np.abs(pushed[9]) <= room.PUSH_SPEED).all()
    assert (np.abs(pushed[9] - free[9]).max(axis=1) > 0.01).all()


# evaluation


def test_a_policy_that_holds_its_pose_falls(hold):
    found = evaluate(hold, ["stand"], episodes=4, seconds=4.0, threads=1)
    assert found.value("stand", "survival") == 0.0
    assert 0.5 < found.value("stand", "seconds") < 3.5
    assert found.value("stand", "drift") > 0.1
    assert found.value("stand", "power") > 1.0
    assert {(t.scenario, t.metric) for t in found.missed()} == {("stand", "drift")}


def test_an_evaluation_depends_on_its_seed_alone(hold):
    settings = {"scenarios": ["medium"], "episodes": 3, "seconds": 0.3, "noise": True}
    first = evaluate(hold, seed=1, threads=1, **settings)
    assert evaluate(hold, seed=1, threads=2, **settings).to_dict() == first.to_dict()
    assert evaluate(hold, seed=2, threads=1, **settings).scenarios != first.scenarios


def test_own_scenarios_can_be_evaluated(hold):
    mine = ScenarioConfig(name="mine", command=(0.2, 0.0, 0.0), push_at=(0.1,))
    found = evaluate(hold, [mine, "stand"], **QUICK)
    assert list(found.scenarios) == ["mine", "stand"]
    assert found.protocol["scenarios"]["mine"] == {"command": [0.2, 0.0, 0.0], "push_at": [0.1]}


def test_a_changed_plant_changes_the_figures(hold):
    def power(**changes):
        return evaluate(hold, ["stand"], **QUICK, **changes).value("stand", "power")

    nominal = power()
    assert power(set_parameters={"actuator.*.delay": 0.0}) == nominal
    assert power(set_parameters={"link.*.mass": "x1.1"}) != nominal
    assert power(set_parameters={"joint.*.armature": "x0.7"}) != nominal


def test_robustness_gives_one_evaluation_per_perturbation(hold):
    chosen = {name: PERTURBATIONS[name] for name in ("delay_0ms", "mass_x1.1")}
    seen = []
    found = robustness(
        hold, chosen, ["stand"], **QUICK, progress=lambda name, done, total: seen.append((name, done, total))
    )
    assert list(found) == list(chosen)
    assert found["delay_0ms"].scenarios == evaluate(hold, ["stand"], **QUICK).scenarios
    assert seen == [(f"{name} stand", k + 1, 10) for name in chosen for k in range(10)]


def test_output_that_is_not_finite_is_named(make_policy):
    path = make_policy(breaks=True)
    scenario = ScenarioConfig(name="right", command=(0.0, -0.5, 0.0))
    with pytest.raises(UserError, match=r"scenario right: joint_targets\[row 0, left_hip_yaw_joint\].*nan"):
        evaluate(path, ["stand", scenario], **QUICK)


def test_a_policy_of_another_robot_model_is_refused(make_policy):
    with pytest.raises(ContractError, match="model_hash"):
        evaluate(make_policy(model_hash="0" * 64), **QUICK)


def test_unknown_names_are_answered_with_the_nearest(hold, make_policy):
    with pytest.raises(UnknownNameError, match="medium"):
        evaluate(hold, ["medum"], **QUICK)
    with pytest.raises(UnknownNameError, match="parameter"):
        evaluate(hold, ["stand"], **QUICK, set_parameters={"joint.*.armatur": "x0.7"})
    with pytest.raises(UnknownNameError, match="velocity"):
        evaluate(make_policy(task="velocty"), **QUICK)


@pytest.mark.parametrize(("episodes", "seconds"), [(0, 1.0), (1, 0.0), (1, NAN)])
def test_an_evaluation_of_nothing_is_refused(hold, episodes, seconds):
    with pytest.raises(UserError, match="expected at least 1 episode"):
        evaluate(hold, ["stand"], episodes=episodes, seconds=seconds)


# changes


def test_changes_are_read_as_values_and_factors():
    assert parse_changes(["joint.*.armature=x0.7", "actuator.*.delay=0.02"]) == {
        "joint.*.armature": "x0.7",
        "actuator.*.delay": 0.02,
    }
    factor, value = change_rules({"a": "x0.7", "b": 0.4})
    assert (factor.kind, factor.lo, factor.hi) == ("scale", 0.7, 0.7)
    assert (value.kind, value.lo, value.hi) == ("value", 0.4, 0.4)


@pytest.mark.parametrize("text", ["joint.*.armature", "=1", "a=", "a=x", "a=heavy", "a=nan"])
def test_changes_that_mean_nothing_are_refused(text):
    with pytest.raises(UserError, match="expected"):
        change_rules(parse_changes([text]))


# scores


def test_scores_are_json_and_hold_intervals_and_protocol(hold):
    tree = json.loads(
        json.dumps(evaluate(hold, ["stand", "turn_left", "turn_right"], **QUICK).to_dict(), allow_nan=False)
    )
    lo, hi = tree["stand"]["drift_ci"]
    assert lo <= tree["stand"]["drift"] <= hi
    assert tree["stand_drift"] == tree["stand"]["drift"]
    assert tree["yaw_ratio"] == min(tree["turn_left"]["yaw_ratio"], tree["turn_right"]["yaw_ratio"])
    assert tree["protocol"]["plant"] == {"timestep": 0.002, "decimation": 10, "collision": "full", "solver": "accurate"}
    assert tree["protocol"]["episodes"] == 3


def test_scores_are_written_into_the_policy_file(make_policy, h1_2):
    path = make_policy()
    before = read_contract(path)
    evaluation = evaluate(path, ["stand"], **QUICK)
    assert score_policy(path, evaluation, {"delay_0ms": evaluation}) is evaluation
    after = read_contract(path)
    assert replace(after, evaluation={}) == before
    assert after.evaluation["stand"]["drift"] == evaluation.value("stand", "drift")
    assert after.evaluation["robustness"]["delay_0ms"]["stand"] == after.evaluation["stand"]
    assert load_policy(path, h1_2).contract.evaluation == after.evaluation


def test_every_target_is_about_a_scenario_and_a_metric_that_exist():
    for target in TARGETS:
        episodes = episodes_of(command=SCENARIOS[target.scenario].command)
        assert target.metric in measure(episodes, cycle=0.8, mass=70.0)


def test_targets_that_are_reached_are_not_missed():
    reached = {}
    for t in TARGETS:
        reached.setdefault(t.scenario, {})[t.metric] = Estimate(value=t.value)
    assert Evaluation(scenarios=reached, protocol={}, steps_per_s=1.0).missed() == []
    reached["easy"]["survival"] = Estimate(value=0.999)
    missed = Evaluation(scenarios=reached, protocol={}, steps_per_s=1.0).missed()
    assert [(t.scenario, t.metric) for t in missed] == [("easy", "survival")]


# command line


def test_the_command_prints_a_table_writes_json_and_says_what_is_missed(hold, tmp_path):
    console = Console(record=True, width=120)
    out = tmp_path / "scores.json"
    config = EvaluateConfig(policy=hold, scenarios=("stand",), episodes=2, seconds=0.2, threads=1, out=out, check=True)
    assert run_evaluate(config, console) == 1
    printed = console.export_text()
    assert "drift [m/s]" in printed
    assert "missed: stand drift" in printed
    assert json.loads(out.read_text())["stand"]["survival"] == 1.0
    assert run_evaluate(replace(config, check=False), console) == 0


def test_a_run_folder_stands_for_the_policy_in_it(hold):
    assert evaluate(hold.parent, ["stand"], **QUICK).scenarios == evaluate(hold, ["stand"], **QUICK).scenarios


def test_evaluation_needs_no_torch():
    code = "import sys; sys.modules['torch'] = None; import policies.evaluate, policies.play, policies.report"
    env = os.environ | {"PYTHONPATH": str(ROOT)}
    subprocess.run([sys.executable, "-c", code], check=True, env=env)
