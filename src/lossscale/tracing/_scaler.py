"""The library's scaler with the constructors of torch's, which records each update."""

from typing import TYPE_CHECKING, Any, ClassVar

import torch
import torch.distributed as dist
from torch.amp.grad_scaler import OptState

from lossscale.tracing._record import Record
from lossscale_torch import GradScaler, StepInfo

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
        super().__init__(device, enabled=enabled, **options)
        # The record is made with the scaler, so that a script which never updates it gets its summary, too.
        _ = self._record
        # Before a limit on overflows in a row may end the run.
        self._observers.append(_record_update)

    @torch.compiler.disable
    def scale(self, outputs: Any) -> Any:
        """Return `outputs` times the loss scale; a copy of a scaler begins its record here."""
        _ = self._record
        return super().scale(outputs)

    def _clip(self, *args: Any, **kwargs: Any) -> torch.Tensor:
        self._record.norm = norm = super()._clip(*args, **kwargs)
        return norm

    @staticmethod
    def note_norm(norm: Any) -> None:
        """Store a norm for the next update, if its gradients are unscaled already."""
        for scaler, record in _RECORDS.items():
            if any(state["stage"] is not OptState.READY for state in scaler._records.values()):
                record.norm = norm

    @property
    def _record(self) -> Record:
        if self not in _RECORDS:  # a copy
            _RECORDS[self] = Record(self, self.trace_of_run)
        return _RECORDS[self]


def _record_update(scaler: TracedScaler, info: StepInfo) -> None:
    scaler._record.end_step(info)


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
            options = {"process_group": process_group, "half_gradients": True}  # FSDP's gradients may be float16
            super().__init__(device, init_scale, growth_factor, backoff_factor, growth_interval, enabled, **options)

        def scale(self, outputs: Any) -> Any:
            # torch's default is looked up as late as this
            if self._ranks.process_group is None and dist.is_initialized():
                self._ranks.process_group = dist.group.WORLD
            return super().scale(outputs)

    return ShardedScaler
