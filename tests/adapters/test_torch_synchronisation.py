"""How often a step waits for its device, counted; and what `torch.compile` makes of a changing scale."""

import subprocess
import sys
from typing import Any

import pytest
import torch
from torch._dynamo.testing import CompileCounter
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

from lossscale_core.errors import PolicyError
from lossscale_torch import GradScaler, all_finite, init_state, scale, select, unscale


class _Lists(TorchFunctionMode):
    """Counts the tensors that are read as lists, which on a CPU no dispatch mode sees."""

    count = 0

    def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Count `.tolist()`."""
        self.count += function is torch.Tensor.tolist
        return function(*args, **(kwargs or {}))


class _Synchronisations(TorchDispatchMode):
    """Counts the reads of a tensor's value, each of which waits for its device."""

    def __init__(self) -> None:
        super().__init__()
        self._items, self._lists = 0, _Lists()

    def __enter__(self) -> "_Synchronisations":
        """Begin to count."""
        self._lists.__enter__()
        return super().__enter__()

    def __exit__(self, *exception: Any) -> None:
        """End to count."""
        super().__exit__(*exception)
        self._lists.__exit__(*exception)

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Count `.item()` and its kin."""
        self._items += function is torch.ops.aten._local_scalar_dense.default
        return function(*args, **(kwargs or {}))

    @property
    def count(self) -> int:
        """The reads up to now."""
        return self._items + self._lists.count


def _count(make, clip=False, unscale_first=False, finite=True):
    """Return the synchronisations of one step, past the first."""
    params = [torch.nn.Parameter(torch.ones(3)) for _ in range(5)]
    optimizer = make(params)
    scaler = GradScaler("cpu")
    for _ in range(3):
        with _Synchronisations() as seen:
            scaler.scale(torch.ones(()))
            for param in params:
                param.grad = torch.full((3,), 1.0 if finite else float("inf"))
            before = seen.count
            if clip:
                scaler.unscale_and_clip_(optimizer, 1.0)
            elif unscale_first:
                scaler.unscale_(optimizer)
            scaler.step(optimizer)
            scaler.update()
            counted = seen.count - before
    return counted


class _Plain(torch.optim.Optimizer):
    """An optimizer with a step that reads nothing."""

    def __init__(self, params: Any) -> None:
        super().__init__(params, {})

    def step(self, closure: Any = None) -> None:
        """Do nothing."""


@pytest.mark.parametrize("finite", [True, False])
@pytest.mark.parametrize("unscale_first", [True, False])
def test_an_ordinary_optimizer_costs_one_synchronisation_a_step(finite, unscale_first):
    """The flag, once; the scale is updated on the host and not read."""
    assert _count(_Plain, unscale_first=unscale_first, finite=finite) == 1


@pytest.mark.parametrize("unscale_first", [True, False])
@pytest.mark.parametrize("finite", [True, False])
def test_a_fused_optimizer_costs_none(finite, unscale_first):
    """Flag, decision and update stay on the device."""
    assert _count(lambda p: torch.optim.SGD(p, lr=0.1, fused=True), unscale_first=unscale_first, finite=finite) == 0


def test_clipping_costs_an_ordinary_optimizer_the_same_one_synchronisation():
    """It reads the norm: if the norm is finite, so are the gradients."""
    assert _count(_Plain, clip=True) == 1


class _FusedOnMeta(_Plain):
    """What a fused optimizer is to a scaler, on a device that cannot be waited for."""

    _step_supports_amp_scaling = True

    def step(self, closure: Any = None) -> None:
        """Take the factor, if any is left, and the flag, which stay where they are."""
        assert self.grad_scale is None or self.grad_scale.is_meta
        assert self.found_inf.is_meta


@pytest.mark.parametrize("norm_type", [2.0, float("inf")])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_clipping_costs_a_fused_optimizer_none(norm_type, dtype):
    """A whole step runs on torch's `meta` device, which has no values to read."""
    params = [torch.nn.Parameter(torch.ones(3, device="meta", dtype=dtype)) for _ in range(2)]
    optimizer = _FusedOnMeta(params)
    scaler = GradScaler("meta", policy="dynamic")
    for _ in range(3):
        for param in params:
            param.grad = torch.ones_like(param)
        scaler.scale(torch.ones((), device="meta"))
        assert scaler.unscale_and_clip_(optimizer, 1.0, norm_type).is_meta
        scaler.step(optimizer)
        assert scaler.update().applied.is_meta


def test_reading_the_outcome_is_what_costs():
    """`info.applied` of a fused step is a tensor until it is read."""
    param = torch.nn.Parameter(torch.ones(3))
    optimizer = torch.optim.SGD([param], lr=0.1, fused=True)
    scaler = GradScaler("cpu")
    with _Synchronisations() as seen:
        scaler.scale(torch.ones(()))
        param.grad = torch.ones(3)
        scaler.step(optimizer)
        info = scaler.update()
        scaler.metrics()
        assert seen.count == 0
        assert info.applied
        assert seen.count == 1


def test_the_verbs_need_no_values():
    """On torch's `meta` device, which has none, every verb runs: none of them waits for anything."""
    state = init_state("dynamic", device="meta")
    grads = {
        "w": torch.ones(3, device="meta", dtype=torch.float16),
        "none": None,
        "n": torch.ones(2, dtype=torch.int32),
    }
    assert scale(grads["w"], state).dtype == torch.float32
    assert unscale(grads, state)["w"].dtype == torch.float32
    flag = torch.empty((), dtype=torch.bool, device="meta")
    assert select(flag, {"w": grads["w"]}, {"w": grads["w"]})["w"].shape == (3,)


@pytest.mark.filterwarnings("default:The .grad attribute")  # Dynamo's own, where it resumes within a training step
@pytest.mark.parametrize("fused", [False, True])
def test_a_changing_scale_does_not_recompile(fused):
    """One compiled training step serves every scale."""
    torch._dynamo.reset()
    model = torch.nn.Linear(4, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, fused=fused)
    scaler = GradScaler("cpu", init_scale=2.0**10, growth_interval=1)
    frames = CompileCounter()

    @torch.compile(backend=frames)
    def train(x):
        scaler.scale(model(x).sum()).backward()

    counts = []
    scales = set()
    for step in range(12):
        optimizer.zero_grad()
        train(torch.ones(2, 4))
        if step % 3 == 2:
            model.weight.grad[0, 0] = float("inf")
        scaler.step(optimizer)
        scaler.update()
        scales.add(scaler.get_scale())
        counts.append(frames.frame_count)
    assert len(scales) > 4
    assert counts[-1] == counts[3], counts


def _graph_breaks(make_scaler):
    """Return how often a compiled training step, scaler and all, leaves its graph."""
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    model = torch.nn.Linear(4, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    scaler = make_scaler("cpu", init_scale=8.0, growth_interval=1)

    @torch.compile(backend="eager")
    def train(x):
        scaler.scale(model(x).sum()).backward()
        scaler.step(optimizer)
        scaler.update()

    for _ in range(3):
        optimizer.zero_grad()
        train(torch.ones(2, 4))
    assert scaler.get_scale() == 64.0
    return sum(torch._dynamo.utils.counters["graph_break"].values())


@pytest.mark.filterwarnings("default:The .grad attribute")  # Dynamo's own, where it resumes within a training step
@pytest.mark.filterwarnings("default:.*torch.jit.*:DeprecationWarning")  # of what Dynamo itself calls in an optimizer
def test_a_compiled_step_breaks_its_graph_no_more_often_than_with_torchs_scaler():
    """Neither the methods nor the hook on the scaled loss are traced."""
    assert _graph_breaks(GradScaler) <= _graph_breaks(torch.amp.GradScaler)


def test_importing_leaves_the_compiler_alone():
    """It takes longer to import than this package, and a plain loop has no use for it."""
    code = "import sys, lossscale_torch; sys.exit('torch._dynamo' in sys.modules)"
    subprocess.run([sys.executable, "-c", code], check=True)


def test_compiled_autograd_takes_the_hook_on_the_scaled_loss():
    """It traces backward, and the scaler continues."""
    torch._dynamo.reset()
    model = torch.nn.Linear(4, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    scaler = GradScaler("cpu", init_scale=8.0, growth_interval=1)
    with torch._dynamo.compiled_autograd._enable(torch.compile(backend="eager")):
        for _ in range(3):
            optimizer.zero_grad()
            scaler.scale(model(torch.ones(2, 4)).sum()).backward()
            scaler.step(optimizer)
            scaler.update()
    assert scaler.get_scale() == 64.0


def test_the_verbs_on_python_numbers():
    """A number is a leaf of float32, next to tensors or alone; integers and None do not count."""
    state = init_state("dynamic")
    assert scale(1.0, state).item() == scale(1, state).item() == 2.0**16
    assert scale({"loss": 2.0, "none": None}, state)["loss"].dtype == torch.float32
    assert unscale([2.0**16, 3, None], state) == [1.0, 3, None]
    assert all_finite(1.0)
    assert all_finite(1 + 2j)
    assert not all_finite({"a": torch.ones(2), "b": float("nan")})
    with pytest.raises(TypeError, match="'1' is not a tensor"):
        all_finite("1")


def test_wrong_arguments_are_named_in_one_sentence():
    """Swapped ones above all: the message says what was given, and the order."""
    state, loss, grads, flag = init_state("dynamic"), torch.ones(()), {"w": torch.ones(2)}, torch.tensor(True)
    scale_order, unscale_order = r"in this order: scale\(loss, state\)", r"in this order: unscale\(grads, state\)"
    for call, message in {
        lambda: scale(state, loss): rf"state is a torch.float32 tensor of shape \(\), .* {scale_order}",
        lambda: scale(loss, "dynamic"): f"state is 'dynamic', .* {scale_order}",
        lambda: scale(loss, GradScaler("cpu")): "state is a value of type GradScaler",
        lambda: scale("loss", state): "'loss' is not a number",
        lambda: scale(object(), state): "a value of type object is not a number",
        lambda: unscale(state, grads): f"state is a value of type dict, .* {unscale_order}",
        lambda: unscale(grads, 4.0): "state is 4.0",
        lambda: unscale(
            iter([loss]), state
        ): "a value of type list_iterator is not a tensor; .* in dicts, lists and tuples",
        lambda: select(
            grads, grads, flag
        ): r"grads_finite is a value of type dict, .* order: select\(grads_finite, new, old\)",
        lambda: select(loss, loss, flag): r"grads_finite is a torch.float32 tensor of shape \(\)",
        lambda: select(torch.tensor([True, False]), grads, grads): r"is a torch.bool tensor of shape \(2,\)",
        lambda: select(None, grads, grads): "grads_finite is None",
    }.items():
        with pytest.raises(TypeError, match=message):
            call()
    with pytest.raises(PolicyError, match="'cuda' is not a loss-scaling policy; pass a policy such as"):
        init_state("cuda")


def test_the_verbs_on_real_tensors():
    """The functional verbs: values, dtypes, sparse and complex gradients, structures."""
    state = init_state("dynamic")
    half = torch.full((2,), 2.0**-8, dtype=torch.float16)
    assert unscale([half], state)[0].tolist() == [2.0**-24] * 2
    assert scale(half, state).tolist() == [2.0**8] * 2
    sparse = torch.sparse_coo_tensor([[0, 0]], [3e38, 3e38], (2,), check_invariants=True)
    assert not all_finite([half, sparse])
    assert all_finite({"a": [half, None, 3], "b": torch.tensor([1e38 + 1j])})
    assert not all_finite(torch.tensor([complex(0, float("inf"))]))
    assert all_finite([])
    old, new = {"w": torch.zeros(2), "n": 1}, {"w": torch.ones(2), "n": 2}
    assert select(all_finite([half]), new, old)["w"].tolist() == [1.0, 1.0]
    assert select(torch.tensor(False), new, old)["n"].item() == 1
    assert select(False, new, old)["w"] is old["w"]
