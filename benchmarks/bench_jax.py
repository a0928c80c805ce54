"""What loss scaling costs in JAX, against no scaling and against jmp, flax and optax: ratios of interleaved medians.

    python benchmarks/bench_jax.py                                      measure and print
    python benchmarks/bench_jax.py --quick                              a smoke test, in seconds
    python benchmarks/bench_jax.py --output-folder docs/benchmarks  keep the table

A step is what follows the backward pass: scaled gradients of ResNet-50's 161 parameters come in, Adam updates, and the
buffers of parameters and states are donated. Runs on JAX's default device. Exits with status 1 where a bar is missed
on the CPU by more than the noise allowed.
"""

import sys
import time
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import jmp
import optax
from flax.training.dynamic_scale import DynamicScale
from measuring import Row, interleaved, resnet50_shapes, run

from lossscale_core import DynamicScaling, SpikeGuard
from lossscale_jax import all_finite, loss_scaled

ADAM = optax.adam(1e-6)
SCALE = 2.0**10
OURS = DynamicScaling(init_scale=SCALE)
SHAPES = resnet50_shapes()[:12] if "--quick" in sys.argv else resnet50_shapes()  # compiling jmp's step takes long
DEVICE = jax.devices()[0]
WHERE = f"{len(SHAPES)} arrays ({'cpu' if DEVICE.platform == 'cpu' else 'cuda'})"

Step = Callable[[Any, Any], Any]


def arrays(dtype: Any) -> list[jax.Array]:
    """Return an array for each of ResNet-50's parameters."""
    keys = jax.random.split(jax.random.key(0), len(SHAPES))
    return [jax.random.normal(key, shape, dtype) for key, shape in zip(keys, SHAPES, strict=True)]


def plain(optimizer: Any) -> tuple[Step, Any]:
    """Return a step with an optimizer of optax's shape as it is, and what it carries."""

    def step(carry: Any, grads: Any) -> Any:
        params, opt_state = carry
        updates, opt_state = optimizer.update(grads, opt_state, params)
        return optax.apply_updates(params, updates), opt_state

    params = arrays(jnp.float32)
    return step, (params, optimizer.init(params))


def ours(**settings: Any) -> tuple[Step, Any]:
    """Return our step that updates and applies in one go, and what it carries."""
    optimizer = loss_scaled(ADAM, OURS, **settings)

    def step(carry: Any, grads: Any) -> Any:
        params, opt_state = carry
        return optimizer.apply_gradients(grads, opt_state, params)

    params = arrays(jnp.float32)
    return step, (params, optimizer.init(params))


def with_jmp() -> tuple[Step, Any]:
    """Return jmp's documented step, and what it carries."""
    adam_step, carry = plain(ADAM)

    def step(carry: Any, grads: Any) -> Any:
        before, leaves = carry
        loss_scale = jmp.DynamicLossScale(*leaves)  # here, since ahead of time its pytree cannot be lowered
        grads = loss_scale.unscale(grads)
        finite = jmp.all_finite(grads)
        return jmp.select_tree(finite, adam_step(before, grads), before), jax.tree.leaves(loss_scale.adjust(finite))

    return step, (carry, [jnp.float32(SCALE), jnp.int32(0)])


def with_flax() -> tuple[Step, Any]:
    """Return flax's documented step, and what it carries."""
    adam_step, carry = plain(ADAM)

    @jax.custom_vjp
    def loss(params: Any, grads: Any) -> Any:
        return jnp.zeros(())

    loss.defvjp(lambda params, grads: (jnp.zeros(()), grads), lambda grads, _: (grads, None))  # scaled ones come in

    def step(carry: Any, grads: Any) -> Any:
        before, dynamic_scale = carry
        dynamic_scale, finite, _, grads = dynamic_scale.value_and_grad(lambda params: loss(params, grads))(before[0])
        after = jax.tree.map(lambda a, b: jnp.where(finite, a, b), adam_step(before, grads), before)
        return after, dynamic_scale

    return step, (carry, DynamicScale(scale=jnp.float32(SCALE), fin_steps=jnp.int32(0)))


def step_rows(quick: bool) -> list[Row]:
    """Time and compile the step of every contender."""
    grads = jax.tree.map(lambda a: a * 1e-3 * SCALE, arrays(jnp.float32))
    contenders = {
        "ours": ours(),
        "ours, in two": plain(loss_scaled(ADAM, OURS)),
        "ours, clipped": ours(max_norm=1.0),
        "ours, guarded": ours(max_norm=1.0, guard=SpikeGuard()),
        "no scaling": plain(ADAM),
        "jmp": with_jmp(),
        "flax DynamicScale": with_flax(),
        "optax.apply_if_finite": plain(optax.apply_if_finite(ADAM, 10)),
    }
    compile_time, turns = {}, {}
    for name, (step, carry) in contenders.items():
        lowered = jax.jit(step, donate_argnums=0).lower(carry, grads)
        start = time.perf_counter()
        compiled = lowered.compile()
        compile_time[name] = time.perf_counter() - start
        turns[name] = _Turn(compiled, carry, grads)
    times = dict(zip(turns, interleaved(list(turns.values()), 3 if quick else 41), strict=True))
    peers = [name for name in contenders if not name.startswith(("ours", "no scaling"))]
    return [
        Row(f"apply_gradients, Adam, {WHERE}", "× no scaling", times["ours"] / times["no scaling"], 1.15),
        *(Row(f"apply_gradients, Adam, {WHERE}", f"× {name}", times["ours"] / times[name], 0.6) for name in peers),
        Row(f"update and apply, Adam, {WHERE}", "× no scaling", times["ours, in two"] / times["no scaling"], 1.15),
        *(Row(f"update and apply, Adam, {WHERE}", f"× {n}", times["ours, in two"] / times[n], 0.6) for n in peers),
        Row(
            f"apply_gradients with max_norm and a spike guard, Adam, {WHERE}",
            "× the same without a guard",
            times["ours, guarded"] / times["ours, clipped"],
            1.03,
        ),
        Row(f"compiling it, {WHERE}", "× no scaling", compile_time["ours"] / compile_time["no scaling"], 4.0),
        Row(f"compiling it, {WHERE}", "× jmp", compile_time["ours"] / compile_time["jmp"], 0.3),
    ]


class _Turn:
    """One step after another, each from where the last one ended."""

    def __init__(self, step: Step, carry: Any, grads: Any) -> None:
        self.step, self.carry, self.grads = step, carry, grads

    def __call__(self) -> None:
        self.carry = jax.block_until_ready(self.step(self.carry, self.grads))


def check_rows(quick: bool) -> list[Row]:
    """Time the finite check alone against the peers' own."""
    rows = []
    for dtype, bar in ((jnp.float32, 0.35), (jnp.float16, 0.6)):
        grads = arrays(dtype)
        checks = [jax.jit(check).lower(grads).compile() for check in (jmp.all_finite, _flax_all_finite, all_finite)]
        turns = [lambda check=check, grads=grads: check(grads).block_until_ready() for check in checks]
        theirs, flaxs, ours = interleaved(turns, 3 if quick else 101)
        name = f"all_finite, {jnp.dtype(dtype).name}, {WHERE}"
        rows += [Row(name, "× jmp's all(isfinite)", ours / theirs, bar)]
        rows += [Row(name, "× flax's all(isfinite)", ours / flaxs, bar)]
    return rows


def _flax_all_finite(grads: Any) -> Any:
    """Return what `DynamicScale` computes."""
    finite = jnp.array(True)
    for grad in jax.tree.leaves(grads):
        finite &= jnp.all(jax.lax.is_finite(grad))
    return finite


def measure(quick: bool) -> list[Row]:
    """Measure everything on JAX's default device."""
    return check_rows(quick) + step_rows(quick)


if __name__ == "__main__":
    gpu = "not measured on a GPU" if DEVICE.platform == "cpu" else DEVICE.device_kind
    versions = f"jax {jax.__version__}, optax {optax.__version__}, {gpu}"
    sys.exit(run("jax", "What loss scaling costs in JAX", measure, versions, __doc__))
