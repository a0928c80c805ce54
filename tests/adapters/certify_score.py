"""The score of `lossscale certify` and `lossscale run --plant`: right programs that hold, and bugs that are found.

python -m tests.adapters.certify_score           measure, and print the tables
python -m tests.adapters.certify_score --write   write them into docs/certify.md
"""

import json
import subprocess
import sys
import tempfile
import textwrap
import warnings
from pathlib import Path
from typing import NamedTuple

from lossscale_torch.testing import certify_training_loop

ROOT = Path(__file__).parents[2]
PAGE = ROOT / "docs/certify.md"
MARKS = ("<!-- score -->\n", "<!-- end of score -->\n")
SOURCE = Path(__file__).with_name("certified_loops.py").read_text(encoding="utf-8")
LOOPS = {
    "NanoGPT": "nanoGPT: micro-batches, a rate by iteration",
    "MinGPTDDP": "minGPT-DDP: a snapshot, a schedule, DDP",
    "Timm": "timm: a scaler in one call, EMA, BatchNorm",
    "ActorStep": "an actor's step of RL: accumulation, clipping",
    "Detection": "detection: weighted losses, scales compared",
    "GAN": "a GAN: two optimizers, one update",
    "MixtureOfExperts": "a mixture of experts: a router's loss",
    "Speech": "speech: a GRU, CTC, clipping by value",
    "Diffusion": "diffusion: random noise, EMA",
    "Recommender": "a recommender: a sparse table",
}


class Bug(NamedTuple):
    """One fault: the lines of a program that it replaces."""

    what: str
    program: str
    old: str
    new: str
    is_found: bool = True
    """Whether the command is expected to find it."""


_CLIP = "        nn.utils.clip_grad_norm_(self.model.parameters(), {})\n"
_UNSCALE = "        self.scaler.unscale_(self.optimizer)\n"
_STEP = "        self.scaler.step(self.optimizer)\n"

BUGS = [
    Bug("the rate counts attempts", "NanoGPT", "+= bool(info.applied)", "+= 1"),
    Bug("no zero_grad", "NanoGPT", "        self.optimizer.zero_grad(set_to_none=True)\n", ""),
    Bug(
        "zero_grad only after applied steps",
        "NanoGPT",
        "        self.optimizer.zero",
        "        if info.applied: self.optimizer.zero",
    ),
    Bug("unscaled after the clip", "NanoGPT", _UNSCALE + _CLIP.format(0.1), _CLIP.format(0.1) + _UNSCALE),
    Bug(
        "one micro-batch is not scaled",
        "NanoGPT",
        "self.scaler.scale(loss).b",
        "(self.scaler.scale(loss) if micro_step else loss).b",
    ),
    Bug(
        "the scaler is not saved",
        "NanoGPT",
        "class NanoGPT(_Loop):",
        "class NanoGPT(_Loop):\n    parts = ('model', 'optimizer')\n",
    ),
    Bug("the schedule moves on a skip", "MinGPTDDP", "if info.applied:", "if True:"),
    Bug("the optimizer is stepped without the scaler", "MinGPTDDP", _STEP, "        self.optimizer.step()\n"),
    Bug("the schedule is not saved", "MinGPTDDP", '"optimizer", "scheduler",', '"optimizer",'),
    Bug(
        "EMA moves on a skip",
        "Timm",
        "        if info.applied:\n            self.ema",
        "        if True:\n            self.ema",
    ),
    Bug("BatchNorm moves on a skip", "Timm", "        self.protect = [self.model]\n", ""),
    Bug(
        "gradients are repaired",
        "ActorStep",
        _UNSCALE,
        "        for p in self.model.parameters(): p.grad.nan_to_num_(0, 0, 0)\n" + _UNSCALE,
    ),
    Bug(
        "zero_grad between micro-batches",
        "ActorStep",
        "            self.scaler.scale(",
        "            self.optimizer.zero_grad(); self.scaler.scale(",
    ),
    Bug("scaled twice", "Detection", "self.scaler.scale(loss)", "self.scaler.scale(self.scaler.scale(loss))"),
    Bug(
        "one loss has a backward pass of its own",
        "Detection",
        "self.scaler.scale(loss).backward()",
        "self.scaler.scale(loss).backward(retain_graph=True); losses['boxes'].backward()",
    ),
    Bug(
        "the critic's loss is not scaled",
        "GAN",
        "self.scaler.scale(loss).backward()\n        self.scaler.step(self.other)",
        "loss.backward()\n        self.scaler.step(self.other)",
    ),
    Bug(
        "an update after each optimizer",
        "GAN",
        "self.scaler.step(self.other)",
        "self.scaler.step(self.other); self.scaler.update()",
    ),
    Bug("one loss inside the graph is not scaled", "MixtureOfExperts", "self.scaler.attach(", "_Router.apply("),
    Bug("clipped by value before unscaling", "Speech", _UNSCALE, ""),
    Bug("the logged norm is that of scaled gradients", "Recommender", _UNSCALE, "", is_found=False),
]


def build_of(program, old="", new=""):
    """Return the class of a loop, with some lines of it replaced."""
    start = SOURCE.index(f"class {program}(")
    end = SOURCE.find("\nclass ", start + 1)
    own = SOURCE[start : end if end > 0 else len(SOURCE)]
    if old:
        assert own.count(old) == 1 or old.startswith("self.scaler.scale(loss).b"), (program, old)
    names = {"__name__": "certified_loops"}
    exec(compile(SOURCE.replace(own, own.replace(old, new, 1) if old else own), program, "exec"), names)
    return names[program]


def faults(build):
    """Return the checks that a loop does not hold."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # wrong loops move their schedules before their optimizers
        return [check for check in certify_training_loop(build) if check.held is False]


def loop_rows():
    """Yield for each right loop and each bug: its kind, its name and the result."""
    for name, what in LOOPS.items():
        yield "right", what, "not held" if faults(build_of(name)) else "held"
    for bug in BUGS:
        found = faults(build_of(bug.program, bug.old, bug.new))
        yield "bug", f"{bug.what} ({bug.program})", "found" if found else "not found"


SCRIPTS = {
    "nanoGPT": """
        import os, torch
        torch.manual_seed(0)
        model = torch.nn.Sequential(torch.nn.Embedding(16, 8), torch.nn.LayerNorm(8), torch.nn.Linear(8, 16))
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
        scaler = torch.amp.GradScaler("cpu")
        iter_num = 0
        if "resume" in os.sys.argv:
            checkpoint = torch.load("ckpt.pt")
            model.load_state_dict(checkpoint["model"])
            optimizer.load_state_dict(checkpoint["optimizer"])
            scaler.load_state_dict(checkpoint["scaler"])
        for _ in range(8):
            for group in optimizer.param_groups:
                group["lr"] = 1e-2 / (1 + iter_num)
            for micro_step in range(2):
                tokens = torch.randint(16, (8, 4))
                logits = model(tokens)
                loss = torch.nn.functional.cross_entropy(logits[:, :-1].flatten(0, 1), tokens[:, 1:].flatten()) / 2
                scaler.scale(loss).backward()
            scaler.unscale_(optimizer)
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            before = scaler.get_scale()
            scaler.step(optimizer)
            scaler.update()
            optimizer.zero_grad(set_to_none=True)
            iter_num += scaler.get_scale() >= before
        saved = {"model": model.state_dict(), "optimizer": optimizer.state_dict(), "scaler": scaler.state_dict()}
        torch.save(saved, "ckpt.pt")
    """,
    "images": """
        import torch
        torch.manual_seed(0)
        first, last = torch.nn.Conv1d(1, 4, 3), torch.nn.Linear(8, 3)
        model = torch.nn.Sequential(first, torch.nn.GroupNorm(2, 4), torch.nn.Flatten(), last)
        average = torch.optim.swa_utils.AveragedModel(model)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
        scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.9)
        scaler = torch.cpu.amp.GradScaler()
        for batch in range(8):
            output = model(torch.randn(8, 1, 4))
            loss = torch.nn.functional.cross_entropy(output, torch.arange(8) % 3)
            optimizer.zero_grad()
            scaler.scale(loss).backward()
            before = scaler.get_scale()
            scaler.step(optimizer)
            scaler.update()
            if scaler.get_scale() >= before:
                scheduler.step()
                average.update_parameters(model)
    """,
    "ranks": """
        import torch
        torch.distributed.init_process_group("gloo")

        def train():
            torch.manual_seed(torch.distributed.get_rank())
            model = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(4, 1))
            optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
            scaler = torch.amp.GradScaler("cpu")
            for batch in range(8):
                optimizer.zero_grad()
                scaler.scale((model(torch.randn(8, 4)) - 1).square().mean()).backward()
                scaler.unscale_(optimizer)
                torch.nn.utils.clip_grad_value_(model.parameters(), 0.1)
                scaler.step(optimizer)
                scaler.update()

        train()
        torch.distributed.barrier()
        torch.distributed.destroy_process_group()
    """,
}
SCRIPT_NAMES = {
    "nanoGPT": "a script as nanoGPT: micro-batches, a rate by iteration, a checkpoint, `--resume`",
    "images": "a script that trains on images: EMA, a schedule",
    "ranks": "a script under torchrun: DDP on two ranks, clipping by value",
}
SCRIPT_BUGS = [
    Bug("the rate counts attempts", "nanoGPT", "+= scaler.get_scale() >= before", "+= 1"),
    Bug("unscaled after the clip", "nanoGPT", "    scaler.unscale_(optimizer)\n", "    pass\n"),
    Bug("no zero_grad", "nanoGPT", "    optimizer.zero_grad(set_to_none=True)\n", ""),
    Bug("the scaler is not saved", "nanoGPT", ', "scaler": scaler.state_dict()', ""),
    Bug("the scaler is not loaded", "nanoGPT", 'scaler.load_state_dict(checkpoint["scaler"])', "pass"),
    Bug(
        "the schedule moves on a skip",
        "images",
        "        scheduler.step()",
        "        pass\n    scheduler.step()\n    if True:",
    ),
    Bug("EMA moves on a skip", "images", "        average.up", "        pass\n    if True:\n        average.up"),
    Bug("BatchNorm moves on a skip", "images", "GroupNorm(2, 4)", "BatchNorm1d(4)"),
    Bug(
        "the optimizer is stepped without the scaler",
        "images",
        "scaler.step(optimizer)",
        "scaler.unscale_(optimizer); optimizer.step()",
    ),
    Bug(
        "gradients are repaired",
        "ranks",
        "        scaler.unscale_(optimizer)\n",
        "        for p in model.parameters(): p.grad.nan_to_num_(0, 0, 0)\n        scaler.unscale_(optimizer)\n",
    ),
    Bug(
        "a hook adds to the gradients",
        "ranks",
        "scaler = ",
        "model.module.weight.register_hook(lambda grad: grad + 1e-3)\n    scaler = ",
    ),
    Bug(
        "each rank trains alone",
        "ranks",
        "torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(4, 1))",
        "torch.nn.Linear(4, 1)",
    ),
]


def run_script(folder, program, old="", new="", options=("--plant", "3,4")):
    """Run a script under the command, with some lines of it replaced; return its exit status and the page's content."""
    text = textwrap.dedent(SCRIPTS.get(program, program))
    assert not old or text.count(old) == 1, (program, old)
    (folder / "train.py").write_text(text.replace(old, new), encoding="utf-8")
    launcher = [sys.executable]
    if program == "ranks":
        launcher += ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    resume = ["--resume", f"{sys.executable} train.py resume"] if program == "nanoGPT" else []
    command = [sys.executable, "-m", "lossscale", "run", *options, "--page", "page.md", "--overwrite", *resume, "--"]
    done = subprocess.run(
        [*command, *launcher, "train.py"], cwd=folder, capture_output=True, text=True, check=False, timeout=200
    )
    return done, json.loads((folder / "page.json").read_text(encoding="utf-8"))


def script_rows():
    """Return the same rows for scripts under `lossscale run --plant`."""
    bugs = [Bug("", name, "", "") for name in SCRIPTS] + SCRIPT_BUGS
    for bug in bugs:
        with tempfile.TemporaryDirectory() as folder:
            _, page = run_script(Path(folder), bug.program, bug.old, bug.new)
        if bug.what:
            yield "bug", f"{bug.what} ({bug.program})", "found" if page["result"] == "not held" else "not found"
        else:
            yield "right", SCRIPT_NAMES[bug.program], page["result"]


def table(title, rows):
    """Return a table in Markdown, with the numbers above it."""
    rows = list(rows)
    right, bugs = ([row[2] for row in rows if row[0] == kind] for kind in ("right", "bug"))
    numbers = (
        f"{right.count('held')} of {len(right)} right ones hold, {bugs.count('found')} of {len(bugs)} bugs are found."
    )
    lines = [f"| {'' if kind == 'right' else 'bug: '}{what} | {result} |" for kind, what, result in rows]
    return "\n".join([f"**{title}:** {numbers}", "", "| program | result |", "|---|---|", *lines, "", ""])


def tables(loops, scripts):
    """Return the tables of loops and of scripts."""
    return table("`lossscale certify`, loops", loops) + table("`lossscale run --plant`, scripts", scripts)


def main():
    """Measure, and print the tables or write them into the page."""
    found = tables(loop_rows(), script_rows())
    if "--write" in sys.argv[1:]:
        before, rest = PAGE.read_text(encoding="utf-8").split(MARKS[0])
        PAGE.write_text(f"{before}{MARKS[0]}\n{found}{MARKS[1]}{rest.split(MARKS[1])[1]}", encoding="utf-8")
    print(found)


if __name__ == "__main__":
    main()
