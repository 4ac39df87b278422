"""Evaluate a policy file on the reference plant: how well it follows commands, whether it falls, what it costs.

Needs neither torch nor the training code: numpy, onnxruntime and MuJoCo.

Every figure comes from whole episodes, which start in the default pose (with the task's small noise on angles and
speeds) and count from their first step; a fall ends an episode. The plant is the same whatever was trained on: 2 ms
physics steps, all joints, all collisions, MuJoCo's own solver, perfect sensors, no delay, flat ground
(`sim.backend.reference_plant`). Linear and angular velocity are commanded together.

Metrics are means over the steps that a robot is up, then over episodes, with 95 % intervals:

    survival           share of episodes that last to the time limit                           (Wilson interval)
    seconds            time until the fall or the time limit [s]
    e_vel              |v_command - v| of the horizontal base velocity, in the base frame [m/s]
    e_vel_mean         the same of the velocity averaged over each gait cycle [m/s]
    e_ang              |w_command - w_z|, base frame [rad/s]
    forward, left      mean base velocity [m/s]
    turn               mean rate of turn [rad/s]
    yaw_ratio          mean rate of turn over the command, where one is given
    drift              net displacement over time, where the command is to stand [m/s]
    power              sum of |effort x speed| over the joints [W]
    cost_of_transport  power / (m g |mean velocity|), where there is a linear command
    torque_hits        share of joints and steps at 99 % of the effort limit or above
    velocity_hits      share of joints and steps above the speed limit
    position_hits      share of joints and steps at or beyond an end of the joint's range

Efforts and speeds are read once per control step, at its end: on a walking policy that gives 2 % less power and a tenth
fewer torque hits than reading them in every physics step. Intervals of all but survival are bootstrapped over
episodes (percentiles of 2,000 resamples with a fixed seed).
"""

import json
import math
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import numpy as np
import tyro
from numpy.typing import NDArray

from policies.contract import Policy, PolicyContract, SignalError, embed, load_policy, read_contract
from robots.errors import UnknownNameError, UserError
from robots.model import build_model
from robots.spec import RobotSpec
from sim.backend import PlantConfig, reference_plant
from sim.environment import Environment, EpisodeConfig, Step
from sim.parameters import Randomize
from sim.tasks import make_task
from sim.tasks.velocity import PushConfig, Velocity

if TYPE_CHECKING:
    from rich.console import Console

Float = NDArray[np.float64]
Bool = NDArray[np.bool_]
Change = float | str
Progress = Callable[[str, int, int], None]

PUSH_SPEED = 1.0
"""Each horizontal axis of the base velocity after a push is uniform in +- this [m/s], world frame."""
GRAVITY = 9.81
NEAR_LIMIT = 0.99
RESAMPLES = 2000
Z95 = 1.959963984540054
PIPE_WIDTH = 200
"""Columns of a table that goes to a file or another program, so that nothing is cut."""
POLICY_FILE = "policy.onnx"
"""Name of the policy file in a run folder."""


@dataclass(frozen=True, kw_only=True)
class ScenarioConfig:
    """What all robots of one evaluation are asked to do."""

    name: str
    """Name in results."""
    command: tuple[float, float, float]
    """Forward and left velocity [m/s] and rate of turn [rad/s], all at once, in the base frame."""
    push_at: tuple[float, ...] = ()
    """Times of the episode at which the base velocity is set to a random one [s]."""


TWO_PUSHES = (5.0, 15.0)
SCENARIOS = {
    s.name: s
    for s in (
        ScenarioConfig(name="easy", command=(0.7, 0.0, 0.2)),
        ScenarioConfig(name="medium", command=(1.0, 0.3, 0.4), push_at=TWO_PUSHES),
        ScenarioConfig(name="hard", command=(1.3, 0.6, 0.6), push_at=TWO_PUSHES),
        ScenarioConfig(name="stand", command=(0.0, 0.0, 0.0)),
        ScenarioConfig(name="turn_left", command=(0.0, 0.0, 0.6)),
        ScenarioConfig(name="turn_right", command=(0.0, 0.0, -0.6)),
    )
}
"""Scenarios by name."""


@dataclass(frozen=True, kw_only=True)
class Perturbation:
    """A plant unlike the nominal one."""

    set_parameters: Mapping[str, Change] = field(default_factory=dict)
    """Parameter glob to a value in its unit, or to a factor on the nominal value such as "x0.7"."""
    noise: bool = False
    """Whether sensors have the imperfections of the task's training plant."""


def _soles(friction: float) -> dict[str, Change]:
    return {"contact.*_heel_*.friction": friction, "contact.*_toe_*.friction": friction}


PERTURBATIONS = {
    "armature_x0.7": Perturbation(set_parameters={"joint.*.armature": "x0.7"}),
    "armature_x1.3": Perturbation(set_parameters={"joint.*.armature": "x1.3"}),
    "mass_x0.9": Perturbation(set_parameters={"link.*.mass": "x0.9"}),
    "mass_x1.1": Perturbation(set_parameters={"link.*.mass": "x1.1"}),
    "delay_0ms": Perturbation(set_parameters={"actuator.*.delay": 0.0}),
    "delay_10ms": Perturbation(set_parameters={"actuator.*.delay": 0.01}),
    "delay_20ms": Perturbation(set_parameters={"actuator.*.delay": 0.02}),
    "friction_0.4": Perturbation(set_parameters=_soles(0.4)),
    "friction_1.2": Perturbation(set_parameters=_soles(1.2)),
    "sensor_noise": Perturbation(noise=True),
}
"""Perturbations by name; delay_0ms is the nominal plant, to compare with."""
ROBUSTNESS_SCENARIOS = ("easy", "medium", "hard", "stand")


@dataclass(frozen=True, kw_only=True)
class Target:
    """What a metric should reach in a scenario."""

    scenario: str
    """Scenario name."""
    metric: str
    """Metric name."""
    bound: Literal["at least", "at most"]
    """Which side is good."""
    value: float
    """The figure."""

    def met(self, value: float) -> bool:
        """Whether a measured value reaches it."""
        return value >= self.value if self.bound == "at least" else value <= self.value


TARGETS = (
    Target(scenario="easy", metric="survival", bound="at least", value=1.0),
    Target(scenario="medium", metric="survival", bound="at least", value=0.98),
    Target(scenario="hard", metric="survival", bound="at least", value=0.95),
    Target(scenario="easy", metric="e_vel", bound="at most", value=0.10),
    Target(scenario="medium", metric="e_vel", bound="at most", value=0.20),
    Target(scenario="hard", metric="e_vel", bound="at most", value=0.32),
    Target(scenario="stand", metric="drift", bound="at most", value=0.02),
    Target(scenario="turn_left", metric="yaw_ratio", bound="at least", value=0.8),
    Target(scenario="turn_right", metric="yaw_ratio", bound="at least", value=0.8),
)
"""What a walking policy should reach on the nominal plant."""


# ---- results ---------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class Estimate:
    """A mean over episodes with its 95 % interval; None where nothing could be measured."""

    value: float | None
    """Mean."""
    lo: float | None = None
    """Lower end."""
    hi: float | None = None
    """Upper end."""


@dataclass(frozen=True, kw_only=True)
class Evaluation:
    """Metrics by scenario, and under which conditions they were measured."""

    scenarios: Mapping[str, Mapping[str, Estimate]]
    """Scenario name to metric name to estimate."""
    protocol: Mapping[str, object]
    """Plant, episodes, seed and limits, as JSON values."""
    steps_per_s: float
    """Control steps per second of wall time, over all robots."""

    def value(self, scenario: str, metric: str) -> float | None:
        """A metric's mean, None where it was not measured."""
        estimate = self.scenarios.get(scenario, {}).get(metric)
        return estimate.value if estimate else None

    @property
    def yaw_ratio(self) -> float | None:
        """The worse yaw_ratio of the scenarios that turn on the spot."""
        spots = [n for n in self.scenarios if n in SCENARIOS and SCENARIOS[n].command[:2] == (0.0, 0.0)]
        ratios = [r for r in (self.value(n, "yaw_ratio") for n in spots) if r is not None]
        return min(ratios, default=None)

    def missed(self) -> list[Target]:
        """Targets that were measured and not reached."""
        measured = [(t, self.value(t.scenario, t.metric)) for t in TARGETS]
        return [t for t, value in measured if value is not None and not t.met(value)]

    def to_dict(self) -> dict[str, Any]:
        """Scores as JSON values: `scenario.metric`, its interval as `scenario.metric_ci`, and the protocol."""
        scores: dict[str, Any] = {name: _flat(metrics) for name, metrics in self.scenarios.items()}
        return scores | {
            "yaw_ratio": self.yaw_ratio,
            "stand_drift": self.value("stand", "drift"),
            "protocol": dict(self.protocol),
        }


def _flat(metrics: Mapping[str, Estimate]) -> dict[str, Any]:
    scores: dict[str, Any] = {}
    for name, estimate in metrics.items():
        scores[name] = estimate.value
        scores[f"{name}_ci"] = None if estimate.lo is None else [estimate.lo, estimate.hi]
    return scores


# ---- metrics ---------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class Episodes:
    """What N robots did in T control steps of one scenario. Values after a robot's end are not looked at."""

    dt: float
    """Control step [s]."""
    command: tuple[float, float, float]
    """Commanded velocity [m/s, m/s, rad/s]."""
    alive: Bool
    """Whether the robot was still up after the step (T, N)."""
    velocity: Float
    """Horizontal base velocity in the base frame (T, N, 2) [m/s]."""
    yaw_rate: Float
    """Rate of turn, base frame (T, N) [rad/s]."""
    position: Float
    """World position of the base at the start and after each step (T + 1, N, 2) [m]."""
    power: Float
    """Sum of |effort x speed| over the joints (T, N) [W]."""
    torque_hits: Float
    """Share of joints at the effort limit (T, N)."""
    velocity_hits: Float
    """Share of joints above the speed limit (T, N)."""
    position_hits: Float
    """Share of joints at an end of their range (T, N)."""


def measure(episodes: Episodes, cycle: float, mass: float) -> dict[str, Estimate]:
    """The metrics of one scenario. `cycle` is the duration of a gait cycle [s], `mass` the robot's [kg]."""
    e, (forward, left, turn) = episodes, episodes.command
    steps = e.alive.sum(axis=0)
    mean_velocity = np.stack([_over_life(e.velocity[..., k], e.alive) for k in (0, 1)], axis=1)
    turning, power = _over_life(e.yaw_rate, e.alive), _over_life(e.power, e.alive)
    per_episode = {
        "seconds": steps * e.dt,
        "e_vel": _over_life(np.hypot(e.velocity[..., 0] - forward, e.velocity[..., 1] - left), e.alive),
        "e_vel_mean": cycle_error(e, max(1, round(cycle / e.dt))),
        "e_ang": _over_life(np.abs(e.yaw_rate - turn), e.alive),
        "forward": mean_velocity[:, 0],
        "left": mean_velocity[:, 1],
        "turn": turning,
        "power": power,
        "torque_hits": _over_life(e.torque_hits, e.alive),
        "velocity_hits": _over_life(e.velocity_hits, e.alive),
        "position_hits": _over_life(e.position_hits, e.alive),
    }
    if turn:
        per_episode["yaw_ratio"] = turning / turn
    if forward or left:
        speed = np.hypot(*mean_velocity.T)
        moves = speed > 1e-3  # below, the cost per metre says nothing
        per_episode["cost_of_transport"] = np.where(moves, power / (mass * GRAVITY * np.maximum(speed, 1e-3)), np.nan)
    if not any(e.command):
        per_episode["drift"] = drift(e)
    survived = int(e.alive[-1].sum())
    return {"survival": wilson(survived, e.alive.shape[1])} | {k: bootstrap(v) for k, v in per_episode.items()}


def cycle_error(episodes: Episodes, window: int) -> Float:
    """Mean |v_command - v averaged over `window` steps| of each episode (N,) [m/s]; NaN for shorter lives."""
    e = episodes
    error = np.full(e.alive.shape[1], np.nan)
    if window > len(e.alive):
        return error
    sums = np.cumsum(np.concatenate([np.zeros((1, *e.velocity.shape[1:])), e.velocity]), axis=0)
    averages = (sums[window:] - sums[:-window]) / window
    # A robot that is up after the window's last step was so in all of it.
    return _over_life(np.hypot(averages[..., 0] - e.command[0], averages[..., 1] - e.command[1]), e.alive[window - 1 :])


def drift(episodes: Episodes) -> Float:
    """Net displacement over time of each episode (N,) [m/s]; NaN where a robot fell in the first step."""
    steps = episodes.alive.sum(axis=0)
    last = np.take_along_axis(episodes.position, steps[None, :, None], axis=0)[0]
    distance = np.linalg.norm(last - episodes.position[0], axis=1)
    return _ratio(distance, steps * episodes.dt)


def _over_life(values: Float, alive: Bool) -> Float:
    """Mean (N,) over the steps (T, N) that a robot was up; NaN where there is none."""
    steps = alive.sum(axis=0)
    total = np.where(alive, values, 0.0).sum(axis=0)
    return _ratio(total, steps.astype(np.float64))


def _ratio(above: Float, below: Float) -> Float:
    """Quotient (N,), NaN where the divisor is zero."""
    return np.asarray(np.divide(above, below, out=np.full(len(below), np.nan), where=below > 0))


def wilson(successes: int, trials: int) -> Estimate:
    """A share with its 95 % Wilson score interval. Raises UserError for no trial."""
    if trials < 1:
        raise UserError("a share needs at least one trial")
    p, z2 = successes / trials, Z95**2
    centre = (p + z2 / (2 * trials)) / (1 + z2 / trials)
    half = Z95 / (1 + z2 / trials) * math.sqrt(p * (1 - p) / trials + z2 / (4 * trials**2))
    # At the ends the interval touches the share itself, but for rounding.
    return Estimate(value=p, lo=min(p, max(0.0, centre - half)), hi=max(p, min(1.0, centre + half)))


def bootstrap(values: Float) -> Estimate:
    """Mean of the finite values (N,) and its 95 % percentile-bootstrap interval; none for fewer than two values."""
    known = values[np.isfinite(values)]
    if len(known) < 2:
        return Estimate(value=float(known[0]) if len(known) else None)
    draws = np.random.default_rng(0).integers(0, len(known), (RESAMPLES, len(known)))
    lo, hi = np.percentile(known[draws].mean(axis=1), [2.5, 97.5])
    return Estimate(value=float(known.mean()), lo=float(lo), hi=float(hi))


# ---- the plant -------------------------------------------------------------------------------------------------------


def parse_changes(texts: Sequence[str]) -> dict[str, Change]:
    """Parameter changes from texts such as `joint.*.armature=x0.7` or `actuator.*.delay=0.02`. Raises UserError."""
    changes: dict[str, Change] = {}
    for text in texts:
        name, equals, value = text.rpartition("=")
        if not (equals and name):
            raise UserError(f"'{text}': expected PARAMETER=VALUE or PARAMETER=xFACTOR, as in 'joint.*.armature=x0.7'")
        changes[name] = value if value.startswith("x") else _number(value, text)
    return changes


def change_rules(changes: Mapping[str, Change]) -> tuple[Randomize, ...]:
    """Rules that set parameters: numbers are values in the parameter's unit, "x0.7" is a factor. Raises UserError."""
    rules = []
    for pattern, change in changes.items():
        factor = isinstance(change, str)
        number = _number(str(change).removeprefix("x"), f"{pattern}={change}") if factor else float(change)
        rules.append(Randomize(pattern=pattern, lo=number, hi=number, kind="scale" if factor else "value"))
    return tuple(rules)


def _number(text: str, where: str) -> float:
    try:
        value = float(text)
    except ValueError:
        value = math.nan
    if not math.isfinite(value):
        raise UserError(f"'{where}': expected a number, or a factor such as x0.7, found '{text}'")
    return value


def evaluation_plant(
    contract: PolicyContract, spec: RobotSpec, training: PlantConfig, perturbation: Perturbation
) -> PlantConfig:
    """The reference plant at the policy's rate, flat, with the servo gains of its contract and a perturbation.

    Raises UserError for a rate that 2 ms does not divide and for effort limits other than the robot's.
    """
    at_rate = replace(training, timestep=1 / contract.rate_hz, decimation=1, ground=None)
    rules = (*_gain_rules(contract, spec), *change_rules(perturbation.set_parameters))
    delays = [r.hi for r in rules if r.pattern.startswith("actuator.") and r.pattern.endswith(".delay")]
    return replace(
        reference_plant(at_rate),
        randomize=rules,
        max_delay=max([training.max_delay, *delays]),
        sensors=training.sensors if perturbation.noise else {},
    )


def _gain_rules(contract: PolicyContract, spec: RobotSpec) -> tuple[Randomize, ...]:
    """Rules for the servos whose gains the contract lowers."""
    out, rules = contract.output, []
    for i, joint in enumerate(spec.joint(n) for n in out.joints):
        if out.effort_limit[i] != joint.effort_limit:
            raise UserError(
                f"output.effort_limit[{joint.name}]: an evaluation simulates the robot's {joint.effort_limit} N m, the "
                f"policy asks for {out.effort_limit[i]} N m; export it with the robot's limit"
            )
        for parameter, wanted, own in (
            ("kp", out.stiffness[i], joint.stiffness),
            ("kd", out.damping[i], joint.damping),
        ):
            if wanted != own:
                name = f"actuator.{joint.name}.{parameter}"
                rules.append(Randomize(pattern=name, lo=wanted, hi=wanted, kind="value"))
    return tuple(rules)


@dataclass(frozen=True, kw_only=True)
class Setup:
    """How a policy is put on the reference plant."""

    num: int
    """Robots."""
    seconds: float
    """Length of an episode [s]."""
    seed: int
    """Seed of starting states, pushes and noise."""
    threads: int = 0
    """Threads of the simulation; 0 for all cores. Results do not depend on it."""
    command: tuple[float, float, float] = (0.0, 0.0, 0.0)
    """First command [m/s, m/s, rad/s]; changed through `task.fixed_command`."""
    push_at: tuple[float, ...] = ()
    """Times of pushes [s]."""
    perturbation: Perturbation = Perturbation()
    """Deviation from the nominal plant."""
    falls_end: bool = True
    """Whether a fall ends the episode."""


def set_up(contract: PolicyContract, setup: Setup) -> tuple[Environment, Velocity]:
    """An environment of the policy's task on the evaluation plant, reset, and the task.

    Raises UserError for a task that is not walking at a commanded velocity.
    """
    task = make_task(contract.task, contract.robot)
    if not isinstance(task, Velocity):
        raise UserError(
            f"task: expected one that commands a velocity (velocity, velocity-rough), found '{contract.task}'"
        )
    plant = evaluation_plant(contract, task.spec, task.plant, setup.perturbation)
    config = replace(
        task.config,
        plant=plant,
        episode=EpisodeConfig(seconds=setup.seconds, stagger="none"),
        push=PushConfig(speed=PUSH_SPEED, seconds=0.0),
        command=replace(task.config.command, seconds=plant.control_dt),  # a new command counts at once
    )
    if not setup.falls_end:
        config = replace(config, max_tilt=math.pi, min_height=-math.inf)
    task = Velocity(config)
    task.level = 1.0  # changed parameters count in full
    task.fixed_command = np.array(setup.command, np.float32)
    task.fixed_push = tuple(round(t / plant.control_dt) for t in setup.push_at)
    env = Environment(task, setup.num, setup.seed, threads=setup.threads)
    env.reset()
    return env, task


class Servo:
    """A policy's targets for all joints of the robot; joints that it leaves out hold the default pose."""

    def __init__(self, policy: Policy, spec: RobotSpec, num: int) -> None:
        """Reset `policy` for `num` robots."""
        policy.reset(num)
        self._policy, out = policy, policy.contract.output
        self._columns = spec.index(out.joints)
        self._limits = np.array(out.pos_limit, np.float32)
        self._targets = np.tile(spec.array("default_pos").astype(np.float32), (num, 1))

    def __call__(self, signals: Mapping[str, NDArray[Any]]) -> NDArray[np.float32]:
        """Joint targets (N, J) [rad] in spec order, within the contract's limits. Raises SignalError."""
        self._targets[:, self._columns] = np.clip(self._policy(signals), self._limits[:, 0], self._limits[:, 1])
        return self._targets


# ---- evaluation ------------------------------------------------------------------------------------------------------


def policy_file(path: str | Path) -> Path:
    """The policy file at `path`, or the one in the run folder `path`."""
    path = Path(path)
    return path / POLICY_FILE if path.is_dir() else path


def evaluate(
    path: str | Path,
    scenarios: Sequence[str | ScenarioConfig] = tuple(SCENARIOS),
    episodes: int = 200,
    seconds: float = 20.0,
    seed: int = 0,
    threads: int = 0,
    set_parameters: Mapping[str, Change] | None = None,
    noise: bool = False,
    progress: Progress | None = None,
) -> Evaluation:
    """Run a policy file through scenarios on the reference plant.

    Args:
        path: Policy file, or a run folder that holds one.
        scenarios: Names from SCENARIOS, or scenarios of your own.
        episodes: Robots per scenario, all at once.
        seconds: Length of an episode [s].
        seed: Seed of starting states, pushes and noise; each scenario starts from it.
        threads: Threads of the simulation; 0 for all cores. Results do not depend on it.
        set_parameters: Physical parameters unlike the nominal ones: glob to a value in its unit, or to "x0.7", a
            factor on the nominal value.
        noise: Give sensors the imperfections of the task's training plant.
        progress: Called with scenario, steps done and steps in all.

    Raises: ContractError for a file that the robot refuses, UserError for what cannot be evaluated or for a policy
        that puts out what is not finite, UnknownNameError.
    """
    path = policy_file(path)
    chosen = [_scenario(s) for s in scenarios]
    if episodes < 1 or not seconds > 0:
        raise UserError(f"expected at least 1 episode of more than 0 s, found {episodes} of {seconds} s")
    policy = load_policy(path)
    perturbation = Perturbation(set_parameters=set_parameters or {}, noise=noise)
    setup = Setup(num=episodes, seconds=seconds, seed=seed, threads=threads, perturbation=perturbation)
    results, steps, wall = {}, 0, 0.0
    for scenario in chosen:
        env, task = set_up(policy.contract, replace(setup, command=scenario.command, push_at=scenario.push_at))
        start = time.perf_counter()
        try:
            traces = run_episodes(policy, env, task, scenario, progress)
        except SignalError as error:
            raise UserError(f"{path}: scenario {scenario.name}: {error}") from error
        wall += time.perf_counter() - start
        steps += len(traces.alive) * episodes
        results[scenario.name] = measure(traces, task.config.gait.period, _mass(task.spec))
    return Evaluation(
        scenarios=results,
        protocol=_protocol(task, setup, chosen) if chosen else {},
        steps_per_s=steps / max(wall, 1e-9),
    )


def robustness(
    path: str | Path,
    perturbations: Mapping[str, Perturbation] | None = None,
    scenarios: Sequence[str | ScenarioConfig] = ROBUSTNESS_SCENARIOS,
    episodes: int = 200,
    seconds: float = 20.0,
    seed: int = 0,
    threads: int = 0,
    progress: Progress | None = None,
) -> dict[str, Evaluation]:
    """An evaluation for each perturbation (PERTURBATIONS by default); arguments and errors as for `evaluate`."""
    results = {}
    for name, perturbation in (PERTURBATIONS if perturbations is None else perturbations).items():
        results[name] = evaluate(
            path,
            scenarios,
            episodes,
            seconds,
            seed,
            threads,
            perturbation.set_parameters,
            perturbation.noise,
            None if progress is None else _prefixed(progress, name),
        )
    return results


def scores(evaluation: Evaluation, perturbed: Mapping[str, Evaluation] | None = None) -> dict[str, Any]:
    """Scores as JSON values; what perturbed plants gave stands under `robustness`, scenario by scenario."""
    tree = evaluation.to_dict()
    if perturbed:
        tree["robustness"] = {k: {s: _flat(m) for s, m in e.scenarios.items()} for k, e in perturbed.items()}
    return tree


def score_policy(
    path: str | Path, evaluation: Evaluation | None = None, perturbed: Mapping[str, Evaluation] | None = None
) -> Evaluation:
    """Write the scores of a policy into its file's contract, in place; evaluates it fully unless that is given.

    Needs the `onnx` package. Raises what `evaluate` and `policies.contract.embed` do.
    """
    path = policy_file(path)
    evaluation = evaluate(path) if evaluation is None else evaluation
    embed(path, replace(read_contract(path), evaluation=scores(evaluation, perturbed)), path)
    return evaluation


def run_episodes(
    policy: Policy, env: Environment, task: Velocity, scenario: ScenarioConfig, progress: Progress | None = None
) -> Episodes:
    """Step a freshly reset environment until each robot's first episode has ended. Raises SignalError."""
    servo, recorder = Servo(policy, task.spec, env.num_envs), _Recorder(env, task.spec, env.limit)
    for k in range(env.limit):
        recorder.add(k, env.step(servo(env.signals)))
        if progress is not None:
            progress(scenario.name, k + 1, env.limit)
        if not recorder.alive[k].any():
            break
    return recorder.episodes(task.plant.control_dt, scenario.command)


class _Recorder:
    """Fills the arrays of `Episodes` step by step."""

    def __init__(self, env: Environment, spec: RobotSpec, steps: int) -> None:
        self._env, n = env, env.num_envs
        self._effort = NEAR_LIMIT * spec.array("effort_limit")
        self._speed = spec.array("vel_limit")
        self._range = spec.array("pos_limit").T
        self.alive = np.zeros((steps, n), np.bool_)
        self._velocity, self._position = np.zeros((steps, n, 2)), np.zeros((steps + 1, n, 2))
        self._scalars = {k: np.zeros((steps, n)) for k in ("yaw_rate", "power", *HITS)}
        self._position[0] = env.signals["privileged.base_pos"][:, :2]

    def add(self, k: int, step: Step) -> None:
        """Take in the k-th control step."""
        self.alive[k] = ~step.failed if k == 0 else self.alive[k - 1] & ~step.failed

        def read(name: str) -> Float:
            values = self._env.signals[f"privileged.{name}"].astype(np.float64)
            if len(step.ended):
                values[step.ended] = step.final[f"privileged.{name}"]
            return values

        self._velocity[k] = read("base_lin_vel")[:, :2]
        self._position[k + 1] = read("base_pos")[:, :2]
        pos, vel, effort = read("joint_pos"), read("joint_vel"), read("joint_effort")
        values = {
            "yaw_rate": read("base_ang_vel")[:, 2],
            "power": np.abs(effort * vel).sum(axis=1),
            "torque_hits": (np.abs(effort) >= self._effort).mean(axis=1),
            "velocity_hits": (np.abs(vel) > self._speed).mean(axis=1),
            "position_hits": ((pos <= self._range[0]) | (pos >= self._range[1])).mean(axis=1),
        }
        for name, row in values.items():
            self._scalars[name][k] = row

    def episodes(self, dt: float, command: tuple[float, float, float]) -> Episodes:
        return Episodes(
            dt=dt,
            command=command,
            alive=self.alive,
            velocity=self._velocity,
            position=self._position,
            **self._scalars,
        )


HITS = ("torque_hits", "velocity_hits", "position_hits")


def _scenario(scenario: str | ScenarioConfig) -> ScenarioConfig:
    if isinstance(scenario, ScenarioConfig):
        return scenario
    if scenario not in SCENARIOS:
        raise UnknownNameError("scenario", scenario, SCENARIOS)
    return SCENARIOS[scenario]


def _mass(spec: RobotSpec) -> float:
    """Nominal mass of the robot [kg]."""
    return float(build_model(spec).body_mass.sum())


def _prefixed(progress: Progress, name: str) -> Progress:
    return lambda scenario, done, total: progress(f"{name} {scenario}", done, total)


def _protocol(task: Velocity, setup: Setup, scenarios: Sequence[ScenarioConfig]) -> dict[str, object]:
    """Everything that another evaluation must share for its figures to be comparable."""
    plant, config = task.plant, task.config
    return {
        "plant": {k: getattr(plant, k) for k in ("timestep", "decimation", "collision", "solver")},
        "episodes": setup.num,
        "seconds": setup.seconds,
        "seed": setup.seed,
        "scenarios": {s.name: {"command": list(s.command), "push_at": list(s.push_at)} for s in scenarios},
        "push_speed": config.push.speed,
        "start_noise": config.start_noise,
        "start_speed": config.start_speed,
        "max_tilt": config.max_tilt,
        "min_height": config.min_height,
        "set_parameters": dict(setup.perturbation.set_parameters),
        "sensors": {k: {**asdict(v), "delay": list(v.delay)} for k, v in plant.sensors.items()},
    }


# ---- for people ------------------------------------------------------------------------------------------------------

UNITS = {
    "survival": "",
    "seconds": "s",
    "e_vel": "m/s",
    "e_vel_mean": "m/s",
    "e_ang": "rad/s",
    "forward": "m/s",
    "left": "m/s",
    "turn": "rad/s",
    "yaw_ratio": "",
    "drift": "m/s",
    "power": "W",
    "cost_of_transport": "",
    "torque_hits": "%",
    "velocity_hits": "%",
    "position_hits": "%",
}
"""Metrics in the order of tables, with their units."""


def format_estimate(estimate: Estimate | None, scale: float = 1.0) -> str:
    """`scale` times a mean, +- half the width of its interval, in few digits; "-" where nothing was measured."""
    if estimate is None or estimate.value is None:
        return "-"
    value = scale * estimate.value
    digits = 0 if abs(value) >= 100 else 2 if abs(value) >= 10 else 3
    if estimate.lo is None or estimate.hi is None:
        return f"{value:.{digits}f}"
    return f"{value:.{digits}f} ±{scale * (estimate.hi - estimate.lo) / 2:.{digits}f}"


def find_target(scenario: str, metric: str) -> Target | None:
    """The target of a metric in a scenario, if there is one."""
    return next((t for t in TARGETS if (t.scenario, t.metric) == (scenario, metric)), None)


def show(evaluation: Evaluation, console: "Console", title: str = "") -> None:
    """Print metrics against scenarios; a figure with a target is green where it is reached, red where not."""
    from rich.box import SIMPLE_HEAD
    from rich.table import Table

    table = Table("metric", *evaluation.scenarios, box=SIMPLE_HEAD, pad_edge=False, title=title or None)
    for metric, unit in UNITS.items():
        if any(metric in m for m in evaluation.scenarios.values()):
            heading = f"{metric} \\[{unit}]" if unit else metric
            table.add_row(heading, *(_cell(evaluation, s, metric) for s in evaluation.scenarios))
    console.print(table)
    for target in evaluation.missed():
        value = evaluation.value(target.scenario, target.metric)
        console.print(f"missed: {target.scenario} {target.metric} {value:.3f}, {target.bound} {target.value:g}")
    console.print(f"{evaluation.steps_per_s:,.0f} control steps/s")


def _cell(evaluation: Evaluation, scenario: str, metric: str) -> str:
    scale = 100.0 if UNITS[metric] == "%" else 1.0
    text = format_estimate(evaluation.scenarios[scenario].get(metric), scale)
    target, value = find_target(scenario, metric), evaluation.value(scenario, metric)
    if target is None or value is None:
        return text
    return f"[green]{text}[/]" if target.met(value) else f"[red]{text}[/]"


def show_robustness(perturbed: Mapping[str, Evaluation], console: "Console") -> None:
    """Print survival and tracking error of each perturbation against scenarios, and the drift where it was measured."""
    from rich.box import SIMPLE_HEAD
    from rich.table import Table

    names = list(dict.fromkeys(s for e in perturbed.values() for s in e.scenarios))
    table = Table("perturbation", *names, box=SIMPLE_HEAD, pad_edge=False, title="survival, e_vel or drift [m/s]")
    for name, evaluation in perturbed.items():
        table.add_row(name, *(_summary(evaluation, s) for s in names))
    console.print(table)


def _summary(evaluation: Evaluation, scenario: str) -> str:
    survival = evaluation.value(scenario, "survival")
    drifted = evaluation.value(scenario, "drift")
    error = evaluation.value(scenario, "e_vel") if drifted is None else drifted
    return "-" if survival is None or error is None else f"{survival:.3f}  {error:.3f}"


@dataclass(frozen=True, kw_only=True)
class EvaluateConfig:
    """Measure how well a policy walks: fixed scenarios on the reference plant (2 ms steps, all joints and collisions).

    Linear and angular velocity are commanded together: easy (0.7, 0, 0.2), medium (1.0, 0.3, 0.4),
    hard (1.3, 0.6, 0.6), stand, turn_left and turn_right (0, 0, +-0.6) [m/s, m/s, rad/s]; medium and hard with pushes
    at 5 s and 15 s.
    """

    policy: Annotated[Path, tyro.conf.Positional]
    """Policy file, or a run folder that holds one."""
    scenarios: tuple[str, ...] = tuple(SCENARIOS)
    """Scenarios to run."""
    episodes: int = 200
    """Robots per scenario."""
    seconds: float = 20.0
    """Length of an episode [s]."""
    seed: int = 0
    """Seed of starting states, pushes and noise."""
    threads: int = 0
    """Threads of the simulation; 0 for all cores. Results do not depend on it."""
    set: tuple[str, ...] = ()
    """Physical parameters unlike the nominal ones, such as joint.*.armature=x0.7 or actuator.*.delay=0.02."""
    noise: bool = False
    """Give sensors the noise and bias of training."""
    robust: bool = False
    """Also run the sweep over armature, mass, delay, friction and sensor noise."""
    embed: bool = False
    """Write the scores into the policy file."""
    out: Path | None = None
    """JSON file for the scores."""
    check: bool = False
    """Exit with 1 if a target is missed."""


def run_evaluate(config: EvaluateConfig, console: "Console | None" = None) -> int:
    """Evaluate as the command line asks, with a progress bar; returns the exit status. Raises as `evaluate` does."""
    from rich.console import Console

    console = console or Console()
    if not console.is_terminal:
        console.width = PIPE_WIDTH
    settings = (config.episodes, config.seconds, config.seed, config.threads)
    with _Bar(console) as bar:
        evaluation = evaluate(
            config.policy, config.scenarios, *settings, parse_changes(config.set), config.noise, progress=bar
        )
        perturbed = robustness(config.policy, None, ROBUSTNESS_SCENARIOS, *settings, bar) if config.robust else None
    show(evaluation, console)
    if perturbed:
        show_robustness(perturbed, console)
    if config.out is not None:
        config.out.write_text(json.dumps(scores(evaluation, perturbed), indent=1) + "\n")
    if config.embed:
        score_policy(config.policy, evaluation, perturbed)
    return 1 if config.check and evaluation.missed() else 0


class _Bar:
    """A progress bar, one line per scenario."""

    def __init__(self, console: "Console") -> None:
        from rich import progress

        columns = (progress.TextColumn("{task.description:24}"), progress.BarColumn(), progress.TimeRemainingColumn())
        self._progress = progress.Progress(*columns, console=console, transient=True)
        self._tasks: dict[str, Any] = {}

    def __enter__(self) -> "_Bar":
        self._progress.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._progress.stop()

    def __call__(self, name: str, done: int, total: int) -> None:
        if name not in self._tasks:
            self._tasks[name] = self._progress.add_task(name, total=total)
        self._progress.update(self._tasks[name], completed=done)
