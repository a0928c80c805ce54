"""The library's scaler with the constructors of torch's, which records each update."""

from typing import TYPE_CHECKING, Any, ClassVar

import torch
import torch.distributed as dist
from torch.amp.grad_scaler import OptState

from lossscale.tracing._record import Record
from lossscale_torch import GradScaler, StepInfo
from lossscale_torch.hooks import Hook, SameOnRanks

if TYPE_CHECKING:
    from pathlib import Path

# Records are not attributes of their scaler, which scripts copy and pickle. They outlive the function that made it,
# since the summary comes when the process ends.
_RECORDS: "dict[TracedScaler, Record]" = {}


class TracedScaler(GradScaler):
    """`lossscale_torch.GradScaler`, as a script makes it, under the policy of the run if there is one."""

    policy_of_run: ClassVar[Any] = None
    trace_of_run: "ClassVar[Path | None]" = None

    def __init__(
        self,
        device: str = "cuda",
        init_scale: float = 2.0**16,
        growth_factor: float = 2.0,
        backoff_factor: float = 0.5,
        growth_interval: int = 2000,
        enabled: bool = True,
        **options: Any,
    ) -> None:
        if self.policy_of_run is not None:
            options["policy"] = self.policy_of_run
        elif options.get("policy") is None:
            options.update(init_scale=init_scale, growth_factor=growth_factor)
            options.update(backoff_factor=backoff_factor, growth_interval=growth_interval)
        # The first hook records before a limit on overflows in a row may end the run.
        super().__init__(device, enabled=enabled, **{**options, "hooks": [_Recording(), *options.get("hooks", ())]})
        # The record is made with the scaler, so that a script which never updates it gets its summary, too.
        _ = self._record

    @torch.compiler.disable
    def scale(self, outputs: Any) -> Any:
        """Return `outputs` times the loss scale; a copy of a scaler begins its record here."""
        _ = self._record
        return super().scale(outputs)

    def unscale_and_clip_(self, *args: Any, **kwargs: Any) -> torch.Tensor:
        """Unscale and clip, and record the norm."""
        self._record.norm = norm = super().unscale_and_clip_(*args, **kwargs)
        return norm

    @staticmethod
    def note_norm(norm: Any) -> None:
        """Store a norm for the next update, if its gradients are unscaled already."""
        for scaler, record in _RECORDS.items():
            if any(state["stage"] is not OptState.READY for state in scaler._per_optimizer_states.values()):
                record.norm = norm

    @property
    def _record(self) -> Record:
        if self not in _RECORDS:  # a copy
            _RECORDS[self] = Record(self, self.trace_of_run)
        return _RECORDS[self]


class _Recording(Hook):
    """Records each update."""

    def after_update(self, scaler: TracedScaler, info: StepInfo) -> None:
        """Record the outcome of a step."""
        scaler._record.end_step(info)


class _AllRanks(SameOnRanks):
    """Combines the flags over all ranks, as FSDP's scaler does by default; its default is looked up this late."""

    def before_step(self, *args: Any) -> None:
        """Take the group of all ranks, if there is one by now."""
        if dist.is_initialized():
            self.process_group = dist.group.WORLD
        super().before_step(*args)


class CudaScaler(TracedScaler):
    """The constructor of `torch.cuda.amp.GradScaler`, which takes no device."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__("cuda", *args, **kwargs)


class CpuScaler(TracedScaler):
    """The constructor of `torch.cpu.amp.GradScaler`, which takes no device."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__("cpu", *args, **kwargs)


def sharded(of_torch: Any) -> type[TracedScaler]:
    """Return a traced scaler that is an instance of FSDP's, too."""

    class ShardedScaler(TracedScaler, of_torch):
        """The constructor of `ShardedGradScaler`, which takes the backoff factor before the growth factor."""

        def __init__(
            self,
            device: str = "cuda",
            init_scale: float = 2.0**16,
            backoff_factor: float = 0.5,
            growth_factor: float = 2.0,
            growth_interval: int = 2000,
            enabled: bool = True,
            process_group: Any = None,
        ) -> None:
            # FSDP's gradients may be float16.
            options: dict[str, Any] = {"process_group": process_group, "half_gradients": True}
            if process_group is None:
                options["hooks"] = [_AllRanks()]
            super().__init__(device, init_scale, growth_factor, backoff_factor, growth_interval, enabled, **options)

    return ShardedScaler
