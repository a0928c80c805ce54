"""The callback of docs/trainers.md for bfloat16, under transformers' Trainer and TRL's, on a CPU."""

import math
import shutil
from itertools import pairwise

import pytest
import torch
from transformers import Trainer, TrainerCallback, TrainingArguments

from tests.adapters.pages import code_of
from tests.adapters.test_torch_recipes import _ModelWithLoss, _rows, _small_language_model
from tests.adapters.test_torch_recipes import accelerate_afresh as accelerate_afresh

pytestmark = pytest.mark.filterwarnings("default")  # these packages warn of their own matters
BAD = {3: math.inf, 6: math.nan, 9: 1e4, 12: math.nan}
"""The factors of the gradients in four of 16 steps; the run is saved after half of them."""
COUNTS = [0, 0, 0, 1, 1, 1, 2, 2, 2, 2, 2, 2, 3, 3, 3, 3]
BOTH = pytest.mark.parametrize("optim", ["adamw_torch", "adamw_torch_fused"])


class _Logger(TrainerCallback):
    """Notes the counts of skipped steps, as the callback of TensorBoard does."""

    def __init__(self):
        self.counts = []

    def on_log(self, args, state, control, logs, **kwargs):
        """Note the count."""
        self.counts.append(logs["skipped_steps"])


def _run(model, args, dataset, replaced, **names):
    source = code_of("docs/trainers.md", "Hugging Face Trainer, TRL, in bfloat16")
    for before, after in replaced.items():
        source = source.replace(before, after)
    names |= {"model": model, "args": args, "dataset": dataset, "logger": _Logger()}
    exec(source, names)
    return names


def _arguments(folder, optim, kind=TrainingArguments, **settings):
    return kind(
        output_dir=str(folder), per_device_train_batch_size=8, num_train_epochs=1, use_cpu=True, bf16=True,
        report_to=[], logging_steps=1, disable_tqdm=True, seed=0, learning_rate=0.1, optim=optim,
        **{"save_strategy": "no", "max_grad_norm": 0, **settings},
    )  # fmt: skip


@BOTH
def test_trainer(optim, tmp_path):
    """Bad steps are skipped, the schedule waits, and each log has the count; a resumed run ends in the same way."""
    outcomes = []
    for resumes in (False, True):
        model, first = _ModelWithLoss(BAD, first=8 * resumes), 8 * resumes
        args = _arguments(tmp_path, optim, max_steps=16, save_strategy="steps", save_steps=8)
        replaced = {"dataset)": "dataset, callbacks=[logger])", "SpikeGuard()": "SpikeGuard(warmup=2)"}
        replaced |= {"train()": f"train(resume_from_checkpoint={resumes})"}
        names = _run(model, args, _rows(16), replaced)
        trainer = names["trainer"]
        assert {first + step for step in model.skipped()} == {step for step in BAD if step >= first}
        assert trainer.lr_scheduler.last_epoch == 16 - len(BAD)
        assert [log["skipped_steps"] for log in trainer.state.log_history] == [*COUNTS, 3]
        assert trainer.state.log_history[-1]["spikes"] == 1
        assert names["logger"].counts == [*COUNTS[first:], 3]
        shutil.rmtree(tmp_path / "checkpoint-16")  # as if the run was stopped before
        outcomes.append((model.layer.weight.tolist(), str(trainer.optimizer.state_dict())))
    assert outcomes[0] == outcomes[1]


def test_trainer_alone_ends_with_nan(tmp_path):
    """All parameters are NaN under a logged loss of 0.0, as the page says."""
    model = _ModelWithLoss({0: math.nan})
    trainer = Trainer(model, _arguments(tmp_path, "adamw_torch", max_grad_norm=1.0), train_dataset=_rows(4))
    trainer.train()
    assert all(param.isnan().all() for param in model.parameters())
    assert trainer.state.log_history[-2]["loss"] == 0.0


@BOTH
def test_trl(optim, tmp_path):
    """Supervised fine-tuning skips a bad step, its schedule waits, and its logs have the count."""
    from datasets import Dataset
    from trl import SFTConfig, SFTTrainer

    model, tokenizer = _small_language_model()
    norm, seen = model.model.norm, []

    def spoil(grad):
        seen.append(norm.weight.tolist())
        return grad * (math.nan if len(seen) == 2 else 1.0)

    norm.weight.register_hook(spoil)
    args = _arguments(tmp_path, optim, kind=SFTConfig, max_length=8)
    replaced = {
        " Trainer(model, args,": " SFTTrainer(model, args, processing_class=tokenizer,",
        "from transformers import Trainer,": "from trl import SFTTrainer\nfrom transformers import",
    }
    dataset = Dataset.from_list([{"text": "a b c a"}] * 32)  # four batches
    trainer = _run(model, args, dataset, replaced, tokenizer=tokenizer)["trainer"]
    changed = [before != after for before, after in pairwise([*seen, norm.weight.tolist()])]
    assert changed == [True, False, True, True]
    assert trainer.lr_scheduler.last_epoch == 3
    assert [log["skipped_steps"] for log in trainer.state.log_history] == [0, 1, 1, 1, 1]
    assert torch.isfinite(norm.weight).all()
    assert isinstance(trainer, SFTTrainer)
