"""PyTorch: `torch.amp.GradScaler`, the sharded one of FSDP, and Accelerate's settings of either."""

from lossscale.dialects import _readings as read
from lossscale.dialects._counters import count
from lossscale.dialects._readings import UNBOUNDED
from lossscale.dialects._record import Form, Saved, Tool, key

KEYS = (
    # One record reads both: `scale` in the state dict is `init_scale` in the constructor.
    key("init_scale scale", read.INIT_SCALE, 65536.0),
    key("growth_factor", read.GROWTH_FACTOR, 2.0),
    key("backoff_factor", read.BACKOFF_FACTOR, 0.5),
    # The kernel compares with ==, so that an interval below 1 never grows the scale:
    # https://github.com/pytorch/pytorch/blob/5bde21621b28/aten/src/ATen/native/cuda/AmpKernels.cu
    key("growth_interval", read.INTERVAL_EQUAL, 2000),
    key("enabled", read.ENABLED, True),
)

_SAVED = Saved(scale=("scale",), counters={"growth_tracker": count("_growth_tracker", equal=True)})

TORCH = Tool(
    name="torch",
    title="`torch.amp.GradScaler`, FSDP's `ShardedGradScaler` and `accelerate.GradScalerKwargs`",
    version="PyTorch 2.13",
    forms=(Form("constructor or state dict", KEYS, UNBOUNDED, ignored=("device", "process_group", "_growth_tracker")),),
    saved=(_SAVED,),
)

TOOLS = (TORCH,)
