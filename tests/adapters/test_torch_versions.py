"""The private names of torch that the package uses, in one list: this module names those that a version lacks."""

import ast
import importlib
from pathlib import Path

import pytest
import torch

from tests.torch_versions import TORCH

SOURCES = Path(__file__).parents[2] / "src"
FILES = [*(SOURCES / "lossscale_torch").rglob("*.py"), SOURCES / "lossscale/_recording.py"]
FUNCTIONS = [
    "torch._amp_foreach_non_finite_check_and_unscale_",
    "torch._amp_update_scale_",
    "torch._assert_async",
    "torch._foreach_copy_",
    "torch._foreach_mul_",
    "torch._foreach_norm",
    "torch.amp.grad_scaler._refresh_per_optimizer_state",
    "torch._C._current_autograd_node",
    "torch._C._are_functorch_transforms_active",
    "torch._C._len_torch_dispatch_stack",
    "torch._utils._flatten_dense_tensors",
    "torch.autograd._get_sequence_nr",
    "torch.utils._python_dispatch.TorchDispatchMode",
    "torch.utils._python_dispatch._disable_current_modes",
]
OF_DYNAMO = [
    "torch._C._dynamo.eval_frame._FrameAction",
    "torch._C._dynamo.eval_frame._FrameExecStrategy",
    "torch._C._dynamo.eval_frame.set_code_exec_strategy",
]
OF_OLD_DYNAMO = ["torch._C._dynamo.eval_frame.skip_code"]
ATTRIBUTES = {  # of the object that each function makes
    "_buffers": torch.nn.Module,
    "_non_persistent_buffers_set": torch.nn.Module,
    "_post_accumulate_grad_hooks": lambda: torch.ones((), requires_grad=True),
    "_version": lambda: torch.ones(()),
    "_is_view": lambda: torch.ones(()),
    "_sequence_nr": lambda: torch.ones((), requires_grad=True).exp().grad_fn,
    "_scale": lambda: torch.amp.GradScaler("cpu"),
    "_check_scale_growth_tracker": lambda: torch.amp.GradScaler("cpu"),
    "_device": lambda: torch.amp.GradScaler("cpu"),
    "_enabled": lambda: torch.amp.GradScaler("cpu"),
    "_step_supports_amp_scaling": lambda: torch.optim.SGD([torch.ones(())], fused=True),
}
WRITTEN = {"_torchdynamo_disable", "_wrapped_by_lr_sched"}  # Dynamo and schedulers read them
OF_FSDP2 = {"_get_fsdp_state", "_mp_policy"}  # test_torch_float32.py reads them from a sharded model
OF_BACKWARD = {"_in_backward_optimizers"}  # test_torch_transactions.py has it set by torch
OWN = {"_lossscale", "_is_scaled"}  # set on modules, optimizers and losses
# a module, a type variable, of NamedTuples
OTHERS = {"_C", "_Function", "_asdict", "_fields", "_make", "_replace"}


@pytest.mark.parametrize("path", [*FUNCTIONS, *(OF_DYNAMO if TORCH >= (2, 7) else OF_OLD_DYNAMO)])
def test_a_private_function_exists(path):
    """If not: put a replacement into `lossscale_torch/_versions.py`."""
    module, _, name = path.rpartition(".")
    assert hasattr(importlib.import_module(module), name)


@pytest.mark.parametrize("name", ATTRIBUTES)
def test_a_private_attribute_exists(name):
    """If not: put a replacement into `lossscale_torch/_versions.py`."""
    assert hasattr(ATTRIBUTES[name](), name)


def _private_names():
    """Yield the private names in the sources, and what is imported from private modules of torch."""
    nodes = [node for path in FILES for node in ast.walk(ast.parse(path.read_text(encoding="utf-8")))]
    classes = [each for each in nodes if isinstance(each, ast.ClassDef)]
    methods = {node.name for each in classes for node in ast.walk(each) if hasattr(node, "name")}
    stored = [node for node in nodes if isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store)]
    fields = {node.target.id for node in nodes if isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name)}
    ours = methods | fields | {node.attr for node in stored if ast.unparse(node.value) in ("self", "cls")}
    for node in nodes:
        if isinstance(node, ast.Attribute) and node.attr not in ours:
            yield node.attr
        elif isinstance(node, ast.Constant) and isinstance(node.value, str) and node.value not in ours:
            yield node.value
        elif isinstance(node, ast.ImportFrom) and node.module.startswith("torch."):
            is_private = any(part.startswith("_") for part in node.module.split("."))
            yield from (alias.name for alias in node.names if is_private or alias.name.startswith("_"))


def test_the_list_is_complete():
    """Every private name in the sources is one of ours, or is listed above."""
    used = {name for name in _private_names() if name.isidentifier() and not name.startswith("__")}
    paths = [path.rpartition(".")[2] for path in (*FUNCTIONS, *OF_DYNAMO, *OF_OLD_DYNAMO)]
    listed = {*paths, *ATTRIBUTES, *WRITTEN, *OF_FSDP2, *OF_BACKWARD, *OWN, *OTHERS}
    assert {name for name in used if name.startswith("_")} <= listed
    assert listed <= used
