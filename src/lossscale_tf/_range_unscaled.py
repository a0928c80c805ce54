"""The search for gradients that do not follow the loss scale, since something within the graph adds to them."""

import math
from collections.abc import Callable

import tensorflow as tf

from lossscale_core import UnscaledGradient
from lossscale_tf._verbs import Gradient, lifted, summed_values


def unscaled_gradients(
    gradients: Callable[[float], list[tuple[str, Gradient]]], loss_scale: float
) -> list[UnscaledGradient]:
    """Compare the gradients of the loss times zero, times a scale and times half of it.

    `gradients` takes a factor, and returns the names and gradients of the parameters, in the same order each time.
    """
    at_scale = _magnitudes(gradients, loss_scale)
    norms = _norms(at_scale, loss_scale)
    are_finite = [tf.math.is_finite(each) for _, each in at_scale]
    # Zero times an infinite slope is NaN, which was not finite at the scale either.
    are_zero = [
        bool(tf.reduce_all(tf.equal(each, 0.0) | ~is_finite))
        for (_, each), is_finite in zip(_magnitudes(gradients, 0.0), are_finite, strict=True)
    ]
    norms_at_half = _norms(_magnitudes(gradients, loss_scale / 2), loss_scale / 2)
    rows = zip(at_scale, are_zero, norms, norms_at_half, strict=True)
    found = [
        UnscaledGradient.of(name, is_zero_without_loss=is_zero, norm=norm, norm_at_half=half)
        for (name, _), is_zero, norm, half in rows
    ]
    if any(each is not None and each.cause == "nonlinear" for each in found):
        # A backward pass that draws other random numbers each time, as `tf.recompute_grad` may, is not compared.
        again = _norms(_magnitudes(gradients, loss_scale), loss_scale)
        is_random = [not math.isclose(*pair, rel_tol=1e-3) for pair in zip(norms, again, strict=True)]
        found = [
            None if each is not None and each.cause == "nonlinear" and random else each
            for each, random in zip(found, is_random, strict=True)
        ]
    return [each for each in found if each is not None]


def _magnitudes(
    gradients: Callable[[float], list[tuple[str, Gradient]]], loss_scale: float
) -> list[tuple[str, tf.Tensor]]:
    return [(name, tf.abs(lifted(summed_values(gradient)))) for name, gradient in gradients(loss_scale)]


def _norms(magnitudes: list[tuple[str, tf.Tensor]], loss_scale: float) -> list[float]:
    return [float(tf.norm(tf.cast(each, tf.float64))) / loss_scale for _, each in magnitudes]
