"""One vocabulary of physical parameters, and the one place that applies them to a MuJoCo model.

    link.<body>.mass        [kg]       the inertia scales along: same shape, other density
    link.<body>.com         [m]        (3) centre of mass in the link frame
    link.<body>.inertia     [kg m^2]   (6) ixx iyy izz ixy ixz iyz about the centre of mass in link axes
    joint.<joint>.damping   [N m s/rad]
    joint.<joint>.friction  [N m]
    joint.<joint>.armature  [kg m^2]
    joint.<joint>.stiffness [N m/rad]
    actuator.<joint>.kp     [N m/rad]
    actuator.<joint>.kd     [N m s/rad]
    actuator.<joint>.gain   [1]        factor on the servo's whole force
    actuator.<joint>.delay  [s]        age of the command the servo acts on
    contact.<geom>.friction [1]        sliding friction of a geom

Names are globs (`joint.*_knee.damping`); the suffixes `_joint` and `_link` may be left out. `sensor.<signal>.bias`,
`.noise` and `.delay` live with the sensors (`sim.sensors`), not in the model.
"""

import fnmatch
from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

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


@dataclass(frozen=True, kw_only=True)
class Randomize:
    """A distribution over every parameter a glob matches, drawn at each episode start."""

    pattern: str
    """Glob over parameter names."""
    lo: float
    """Lower end of the uniform distribution, in the unit of `kind`."""
    hi: float
    """Upper end."""
    kind: Literal["scale", "add", "value"] = "scale"
    """scale: factor on the nominal value; add: offset from it; value: the value itself."""
    shared: bool = False
    """One draw for all matches instead of one each."""


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
        """The model's own value, (width,)."""
        return self._nominal[name]

    def assign(self, name: str, values: FloatArray | float, ids: Ids | None = None) -> None:
        """Set the parameters a glob matches to `values`, broadcast to (n, width), in the simulations `ids` (n).

        Raises UnknownNameError for a name without match, UserError for a value without physical meaning.
        """
        chosen = np.arange(self.num) if ids is None else ids
        groups = self._groups(name)
        for group in groups:
            shape = (len(chosen), len(group.names), group.width)
            wanted = np.asarray(values, float)
            self._write(group, np.broadcast_to(wanted[:, None] if wanted.ndim == 2 else wanted, shape), chosen)
        self._finish(groups, chosen)

    def randomize(self, rules: tuple[Randomize, ...], ids: Ids, rng: np.random.Generator) -> None:
        """Draw every rule anew for the simulations `ids`."""
        touched: list[_Group] = []
        for rule in rules:
            draw = rng.uniform(rule.lo, rule.hi, (len(ids), 1, 1)) if rule.shared else None
            for group in self._groups(rule.pattern):
                shape = (len(ids), len(group.names), group.width)
                value = rng.uniform(rule.lo, rule.hi, shape) if draw is None else np.broadcast_to(draw, shape)
                self._write(group, _combine(rule.kind, group.nominal, value), ids)
                touched.append(group)
        self._finish(touched, ids)

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
                )
                for (kind, attribute), members in kinds.items()
            ]
        return self._grouped[pattern]

    def _finish(self, groups: "list[_Group]", ids: Ids) -> None:
        if len(ids) and any(g.attribute in CONST_FIELDS for g in groups):
            self._set_const(ids)

    def _write(self, group: "_Group", values: FloatArray, ids: Ids) -> None:
        """Write values (n, m, width) of the m parameters of a group in the simulations `ids` (n)."""
        _check(group, values)
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


def _list_parameters(model: mujoco.MjModel) -> list[Parameter]:
    out = []
    for b in range(1, model.nbody):
        for attribute in ("mass", "com", "inertia"):
            out.append(Parameter(name=f"link.{model.body(b).name}.{attribute}", index=b, attribute=attribute))
    for j in range(model.njnt):
        if model.jnt_type[j] in (int(mujoco.mjtJoint.mjJNT_HINGE), int(mujoco.mjtJoint.mjJNT_SLIDE)):
            name, dof = model.joint(j).name, int(model.jnt_dofadr[j])
            for attribute in ("damping", "friction", "armature"):
                out.append(Parameter(name=f"joint.{name}.{attribute}", index=dof, attribute=attribute))
            out.append(Parameter(name=f"joint.{name}.stiffness", index=j, attribute="stiffness"))
    for a in range(model.nu):
        attributes = ("kp", "kd", "gain", "delay") if model.actuator_history[a][0] else ("kp", "kd", "gain")
        for attribute in attributes:
            out.append(Parameter(name=f"actuator.{model.actuator(a).name}.{attribute}", index=a, attribute=attribute))
    for g in range(model.ngeom):
        if model.geom(g).name:
            out.append(Parameter(name=f"contact.{model.geom(g).name}.friction", index=g, attribute="friction"))
    return out


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
        return _servo_gains(model)[i, [SERVO.index(attribute)]]
    if attribute == "mass":
        return np.array([model.body_mass[i]])
    if attribute == "com":
        return np.array(model.body_ipos[i])
    if attribute == "inertia":
        return _full_inertias(model)[i]
    if parameter.name.startswith("contact."):
        return np.array([model.geom_friction[i, 0]])
    return np.array([getattr(model, _PLAIN_FIELDS[attribute])[i]], dtype=np.float64).reshape(1)


def _combine(kind: str, nominal: FloatArray, value: FloatArray) -> FloatArray:
    """Values (n, m, width) from draws: factor on, offset from, or instead of the nominal (m, width)."""
    if kind == "scale":
        return nominal * value
    if kind == "add":
        return nominal + value
    return value


def _check(group: _Group, values: FloatArray) -> None:
    finite = np.isfinite(values).all(axis=(0, 2))
    if not finite.all():
        raise UserError(f"{group.names[int(np.argmin(finite))]} must be finite, got {values[:, ~finite].ravel()}")
    lowest = values.min(axis=(0, 2), initial=np.inf)
    worst = int(np.argmin(lowest))
    if group.attribute == "inertia":
        _check_inertia(group, values)
    elif group.attribute == "mass" and lowest[worst] <= 0:
        raise UserError(f"{group.names[worst]} must be positive, got {lowest[worst]:g}")
    elif group.attribute not in ("com", "stiffness") and lowest[worst] < 0:
        raise UserError(f"{group.names[worst]} must not be negative, got {lowest[worst]:g}")


def _check_inertia(group: _Group, values: FloatArray) -> None:
    moments = np.sort(_principal(values)[0], axis=-1)
    bad = (moments[..., 0] <= 0) | (moments[..., 0] + moments[..., 1] < moments[..., 2] * (1 - 1e-9))
    if bad.any():
        sim, member = np.argwhere(bad)[0]
        raise UserError(
            f"{group.names[member]} is not the inertia of any body: the principal moments {moments[sim, member]} must be "
            "positive and the largest not above the sum of the other two"
        )
