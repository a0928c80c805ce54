"""The interface of a policy, and a base class with defaults for the members that the interface does not require."""

from typing import Any, ClassVar, Protocol, runtime_checkable

from lossscale_core import _settings
from lossscale_core._state import Array, Namespace, ScaleState, StateT
from lossscale_core.errors import PolicyError


@runtime_checkable
class ScalingPolicy(Protocol[StateT]):
    """The interface of a policy: the first state, and the state after each step."""

    def init_state(self) -> StateT:
        """Return the state before the first step.

        Returns:
            A NamedTuple of host scalars that begins with the fields of `ScaleState`.
        """
        ...

    def update(self, state: StateT, grads_finite: Array, *, xp: Namespace | None = None) -> StateT:
        """Return the state after a step.

        The function is pure. It synchronises with the host only if the state is on the host and the flag is not.

        Args:
            state: The state before the step, on the host or in the arrays of a framework.
            grads_finite: A bool array of shape `()` of the same framework; for a state on the host, a Python bool. It
                is True if every gradient element is finite, on all devices and ranks together.
            xp: The array namespace of the state. It is inferred if left out, except for TensorFlow. Its `where` must
                accept plain numbers, as in the array API standard of 2024.12.

        Returns:
            A state of the same type, with the same dtypes and shapes.
        """
        ...


KINDS: dict[str, type["BaseScaling"]] = {}
"""The policy classes by the kind that a config names."""


class BaseScaling:
    """Base class of the policies, with defaults for all members except `init_state` and `update`.

    A policy of your own needs `init_state` and `update` only, and no base class. It may derive from this class as a
    frozen dataclass with a new `kind`. Then the library also reads and writes it as a dict or file, and saves it in
    checkpoints. The fields are the settings; the type of a field is `float`, `int` or `bool`. If a field has
    the name of a setting of the library's policies, such as `growth_interval`, the same rule checks its value.
    """

    __slots__ = ()

    kind: ClassVar[str | None] = None
    """The name of the policy in a config; a policy without a kind has no config."""
    state_type: ClassVar[type[Any]] = ScaleState
    """The type of the policy's state: a NamedTuple that begins with the fields of `ScaleState`."""
    adapts: ClassVar[bool] = False
    """Whether overflows and finite steps change the loss scale."""
    scales_losses: ClassVar[bool] = True
    """Whether the loss scale may differ from 1."""
    min_scale: float = _settings.SMALLEST_SCALE
    max_scale: float = _settings.LARGEST_SCALE
    growth_factor: float = 1.0
    backoff_factor: float = 1.0
    growth_interval: int = _settings.LARGEST_COUNT
    hysteresis: int = 1
    refill_on_backoff: bool = False
    cooldown: int = 0
    max_overflow_streak: int | None = None

    def __init_subclass__(cls) -> None:
        super().__init_subclass__()
        kind = vars(cls).get("kind")
        if kind is None:
            return
        # A dataclass with slots is a new class of the same name: https://docs.python.org/3/library/dataclasses.html
        if kind in KINDS and KINDS[kind].__qualname__ != cls.__qualname__:
            raise PolicyError(f"kind={kind!r} is taken by {KINDS[kind].__name__}; give {cls.__name__} another kind")
        KINDS[kind] = cls

    def __post_init__(self) -> None:
        settings = {"min_scale": self.min_scale, "max_scale": self.max_scale}
        # A frozen dataclass sets its own fields in __post_init__ by object.__setattr__:
        # https://docs.python.org/3/library/dataclasses.html#frozen-instances
        for field, rule in _settings.rules_of(type(self)):
            settings[field.name] = rule.validate(field.name, getattr(self, field.name))
            object.__setattr__(self, field.name, settings[field.name])
        _settings.require_ordered_scales(settings)

    @staticmethod
    def of(policy: ScalingPolicy) -> "BaseScaling":
        """Return a policy that has every member of this class.

        Args:
            policy: Any policy.

        Returns:
            `policy` itself if it derives from this class; otherwise a view of it that adds the missing members with
            their defaults.
        """
        return policy if isinstance(policy, BaseScaling) else _WithDefaults(policy)

    def init_state(self) -> Any:
        """Return the state before the first step. See `ScalingPolicy.init_state`."""
        raise NotImplementedError(f"{type(self).__name__} has no init_state; define it to return a {self.state_type}")

    def update(self, state: Any, grads_finite: Array, *, xp: Namespace | None = None) -> Any:
        """Return the state after a step. See `ScalingPolicy.update`."""
        raise NotImplementedError(f"{type(self).__name__} has no update; define it to return the state after a step")

    def settings(self) -> dict[str, Any]:
        """Return the values of the policy's settings by name."""
        return {field.name: getattr(self, field.name) for field, _ in _settings.rules_of(type(self))}

    def bounds(self) -> tuple[float, float]:
        """Return the smallest and the largest loss scale of the policy's states."""
        return self.min_scale, self.max_scale

    def is_constant(self) -> bool:
        """Return whether the loss scale stays the same in every step."""
        low, high = self.bounds()
        return low == high and not self.adapts


class _WithDefaults(BaseScaling):
    """A view of a policy that does not derive from `BaseScaling`, with defaults for the members that it lacks."""

    def __init__(self, policy: Any) -> None:
        self._policy = policy
        for name in (name for name in vars(BaseScaling) if not name.startswith("_") and name != "state_type"):
            if hasattr(policy, name):
                setattr(self, name, getattr(policy, name))

    def __repr__(self) -> str:
        return repr(self._policy)

    def settings(self) -> dict[str, Any]:
        """Return the attributes that are settings of the library's policies."""
        return {name: getattr(self._policy, name) for name in _settings.RULES if hasattr(self._policy, name)}

    @property
    def state_type(self) -> type[Any]:  # type: ignore[override]  # a state is made only on demand
        """The type of the policy's state."""
        return type(self._policy.init_state())
