"""The loss scale's attributes, under the names that Keras's wrappers have for them."""

import dataclasses
from typing import Any

import tensorflow as tf

from lossscale_core import BaseScaling
from lossscale_core.messages import shown
from lossscale_tf._warning import warn_caller
from lossscale_tf._wrapper import Wrapper


class ScaleAttributes(Wrapper):
    """The policy and its state in Keras's words, and what of them can be set."""

    inner_optimizer: Any

    @property
    def loss_scale(self) -> tf.Tensor:
        """The current loss scale: float32, of shape `()`."""
        return tf.convert_to_tensor(self._step.state.loss_scale)

    @loss_scale.setter
    def loss_scale(self, loss_scale: Any) -> None:
        raise AttributeError(
            f"loss_scale={shown(loss_scale)} cannot be set, since the policy changes the scale; make the optimizer "
            "with another policy, or pass load_state_dict a state_dict() with another loss_scale"
        )

    @property
    def dynamic_scale(self) -> tf.Variable:
        """The variable that holds the loss scale; Keras 3's name."""
        return self._step.state.loss_scale

    @property
    def dynamic(self) -> bool:
        """Whether the loss scale may change."""
        return "growth_interval" in BaseScaling.of(self.policy).settings()

    @property
    def dynamic_counter(self) -> tf.Variable | None:
        """The variable that counts finite steps toward growth; None for a fixed scale."""
        return self._step.state.growth_tracker if self.dynamic else None

    @property
    def dynamic_growth_steps(self) -> int | None:
        """The policy's growth interval; None for a fixed scale.

        Setting it replaces the policy; it may be set below the present count. A step that is traced keeps the old
        interval, and a warning says so.
        """
        return BaseScaling.of(self.policy).growth_interval if self.dynamic else None

    @dynamic_growth_steps.setter
    def dynamic_growth_steps(self, steps: int) -> None:
        if not self._has_policy():
            return
        if not self.dynamic:
            raise AttributeError(f"dynamic_growth_steps is of dynamic scaling, and the policy is {self.policy}")
        self._step.policy = dataclasses.replace(self.policy, growth_interval=steps)  # type: ignore[type-var]
        if self._step.is_traced:
            warn_caller(
                f"dynamic_growth_steps={steps!r} does not reach a step that is traced already; trace it again, for "
                "fit by model.make_train_function(force=True)"
            )

    @property
    def initial_scale(self) -> float:
        """The loss scale of the first step."""
        return float(self.policy.init_state().loss_scale)

    @initial_scale.setter
    def initial_scale(self, _: Any) -> None:
        if self._has_policy():
            raise AttributeError("initial_scale is the policy's; make the optimizer with another policy")

    @property
    def global_clipnorm(self) -> float | None:
        """The norm that this wrapper clips to or, without one, the inner optimizer."""
        own = self._step.max_norm
        return getattr(self.inner_optimizer, "global_clipnorm", None) if own is None else own

    @global_clipnorm.setter
    def global_clipnorm(self, _: Any) -> None:
        """Ignore what Keras's constructor sets; `__setattr__` has warned of anything else."""

    def _has_policy(self) -> bool:
        """Return whether the wrapper is made; Keras's constructor, which runs before, sets attributes, too."""
        return "_step" in vars(self)
