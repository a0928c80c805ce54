"""The private names of torch that the package uses, in one list: this module names those that a version lacks."""

import ast
import importlib
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.testing._internal.distributed.fake_pg import FakeStore

from tests.torch_versions import TORCH

SOURCES = Path(__file__).parents[2] / "src"
FOLDERS = (SOURCES / "lossscale_torch", SOURCES / "lossscale/tracing")
FUNCTIONS = [
    "torch._amp_foreach_non_finite_check_and_unscale_",
    "torch._amp_update_scale_",
    "torch._foreach_copy_",
    "torch._foreach_mul_",
    "torch._foreach_norm",
    "torch._C._current_autograd_node",
    "torch._C._current_graph_task_id",
    "torch._C._len_torch_dispatch_stack",
    "torch._utils._flatten_dense_tensors",
    "torch._utils._unflatten_dense_tensors",
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
    "_modules": torch.nn.Module,
    "_non_persistent_buffers_set": torch.nn.Module,
    "_parameters": torch.nn.Module,
    "_post_accumulate_grad_hooks": lambda: torch.ones((), requires_grad=True),
    "_values": lambda: torch.ones(1).to_sparse(),
    "_version": lambda: torch.ones(()),
    "_sequence_nr": lambda: torch.ones((), requires_grad=True).exp().grad_fn,
    "_cdata": lambda: torch.ones(()).untyped_storage(),
    "_schema": lambda: torch.ops.aten.add.Tensor,
    "_step_supports_amp_scaling": lambda: torch.optim.SGD([torch.ones(())], fused=True),
}
OF_A_MESH = ["_get_root_mesh", "_flatten_mapping"]
WRITTEN = {"_torchdynamo_disable"}  # Dynamo reads it
OTHERS = {"_C", "_Function", "_asdict", "_fields", "_make", "_replace"}  # a module, a type variable, of NamedTuples


@pytest.mark.parametrize("path", [*FUNCTIONS, *(OF_DYNAMO if TORCH >= (2, 7) else OF_OLD_DYNAMO)])
def test_a_private_function_exists(path):
    """If not: put a replacement into `lossscale_torch/_versions.py`."""
    module, _, name = path.rpartition(".")
    assert hasattr(importlib.import_module(module), name)


@pytest.mark.parametrize("name", ATTRIBUTES)
def test_a_private_attribute_exists(name):
    """If not: put a replacement into `lossscale_torch/_versions.py`."""
    assert hasattr(ATTRIBUTES[name](), name)


@pytest.mark.skipif(TORCH < (2, 10), reason="earlier versions keep them elsewhere, and the package does without them")
def test_the_private_attributes_of_a_mesh_exist():
    """Without them, `lossscale_torch/_versions.py` finds no mesh that was flattened."""
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=4)
    try:
        mesh = init_device_mesh("cpu", (2, 2))
        assert all(hasattr(mesh, name) for name in OF_A_MESH)
    finally:
        dist.destroy_process_group()


def _private_names():
    """Yield the private names in the sources, and what is imported from private modules of torch."""
    trees = [ast.parse(path.read_text(encoding="utf-8")) for folder in FOLDERS for path in folder.rglob("*.py")]
    nodes = [node for tree in trees for node in ast.walk(tree)]
    methods = {
        node.name
        for each in nodes
        if isinstance(each, ast.ClassDef)
        for node in ast.walk(each)
        if hasattr(node, "name")
    }
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
    listed = {*paths, *ATTRIBUTES, *OF_A_MESH, *WRITTEN, *OTHERS}
    assert {name for name in used if name.startswith("_")} <= listed
    assert listed <= used


@pytest.mark.parametrize("run", ["minimize", "range_report"])
def test_a_sharded_model_on_a_cpu_is_explained(run):
    """What torch 2.6 raises in its forward pass gets a note that says which version runs it."""
    from lossscale_torch import GradScaler, range_report  # not above, since it needs most of the names

    model = torch.nn.Linear(1, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    def loss_fn():
        raise AttributeError("'Stream' object has no attribute 'record_event'")

    with pytest.raises(AttributeError) as raised:
        range_report(model, loss_fn) if run == "range_report" else GradScaler("cpu").minimize(optimizer, loss_fn)
    assert raised.value.__notes__ == ["FSDP2 does not run on a CPU before torch 2.7; update torch, or train on GPUs."]
