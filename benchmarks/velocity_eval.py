"""How well the shipped policy walks: survival and tracking on the reference plant, and on plants unlike it.

Linear and angular velocity are commanded together. What is measured, and how, stands in `policies/evaluate.py`.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from common import ROOT, Benchmark, Table, finish, run

from policies.evaluate import (
    PERTURBATIONS,
    ROBUSTNESS_SCENARIOS,
    SCENARIOS,
    TARGETS,
    UNITS,
    Evaluation,
    evaluate,
    format_estimate,
    robustness,
    scores,
)
from robots.errors import UserError

TEXT = """
The policy in this repository on the reference plant (MuJoCo, 2 ms x 10, all joints and collisions), 200 episodes of
20 s per scenario. Linear and angular velocity are commanded together: easy (0.7, 0, 0.2), medium (1.0, 0.3, 0.4), hard
(1.3, 0.6, 0.6) [m/s, m/s, rad/s]; medium and hard with two pushes: at 5 s and 15 s each horizontal axis of the base
velocity is set to U(-1, 1) m/s. Everything counts from the first step of an episode. `_ci` are 95 % intervals over
episodes. What each metric means stands in `policies/evaluate.py`. `robustness` repeats the evaluation with one property
of the plant changed, with `robust_episodes` robots; `delay_0ms` is the nominal plant.

For comparison: the lower-body policy that the authors of ALMI released, in MuJoCo on flat ground with the same commands
and pushes, arms moving, 6 episodes of 20 s a level: e_vel 0.11 / 0.24 / 0.46 m/s, survival 6/6, 6/6, 5/6; asked to turn
on the spot at 0.6 rad/s it turns at 0.12 to 0.16.
"""


@dataclass(frozen=True, kw_only=True)
class Config(Benchmark):
    """What to evaluate."""

    policy: Path | None = None
    """Policy file; by default the one in the repository."""
    episodes: int = 200
    """Robots per scenario."""
    robust_episodes: int = 200
    """Robots per scenario and changed plant."""
    seconds: float = 20.0
    """Length of an episode [s]."""
    seed: int = 0
    """Seed of starting states, pushes and noise."""
    threads: int = 0
    """Threads of the simulation; 0 for all cores."""


def main(config: Config) -> None:
    path = config.policy or shipped_policy()
    episodes, seconds = (10, 4.0) if config.quick else (config.episodes, config.seconds)
    robust_episodes = 10 if config.quick else config.robust_episodes
    evaluation = evaluate(path, tuple(SCENARIOS), episodes, seconds, config.seed, config.threads)
    rest = (robust_episodes, seconds, config.seed, config.threads)
    perturbed = robustness(path, PERTURBATIONS, ROBUSTNESS_SCENARIOS, *rest)
    results = scores(evaluation, perturbed) | {
        "targets_missed": [f"{t.scenario} {t.metric} {t.bound} {t.value:g}" for t in evaluation.missed()],
        "robust_episodes": robust_episodes,
        "steps_per_s": evaluation.steps_per_s,
        "policy": str(path.relative_to(ROOT) if path.is_relative_to(ROOT) else path),
    }
    tables = [score_table(evaluation), robustness_table(perturbed)]
    finish(config, "velocity_eval", results, seeds=[config.seed], tables=tables, picture=draw, text=TEXT)


def shipped_policy() -> Path:
    """The one policy file in the repository's `policies` package. Raises UserError."""
    found = sorted((ROOT / "policies").rglob("*.onnx"))
    if len(found) != 1:
        raise UserError(
            f"expected one policy file under {ROOT / 'policies'}, found {len(found)}: name it with --policy"
        )
    return found[0]


def score_table(evaluation: Evaluation) -> Table:
    """Metrics against scenarios on the nominal plant."""
    rows = []
    for metric, unit in UNITS.items():
        scale = 100.0 if unit == "%" else 1.0
        cells = [format_estimate(m.get(metric), scale) for m in evaluation.scenarios.values()]
        rows.append([f"{metric} [{unit}]" if unit else metric, *cells])
    missed = [f"{t.scenario} {t.metric} {t.bound} {t.value:g}" for t in evaluation.missed()]
    title = f"nominal plant, +- half of the 95 % interval; targets missed: {', '.join(missed) or 'none'}"
    return Table(title=title, headings=("metric", *evaluation.scenarios), rows=rows)


def robustness_table(perturbed: Mapping[str, Evaluation]) -> Table:
    """Survival and error against perturbations."""
    headings, rows = ["plant"], []
    for scenario in ROBUSTNESS_SCENARIOS:
        headings += [f"{scenario} survival", f"{scenario} {'drift' if scenario == 'stand' else 'e_vel'}"]
    for name, evaluation in perturbed.items():
        metrics = [evaluation.scenarios[s] for s in ROBUSTNESS_SCENARIOS]
        cells = [
            (format_estimate(m["survival"]), format_estimate(m["drift"] if "drift" in m else m["e_vel"]))
            for m in metrics
        ]
        rows.append([name, *(c for pair in cells for c in pair)])
    return Table(title="plants unlike it, velocities in m/s", headings=tuple(headings), rows=rows)


def draw(results: Mapping[str, Any], path: Path) -> None:
    """Survival and tracking error of the nominal and the perturbed plants, with intervals and targets."""
    from matplotlib.figure import Figure

    plants: dict[str, Any] = {"nominal": results, **results["robustness"]}
    levels = ("easy", "medium", "hard")
    figure = Figure(figsize=(10, 5.2), layout="constrained")
    axes = figure.subplots(1, 2, sharey=True)
    for axis, (metric, label) in zip(axes, (("survival", "survival"), ("e_vel", "e_vel [m/s]")), strict=True):
        for i, (level, colour) in enumerate(zip(levels, ("#2563eb", "#ea580c", "#7c3aed"), strict=True)):
            rows = [(k, p[level][metric], p[level][f"{metric}_ci"]) for k, p in enumerate(plants.values())]
            known = [(k, v, ci or [v, v]) for k, v, ci in rows if v is not None]
            values, places = [v for _, v, _ in known], [k + 0.2 * (i - 1) for k, _, _ in known]
            low, high = [v - ci[0] for _, v, ci in known], [ci[1] - v for _, v, ci in known]
            axis.errorbar(values, places, xerr=[low, high], fmt="o", color=colour, markersize=4, label=level)
            target = next(t for t in TARGETS if (t.scenario, t.metric) == (level, metric))
            axis.axvline(target.value, color=colour, linestyle=":", linewidth=1)
        axis.set_xlabel(f"{label}; dotted: targets")
        axis.spines[["top", "right"]].set_visible(False)
    axes[0].set_yticks(range(len(plants)), list(plants))
    axes[0].invert_yaxis()
    figure.legend(*axes[0].get_legend_handles_labels(), loc="outside upper center", ncols=3, frameon=False)
    figure.savefig(path, dpi=110)


if __name__ == "__main__":
    run(main, Config)
