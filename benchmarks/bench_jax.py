"""Cost of loss scaling in JAX, compared with no scaling, jmp, flax, mpx and optax: ratios of interleaved medians.

    python benchmarks/bench_jax.py                                      measure and print
    python benchmarks/bench_jax.py --quick                              a smoke test, in seconds
    python benchmarks/bench_jax.py --output-folder benchmarks  write the table

The rows of the optimizer alone time an Adam update from the scaled gradients of ResNet-50's 161 parameters. The rows of
a train step also contain the forward and the backward pass of a perceptron with float32 weights. The buffers of
parameters and states are donated. Runs on JAX's default device. Exits with status 1 if a bar is missed on the CPU by
more than the allowed noise.
"""

import functools
import math
import os
import platform
import sys
import time
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from contextlib import ExitStack
from multiprocessing import get_context
from typing import Any
from unittest.mock import patch

import jax
import jax.numpy as jnp
import jmp
import mpx
import optax
from flax.training.dynamic_scale import DynamicScale
from measuring import Row, interleaved, resnet50_shapes, run

from lossscale_core import DynamicScaling, SpikeGuard
from lossscale_jax import all_finite, get_scale_state, loss_scaled, scale

ADAM = optax.adam(1e-6)
SCALE = 2.0**10
OURS = DynamicScaling(init_scale=SCALE)
SHAPES = resnet50_shapes()[:12] if "--quick" in sys.argv else resnet50_shapes()  # compiling jmp's step takes long
DEVICE = jax.devices()[0]
ON = "cpu" if DEVICE.platform == "cpu" else "cuda"
WHERE = f"{len(SHAPES)} arrays ({ON})"
LAYERS, WIDTH, BATCH_SIZES = (2, 128, (8,)) if "--quick" in sys.argv else (8, 1024, (32, 256))
LARGE_LAYERS = LAYERS if "--quick" in sys.argv else 17  # more than 64 MiB, the size of an arena of glibc
KEEP_FREED_MEMORY = {"MALLOC_ARENA_MAX": "1", "MALLOC_MMAP_MAX_": "0", "MALLOC_TRIM_THRESHOLD_": str(2**32)}

NOTES = f"""The train steps train a perceptron with {LAYERS} layers of {WIDTH} units: {LAYERS * WIDTH**2 >> 18} MiB of
float32 weights, and twice as much for Adam. A CPU emulates float16, so the rows computed in float32, which need no
scaling, show the cost of scaling next to a fast backward pass.

Without scaling, XLA can apply each gradient as soon as it is computed. With scaling, all gradients stay in memory until
the check is complete, and the update reads them once more. This is the additional temporary memory. jmp, flax and mpx
select after the update, like `skip_by="select"`, and so also store the old parameters and states.

On a CPU, glibc returns blocks of 32 MiB and more to the system when they are freed, and the next step has a page fault
for each 4 KiB of them. With a small batch in float32, these faults take up to two fifths of the step. The rows with an
own process show them, because each process starts like the process of a user. The rows with freed memory kept run with
`{" ".join(f"{name}={value}" for name, value in KEEP_FREED_MEMORY.items())}`.
Without the first variable, blocks above 64 MiB, the size of an arena, are mapped again in each step. The remaining
difference is memory traffic: gradients are written, read by the check and read again by the update, while without
scaling they stay in the processor's cache.

The updates of `update` use the memory of the gradients, or a copy if the gradients come from outside of the compiled
function and are not donated. The addition reads them once more. For the optimizer alone, memory traffic sets a lower
bound of 8 / 7 = 1.14 × no scaling, because the check reads the gradients once more.

The row of two arrays shows the fixed cost of a step. The largest part is that nine more scalars, the state of
`loss_scaled`, go into the compiled step and out of it. Without donation XLA also copies these scalars."""
OTHER_WAY = "select" if ON == "cpu" else "cond"  # not the default of `loss_scaled(skip_by=)`
THE_OTHER_WAY = f'apply_gradients, skip_by="{OTHER_WAY}"'
PEERS = ("jmp", "flax DynamicScale", "mpx", "optax.apply_if_finite")

Step = Callable[[Any, Any], Any]


def arrays(dtype: Any) -> list[jax.Array]:
    """Return an array for each of ResNet-50's parameters."""
    keys = jax.random.split(jax.random.key(0), len(SHAPES))
    return [jax.random.normal(key, shape, dtype) for key, shape in zip(keys, SHAPES, strict=True)]


def plain(optimizer: Any) -> tuple[Step, Any]:
    """Return a step with an optax optimizer, and its first carry: everything that a step passes on to the next step."""

    def step(carry: Any, grads: Any) -> Any:
        params, opt_state = carry
        updates, opt_state = optimizer.update(grads, opt_state, params)
        return optax.apply_updates(params, updates), opt_state

    params = arrays(jnp.float32)
    return step, (params, optimizer.init(params))


def ours(**settings: Any) -> tuple[Step, Any]:
    """Return a step by `apply_gradients`, and its first carry."""
    optimizer = loss_scaled(ADAM, OURS, **settings)

    def step(carry: Any, grads: Any) -> Any:
        params, opt_state = carry
        return optimizer.apply_gradients(grads, opt_state, params)

    params = arrays(jnp.float32)
    return step, (params, optimizer.init(params))


def with_jmp() -> tuple[Step, Any]:
    """Return the step that jmp documents, and its first carry."""
    adam_step, carry = plain(ADAM)

    def step(carry: Any, grads: Any) -> Any:
        before, leaves = carry
        loss_scale = jmp.DynamicLossScale(*leaves)  # made here, because `lower` does not accept its pytree
        grads = loss_scale.unscale(grads)
        finite = jmp.all_finite(grads)
        return jmp.select_tree(finite, adam_step(before, grads), before), jax.tree.leaves(loss_scale.adjust(finite))

    return step, (carry, [jnp.float32(SCALE), jnp.int32(0)])


def with_flax() -> tuple[Step, Any]:
    """Return the step that flax documents, and its first carry."""
    adam_step, carry = plain(ADAM)

    @jax.custom_vjp
    def loss(params: Any, grads: Any) -> Any:
        return jnp.zeros(())

    # `grads` are scaled, so the derivative is `grads` whatever the cotangent.
    loss.defvjp(lambda params, grads: (jnp.zeros(()), grads), lambda grads, _: (grads, None))

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
    peers = [name for name in PEERS if name in contenders]
    return [
        Row(f"apply_gradients, Adam, {WHERE}", "× no scaling", times["ours"] / times["no scaling"], 1.15),
        *(Row(f"apply_gradients, Adam, {WHERE}", f"× {name}", times["ours"] / times[name], 0.6) for name in peers),
        Row(f"update and apply, Adam, {WHERE}", "× no scaling", times["ours, in two"] / times["no scaling"], 1.35),
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


def perceptron(layers: int = LAYERS, width: int = WIDTH) -> list[dict[str, jax.Array]]:
    """Return float32 weights."""
    keys = jax.random.split(jax.random.key(0), layers)
    weights = [jax.random.normal(key, (width, width)) / width**0.5 for key in keys]
    return [{"weight": weight, "bias": jnp.zeros(width)} for weight in weights]


def train_loss(dtype: Any) -> Callable[..., jax.Array]:
    """Return a loss that is computed in `dtype` up to its mean, which is float32."""

    def loss(params: Any, x: jax.Array) -> jax.Array:
        hidden = x.astype(dtype)
        for layer in params:
            hidden = jax.nn.relu(hidden @ layer["weight"].astype(dtype) + layer["bias"].astype(dtype))
        return jnp.mean(hidden.astype(jnp.float32) ** 2)

    return loss


def train_steps(dtype: Any, layers: int = LAYERS, width: int = WIDTH) -> dict[str, Callable[[], tuple[Step, Any]]]:
    """Return a function for each contender; it returns the documented train step and its first carry."""
    loss, params = train_loss(dtype), functools.partial(perceptron, layers, width)

    def with_optimizer(optimizer: Any, in_one: bool, is_scaled: bool = True) -> tuple[Step, Any]:
        def step(carry: Any, x: jax.Array) -> Any:
            params, opt_state = carry

            def scaled_loss(params: Any) -> jax.Array:
                return scale(loss(params, x), get_scale_state(opt_state)) if is_scaled else loss(params, x)

            grads = jax.grad(scaled_loss)(params)
            if in_one:
                return optimizer.apply_gradients(grads, opt_state, params)
            updates, opt_state = optimizer.update(grads, opt_state, params)
            return optax.apply_updates(params, updates), opt_state

        first = params()
        return step, (first, optimizer.init(first))

    def jmp_step(carry: Any, x: jax.Array) -> Any:
        params, opt_state, leaves = carry
        loss_scale = jmp.DynamicLossScale(*leaves)
        grads = loss_scale.unscale(jax.grad(lambda params: loss_scale.scale(loss(params, x)))(params))
        finite = jmp.all_finite(grads)
        stepped = jmp.select_tree(finite, _adam_step(params, opt_state, grads), (params, opt_state))
        return *stepped, jax.tree.leaves(loss_scale.adjust(finite))

    def flax_step(carry: Any, x: jax.Array) -> Any:
        params, opt_state, dynamic_scale = carry
        dynamic_scale, finite, _, grads = dynamic_scale.value_and_grad(lambda params: loss(params, x))(params)
        stepped = _adam_step(params, opt_state, grads)
        return *jax.tree.map(lambda a, b: jnp.where(finite, a, b), stepped, (params, opt_state)), dynamic_scale

    def mpx_step(carry: Any, x: jax.Array) -> Any:
        params, opt_state, (loss_scale, counter) = carry
        scaling = mpx.DynamicLossScaling(loss_scale, jnp.float32(1.0), counter=counter)
        _, scaling, finite, grads = mpx.filter_value_and_grad(loss, scaling)(params, x)
        return *mpx.optimizer_update(params, ADAM, opt_state, grads, finite), (scaling.loss_scaling, scaling.counter)

    def with_scaler(step: Step, scaler: Any) -> tuple[Step, Any]:
        first = params()
        return step, (first, ADAM.init(first), scaler)

    return {
        "no scaling": lambda: with_optimizer(ADAM, in_one=False, is_scaled=False),
        "apply_gradients": lambda: with_optimizer(loss_scaled(ADAM, OURS), in_one=True),
        "update and apply": lambda: with_optimizer(loss_scaled(ADAM, OURS), in_one=False),
        THE_OTHER_WAY: lambda: with_optimizer(loss_scaled(ADAM, OURS, skip_by=OTHER_WAY), in_one=True),
        "jmp": lambda: with_scaler(jmp_step, [jnp.float32(SCALE), jnp.int32(0)]),
        "flax DynamicScale": lambda: with_scaler(
            flax_step, DynamicScale(scale=jnp.float32(SCALE), fin_steps=jnp.int32(0))
        ),
        "mpx": lambda: with_scaler(mpx_step, (jnp.float32(SCALE), jnp.int32(0))),
        "optax.apply_if_finite": lambda: with_optimizer(optax.apply_if_finite(ADAM, 10), in_one=False, is_scaled=False),
    }


def _adam_step(params: Any, opt_state: Any, grads: Any) -> Any:
    updates, opt_state = ADAM.update(grads, opt_state, params)
    return optax.apply_updates(params, updates), opt_state


def train_rows(quick: bool) -> list[Row]:
    """Time whole train steps at two batch sizes, and return their temporary memory."""
    dtypes = (jnp.float16,) if quick else (jnp.float16, jnp.float32)
    rows = [row for dtype in dtypes for size in BATCH_SIZES for row in _train_rows(dtype, size, ON, quick)]
    if ON == "cpu" and platform.libc_ver()[0] == "glibc":
        for layers, size in ((LAYERS, BATCH_SIZES[0]), (LARGE_LAYERS, 2 * BATCH_SIZES[0])):
            rows += _rows_alone(quick, layers, size, keep=False) + _rows_alone(quick, layers, size, keep=True)
    return rows


def tiny_rows(quick: bool) -> list[Row]:
    """Time a step of two small arrays, in which the fixed cost of a step dominates."""
    contenders, x = train_steps(jnp.float32, layers=1, width=64), jax.random.normal(jax.random.key(1), (8, 64))
    turns = []
    for step, carry in (contenders["no scaling"](), contenders["apply_gradients"]()):
        turns.append(_Turn(jax.jit(step, donate_argnums=0).lower(carry, x).compile(), carry, x))
    plain_time, our_time = interleaved(turns, 3 if quick else 101, 20)
    work = f"train step, apply_gradients, 2 arrays, 8 samples, computed in float32 ({ON})"
    return [Row(work, "× no scaling", our_time / plain_time, math.inf)]


_alone: "_Turn"  # the step of this process


def _rows_alone(quick: bool, layers: int, size: int, keep: bool) -> list[Row]:
    """Time a step that page faults slow down; each contender runs in its own process, like a user's program."""
    model = (
        f"{size} samples" if layers == LAYERS else f"{layers * WIDTH**2 * 4 / 2**20:.0f} MiB of weights, {size} samples"
    )
    where = f"{model}, computed in float32 (cpu, own process{', freed memory kept' * keep})"
    bars = {"apply_gradients": 1.15, "update and apply": 1.25}
    with ExitStack() as stack:
        turns = []
        for name in ("no scaling", *bars):
            pool = ProcessPoolExecutor(1, get_context("spawn"), _begin_alone, (name, layers, size))
            stack.enter_context(pool)
            with patch.dict(os.environ, KEEP_FREED_MEMORY if keep else {}):  # glibc reads them when the process starts
                pool.submit(int).result()
            turns.append(functools.partial(_result, pool))
        plain, *times = interleaved(turns, 2 if quick else 41)
    return [
        Row(f"train step, {name}, {where}", "× no scaling", time / plain, bar)
        for (name, bar), time in zip(bars.items(), times, strict=True)
    ]


def _begin_alone(name: str, layers: int, size: int) -> None:
    """Compile the step of a contender in this process."""
    global _alone
    step, carry = train_steps(jnp.float32, layers)[name]()
    x = jax.random.normal(jax.random.key(1), (size, WIDTH))
    _alone = _Turn(jax.jit(step, donate_argnums=0).lower(carry, x).compile(), carry, x)


def _result(pool: ProcessPoolExecutor) -> None:
    pool.submit(_step_alone).result()


def _step_alone() -> None:
    _alone()


def _train_rows(dtype: Any, batch_size: int, on: str, quick: bool) -> list[Row]:
    where = f"{batch_size} samples, computed in {jnp.dtype(dtype).name} ({on})"
    x = jax.random.normal(jax.random.key(1), (batch_size, WIDTH))
    contenders = train_steps(dtype)
    if dtype == jnp.float32:  # mpx would compute in float16, and the other tools are for float16
        contenders = {name: contenders[name] for name in ("no scaling", "apply_gradients", "update and apply")}
    turns, memory = {}, {}
    for name, make in contenders.items():
        step, carry = make()
        compiled = jax.jit(step, donate_argnums=0).lower(carry, x).compile()
        memory[name] = compiled.memory_analysis().temp_size_in_bytes / 2**20
        turns[name] = _Turn(compiled, carry, x)
    times = dict(zip(turns, interleaved(list(turns.values()), 2 if quick else 25), strict=True))
    bars = {"apply_gradients": 1.15, "update and apply": 1.25, THE_OTHER_WAY: math.inf}
    rows = [
        Row(f"train step, {name}, {where}", "× no scaling", times[name] / times["no scaling"], bar)
        for name, bar in bars.items()
        if name in times
    ]
    work = f"train step, apply_gradients, {where}"
    peers = [name for name in PEERS if name in times]
    rows += [Row(work, f"× {name}", times["apply_gradients"] / times[name], 1.0) for name in peers]
    rows += [Row(f"its temporary memory: {name}, {where}", "MiB", memory[name], math.inf) for name in memory]
    return rows


class _Turn:
    """A function that takes a step from the carry of the step before it."""

    def __init__(self, step: Step, carry: Any, inputs: Any) -> None:
        self.step, self.carry, self.inputs = step, carry, inputs

    def __call__(self) -> None:
        self.carry = jax.block_until_ready(self.step(self.carry, self.inputs))


def check_rows(quick: bool) -> list[Row]:
    """Time the finite check alone against the checks of the other tools."""
    rows = []
    for dtype, bar in ((jnp.float32, 0.35), (jnp.float16, 0.6)):
        grads = arrays(dtype)
        checks = [jax.jit(check).lower(grads).compile() for check in (jmp.all_finite, _flax_all_finite, all_finite)]
        turns = [lambda check=check, grads=grads: check(grads).block_until_ready() for check in checks]
        jmp_time, flax_time, our_time = interleaved(turns, 3 if quick else 101)
        name = f"all_finite, {jnp.dtype(dtype).name}, {WHERE}"
        rows += [Row(name, "× jmp's all(isfinite)", our_time / jmp_time, bar)]
        rows += [Row(name, "× flax's all(isfinite)", our_time / flax_time, bar)]
    return rows


def _flax_all_finite(grads: Any) -> Any:
    """Return the check of `DynamicScale`."""
    finite = jnp.array(True)
    for grad in jax.tree.leaves(grads):
        finite &= jnp.all(jax.lax.is_finite(grad))
    return finite


def measure(quick: bool) -> list[Row]:
    """Measure all rows on JAX's default device."""
    return check_rows(quick) + step_rows(quick) + tiny_rows(quick) + train_rows(quick)


if __name__ == "__main__":
    gpu = "not measured on a GPU" if ON == "cpu" else DEVICE.device_kind
    versions = f"jax {jax.__version__}, optax {optax.__version__}, mpx {mpx.__version__}, {gpu}"
    name, title = ("jax", "") if ON == "cpu" else ("jax-cuda", " on a GPU")
    sys.exit(run(name, f"What loss scaling costs in JAX{title}", measure, versions, __doc__, NOTES))
