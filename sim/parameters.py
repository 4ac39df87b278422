"""One vocabulary of physical parameters, and the one place that applies them to a MuJoCo model.

    link.<body>.mass        [kg]       the inertia scales along: same shape, other density
    link.<body>.com         [m]        (3) centre of mass in the link frame
    link.<body>.inertia     [kg m^2]   (6) ixx iyy izz ixy ixz iyz about the centre of mass in link axes,
                                       at the mass the link has when it is set
    joint.<joint>.damping   [N m s/rad]
    joint.<joint>.friction  [N m]
    joint.<joint>.armature  [kg m^2]
    joint.<joint>.stiffness [N m/rad]
    actuator.<joint>.kp     [N m/rad]
    actuator.<joint>.kd     [N m s/rad]
    actuator.<joint>.gain   [1]        factor on the servo's whole force
    actuator.<joint>.delay  [s]        age of the command the servo acts on, up to the model's longest delay; acts
                                       rounded up to whole physics steps
    contact.<geom>.friction [1]        sliding friction of a geom; where two touch, the one of higher priority counts
                                       (the soles), else the larger value

Names are globs (`joint.*_knee.damping`); the suffixes `_joint` and `_link` may be left out. `sensor.<signal>.bias`,
`.noise` and `.delay` live with the sensors (`sim.sensors`), not in the model.

Setting twice equals setting once. Where rules or calls overlap, the last one counts; kp, kd and gain combine in any
order.
"""

import fnmatch
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal, get_args

import mujoco
import numpy as np
from numpy.typing import NDArray

from robots.errors import UnknownNameError, UserError

FloatArray = NDArray[np.float64]
Ids = NDArray[np.intp]

CONST_FIELDS = frozenset({"mass", "com", "inertia", "armature"})
"""Attributes after which MuJoCo's derived constants must be computed again (mj_setConst)."""
WIDTH = {"com": 3, "inertia": 6}
"""Attributes with more than one element."""
Kind = Literal["scale", "add", "value"]


@dataclass(frozen=True, kw_only=True)
class Randomize:
    """A distribution over every parameter a glob matches, drawn at each episode start.

    Raises UserError for limits that are not finite or in the wrong order.
    """

    pattern: str
    """Glob over parameter names."""
    lo: float
    """Lower end of the uniform distribution, in the unit of `kind`."""
    hi: float
    """Upper end."""
    kind: Kind = "scale"
    """scale: one factor on the whole nominal value; add: offset from each element; value: each element itself."""
    shared: bool = False
    """One draw for all matches instead of one each."""

    def __post_init__(self) -> None:
        """Refuse what would be drawn wrongly or not at all."""
        if self.kind not in get_args(Kind):
            raise UnknownNameError(f"kind of randomization of '{self.pattern}'", self.kind, get_args(Kind))
        if not (math.isfinite(self.lo) and math.isfinite(self.hi) and self.lo <= self.hi):
            raise UserError(f"'{self.pattern}' needs finite limits lo <= hi, got lo {self.lo} and hi {self.hi}")

    def draw(
        self, nominals: Sequence[FloatArray], count: int, rng: np.random.Generator, variety: float = 1.0
    ) -> list[FloatArray]:
        """Values (count, m, width) for each nominal (m, width), `variety` in [0, 1] of the way from it to the draw.

        Raises UserError if scaling cannot change any.
        """
        if self.kind == "scale" and not any(n.any() for n in nominals):
            raise UserError(f"'{self.pattern}' is nominally zero, which no factor changes; use kind 'add' or 'value'")
        common = rng.uniform(self.lo, self.hi, (count, 1, 1)) if self.shared else None
        return [n + variety * (self._values(n, count, rng, common) - n) for n in nominals]

    def _values(
        self, nominal: FloatArray, count: int, rng: np.random.Generator, common: FloatArray | None
    ) -> FloatArray:
        members, width = nominal.shape
        shape = (count, members, 1 if self.kind == "scale" else width)
        drawn = rng.uniform(self.lo, self.hi, shape) if common is None else common
        if self.kind == "scale":
            return nominal * drawn
        if self.kind == "add":
            return nominal + drawn
        return np.broadcast_to(drawn, (count, members, width))


@dataclass(frozen=True, kw_only=True)
class Parameter:
    """One parameter of a model."""

    name: str
    """Canonical name, `kind.object.attribute`."""
    index: int
    """Position of the object in its model arrays."""
    attribute: str
    """Last part of the name."""

    @property
    def width(self) -> int:
        """Number of elements."""
        return WIDTH.get(self.attribute, 1)


class Parameters:
    """Reads and writes the parameters of one model or of a batch of simulations of it.

    Values are always computed from the nominal model, so that setting twice equals setting once.
    """

    def __init__(
        self,
        model: mujoco.MjModel,
        num: int = 1,
        expand: Callable[[str], NDArray[np.float64]] | None = None,
        set_const: Callable[[Ids], None] | None = None,
    ) -> None:
        """Bind to `model` (num 1), or to `num` simulations whose fields `expand` gives as (num, ...) arrays."""
        self.num = num
        self._model = model
        self.expand = expand or (lambda field: getattr(model, field)[None])
        self._set_const = set_const or (lambda ids: mujoco.mj_setConst(model, mujoco.MjData(model)))
        self._by_name = {p.name: p for p in _list_parameters(model)}
        self._nominal = {name: _read_nominal(model, p) for name, p in self._by_name.items()}
        self._longest_delay = model.actuator_history[:, 0] * model.opt.timestep
        self._matches: dict[str, list[Parameter]] = {}
        self._grouped: dict[str, list[_Group]] = {}
        self._servo = np.repeat(_servo_gains(model)[None], num, axis=0)
        self._mass_factor = np.ones((num, model.nbody))
        self._moments = np.repeat(model.body_inertia[None], num, axis=0)

    @property
    def names(self) -> list[str]:
        """All parameter names of this model."""
        return list(self._by_name)

    def match(self, pattern: str) -> list[Parameter]:
        """Parameters whose name the glob matches. Raises UnknownNameError when there are none."""
        if pattern not in self._matches:
            found = [p for n, p in self._by_name.items() if any(fnmatch.fnmatchcase(a, pattern) for a in _aliases(n))]
            if not found:
                raise UnknownNameError("parameter", pattern, self._by_name)
            self._matches[pattern] = found
        return self._matches[pattern]

    def nominal(self, name: str) -> FloatArray:
        """The model's own value of the one parameter of this name, (width,). Raises UnknownNameError, UserError."""
        found = self.match(name)
        if len(found) > 1:
            raise UserError(f"'{name}' means one parameter here, but {len(found)} match, among them {found[0].name}")
        return self._nominal[found[0].name].copy()

    def assign(self, name: str, values: FloatArray | float, ids: Ids | None = None) -> None:
        """Set the parameters a glob matches to `values` in the simulations `ids` (n; all by default).

        `values` is one number, (width,) for every match and simulation, (n, width), or (n, m, width) for m matches;
        (n,) too where the width is 1. Nothing is set if anything is refused. Raises UnknownNameError for a name without
        match, UserError for a value without physical meaning or a shape that does not fit.
        """
        chosen = np.arange(self.num) if ids is None else ids
        groups = self._groups(name)
        wanted = [fit_values(name, values, (len(chosen), len(g.names), g.width)) for g in groups]
        for group, value in zip(groups, wanted, strict=True):
            _check(group, value)
        for group, value in zip(groups, wanted, strict=True):
            self._write(group, value, chosen)
        self._finish(groups, chosen)

    def randomize(self, rules: tuple[Randomize, ...], ids: Ids, rng: np.random.Generator, variety: float = 1.0) -> None:
        """Draw every rule anew for the simulations `ids`; `variety` in [0, 1] draws in towards the nominal.

        Raises as `assign` does.
        """
        touched = [(rule, self._groups(rule.pattern)) for rule in rules]
        for _, groups in touched:
            self._forget_mass(groups, ids)
        for rule, groups in touched:
            drawn = rule.draw([g.nominal for g in groups], len(ids), rng, variety)
            for group, value in zip(groups, drawn, strict=True):
                _check(group, value)
                self._write(group, value, ids)
        self._finish([g for _, groups in touched for g in groups], ids)

    def state(self) -> dict[str, NDArray[np.float64]]:
        """Values not held by the model fields themselves."""
        return {"servo": self._servo.copy(), "mass_factor": self._mass_factor.copy(), "moments": self._moments.copy()}

    def restore(self, state: dict[str, NDArray[np.float64]]) -> None:
        """Take back what `state` returned."""
        self._servo[:], self._mass_factor[:], self._moments[:] = state["servo"], state["mass_factor"], state["moments"]

    def _groups(self, pattern: str) -> "list[_Group]":
        """What a glob matches, sorted by model field, so that each group is one array write."""
        if pattern not in self._grouped:
            kinds: dict[tuple[str, str], list[Parameter]] = {}
            for p in self.match(pattern):
                kinds.setdefault((p.name.split(".", 1)[0], p.attribute), []).append(p)
            self._grouped[pattern] = [
                _Group(
                    kind=kind,
                    attribute=attribute,
                    names=tuple(p.name for p in members),
                    index=np.array([p.index for p in members], dtype=np.intp),
                    nominal=np.stack([self._nominal[p.name] for p in members]),
                    upper=np.array([self._longest_delay[p.index] if attribute == "delay" else np.inf for p in members]),
                )
                for (kind, attribute), members in kinds.items()
            ]
        return self._grouped[pattern]

    def _forget_mass(self, groups: "list[_Group]", ids: Ids) -> None:
        """Take the masses about to be drawn for nominal, so that an inertia drawn before them ignores the last draw."""
        for group in groups:
            if group.attribute == "mass":
                self._mass_factor[ids[:, None], group.index] = 1.0

    def _finish(self, groups: "list[_Group]", ids: Ids) -> None:
        if len(ids) and any(g.attribute in CONST_FIELDS for g in groups):
            self._set_const(ids)

    def _write(self, group: "_Group", values: FloatArray, ids: Ids) -> None:
        """Write values (n, m, width) of the m parameters of a group in the simulations `ids` (n)."""
        i, attribute = group.index, group.attribute
        at = (ids[:, None], i)
        if attribute in SERVO:
            self._servo[*at, SERVO.index(attribute)] = values[..., 0]
            self._write_servo(at)
        elif attribute == "mass":
            self._mass_factor[at] = values[..., 0] / group.nominal[:, 0]
            self.expand("body_mass")[at] = values[..., 0]
            self.expand("body_inertia")[at] = self._moments[at] * self._mass_factor[at][..., None]
        elif attribute == "inertia":
            moments, quats = _principal(values)
            self._moments[at] = moments / self._mass_factor[at][..., None]
            self.expand("body_inertia")[at] = moments
            self.expand("body_iquat")[at] = quats
        elif attribute == "com":
            self.expand("body_ipos")[at] = values
        elif group.kind == "contact":
            self.expand("geom_friction")[*at, 0] = values[..., 0]
        else:
            self.expand(_PLAIN_FIELDS[attribute])[at] = values[..., 0]

    def _write_servo(self, at: tuple[Ids, Ids]) -> None:
        kp, kd, gain = np.moveaxis(self._servo[at], -1, 0)
        gainprm, biasprm = self.expand("actuator_gainprm"), self.expand("actuator_biasprm")
        gainprm[*at, 0] = kp * gain
        biasprm[*at, 1] = -kp * gain
        biasprm[*at, 2] = -kd * gain


@dataclass(frozen=True, kw_only=True)
class _Group:
    """Parameters that lie in one model field."""

    kind: str
    attribute: str
    names: tuple[str, ...]
    index: Ids
    nominal: FloatArray
    upper: FloatArray

    @property
    def width(self) -> int:
        return WIDTH.get(self.attribute, 1)


SERVO = ("kp", "kd", "gain")
_PLAIN_FIELDS = {
    "damping": "dof_damping",
    "friction": "dof_frictionloss",
    "armature": "dof_armature",
    "stiffness": "jnt_stiffness",
    "delay": "actuator_delay",
}


def fit_values(name: str, values: FloatArray | float, shape: tuple[int, int, int]) -> FloatArray:
    """`values` as (n, m, width), see `Parameters.assign`. Raises UserError."""
    wanted = np.asarray(values, np.float64)
    if wanted.ndim == 1 and shape[2] == 1:
        wanted = wanted[:, None]
    if wanted.ndim == 2:
        wanted = wanted[:, None]
    try:
        return np.broadcast_to(wanted, shape)
    except ValueError:
        count, _, width = shape
        raise UserError(
            f"'{name}' takes one value, {width} values, or an array ({count}, {width}) for {count} simulations; "
            f"got the shape {np.shape(values)}"
        ) from None


def _list_parameters(model: mujoco.MjModel) -> list[Parameter]:
    out: list[Parameter] = []

    def add(kind: str, obj: str, index: int, *attributes: str) -> None:
        if obj:
            out.extend(Parameter(name=f"{kind}.{obj}.{a}", index=index, attribute=a) for a in attributes)

    for b in range(1, model.nbody):
        # MuJoCo compiles a lone body with its centre of mass in its origin to a diagonal mass matrix: no other fits in.
        add("link", model.body(b).name, b, *(("mass",) if model.body_simple[b] else ("mass", "com", "inertia")))
    for j in range(model.njnt):
        if model.jnt_type[j] in (int(mujoco.mjtJoint.mjJNT_HINGE), int(mujoco.mjtJoint.mjJNT_SLIDE)):
            name = model.joint(j).name
            add("joint", name, int(model.jnt_dofadr[j]), "damping", "friction", "armature")
            add("joint", name, j, "stiffness")
    for a in range(model.nu):
        add("actuator", model.actuator(a).name, a, *_actuator_attributes(model, a))
    for g in range(model.ngeom):
        add("contact", model.geom(g).name, g, "friction")
    return out


def _actuator_attributes(model: mujoco.MjModel, a: int) -> tuple[str, ...]:
    """kp, kd and gain of a position servo, gain of a motor, delay where the model remembers commands."""
    delay = ("delay",) if model.actuator_history[a, 0] else ()
    if model.actuator_gaintype[a] != mujoco.mjtGain.mjGAIN_FIXED:
        return delay
    if model.actuator_biastype[a] == mujoco.mjtBias.mjBIAS_NONE:
        return ("gain", *delay)
    is_servo = model.actuator_biastype[a] == mujoco.mjtBias.mjBIAS_AFFINE
    is_servo &= model.actuator_biasprm[a, 1] == -model.actuator_gainprm[a, 0]
    return (*SERVO, *delay) if is_servo else delay


def _aliases(name: str) -> tuple[str, ...]:
    kind, rest = name.split(".", 1)
    obj, attribute = rest.rsplit(".", 1)
    short = obj.removesuffix("_joint").removesuffix("_link")
    return (name,) if short == obj else (name, f"{kind}.{short}.{attribute}")


def _servo_gains(model: mujoco.MjModel) -> FloatArray:
    """Nominal (kp, kd, gain) of each actuator, (nu, 3)."""
    return np.stack([model.actuator_gainprm[:, 0], -model.actuator_biasprm[:, 2], np.ones(model.nu)], axis=1)


def _full_inertias(model: mujoco.MjModel) -> FloatArray:
    """Inertia of each body about its centre of mass in body axes, (nbody, 6): xx yy zz xy xz yz."""
    out = np.empty((len(model.body_inertia), 6))
    rot = np.empty(9)
    for b, (moments, quat) in enumerate(zip(model.body_inertia, model.body_iquat, strict=True)):
        mujoco.mju_quat2Mat(rot, quat)
        r = rot.reshape(3, 3)
        full = r @ np.diag(moments) @ r.T
        out[b] = full[0, 0], full[1, 1], full[2, 2], full[0, 1], full[0, 2], full[1, 2]
    return out


def _principal(six: FloatArray) -> tuple[FloatArray, FloatArray]:
    """Principal moments (..., 3) and orientations (..., 4) w x y z of inertias (..., 6) given as xx yy zz xy xz yz."""
    xx, yy, zz, xy, xz, yz = np.moveaxis(six, -1, 0)
    full = np.stack([xx, xy, xz, xy, yy, yz, xz, yz, zz], axis=-1).reshape(*six.shape[:-1], 3, 3)
    moments, axes = np.linalg.eigh(full)
    axes[..., 0] *= np.sign(np.linalg.det(axes))[..., None]
    quats = np.empty((*six.shape[:-1], 4))
    for at in np.ndindex(six.shape[:-1]):
        mujoco.mju_mat2Quat(quats[at], np.ascontiguousarray(axes[at]).ravel())
    return moments, quats


def _read_nominal(model: mujoco.MjModel, parameter: Parameter) -> FloatArray:
    i, attribute = parameter.index, parameter.attribute
    if attribute in SERVO:
        return np.array([_servo_gains(model)[i, SERVO.index(attribute)]])
    if attribute == "mass":
        return np.array([model.body_mass[i]])
    if attribute == "com":
        return np.array(model.body_ipos[i])
    if attribute == "inertia":
        return np.array(_full_inertias(model)[i])
    if parameter.name.startswith("contact."):
        return np.array([model.geom_friction[i, 0]])
    return np.array([getattr(model, _PLAIN_FIELDS[attribute])[i]], np.float64)


def _check(group: _Group, values: FloatArray) -> None:
    """Refuse values (n, m, width) without physical meaning. Raises UserError."""
    finite = np.isfinite(values).all(axis=(0, 2))
    if not finite.all():
        raise UserError(f"{group.names[int(np.argmin(finite))]} must be finite, got {values[:, ~finite].ravel()}")
    lowest, highest = values.min(axis=(0, 2), initial=np.inf), values.max(axis=(0, 2), initial=-np.inf)
    worst, longest = int(np.argmin(lowest)), int(np.argmax(highest - group.upper))
    if group.attribute == "inertia":
        _check_inertia(group, values)
    elif group.attribute == "mass" and lowest[worst] <= 0:
        raise UserError(f"{group.names[worst]} must be positive, got {lowest[worst]:g}")
    elif group.attribute not in ("com", "stiffness") and lowest[worst] < 0:
        raise UserError(f"{group.names[worst]} must not be negative, got {lowest[worst]:g}")
    elif highest[longest] > group.upper[longest] + 1e-9:
        raise UserError(
            f"{group.names[longest]} must not be above {group.upper[longest]:g} s, the longest delay this model was "
            f"built for (max_delay), got {highest[longest]:g} s"
        )


def _check_inertia(group: _Group, values: FloatArray) -> None:
    moments = np.sort(_principal(values)[0], axis=-1)
    bad = (moments[..., 0] <= 0) | (moments[..., 0] + moments[..., 1] < moments[..., 2] * (1 - 1e-9))
    if bad.any():
        sim, member = np.argwhere(bad)[0]
        raise UserError(
            f"{group.names[member]} is not the inertia of any body: the principal moments {moments[sim, member]} must "
            "be positive and the largest not above the sum of the other two"
        )
