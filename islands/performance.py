"""How fast the steps are: model FLOP/s, their share of the devices' peak, memory, and a trace of chosen steps."""

from pathlib import Path
from types import TracebackType
from typing import Self

import torch
import torch.distributed as dist
from torch.profiler import ProfilerActivity, profile

from islands import plugins
from islands.config import IslandConfig
from islands.out_of_memory import peak_memory_bytes
from islands.process import Process

#: Dense bf16 FLOP/s that makers state, by a part of the device's name; the first that fits counts.
PEAK_BF16_FLOPS: dict[str, float] = {
    "H100 PCIe": 756e12,
    "H100 NVL": 835e12,
    "H100": 989e12,
    "H200": 989e12,
    "B200": 2250e12,
    "A100": 312e12,
    "L40S": 362e12,
    "RTX 4090": 165e12,
}


def peak_flops(device_name: str) -> float | None:
    """Dense bf16 FLOP/s of a device; None where they aren't known."""
    return next((peak for name, peak in PEAK_BF16_FLOPS.items() if name in device_name), None)


class Performance:
    """Measures each step; entered around the loop, so that a trace that was begun is written however the loop ends."""

    def __init__(self, config: IslandConfig, process: Process) -> None:
        model = plugins.load("islands.models", config.model.type)
        self._flops_per_token = model.num_flops_per_token(config.model, config.data.seq_len)
        peak = peak_flops(torch.cuda.get_device_name(process.device)) if process.device.type == "cuda" else None
        self._peak_flops = peak and peak * process.world_size
        self._device = process.device
        self._trace = Path(config.run.dir) / "profile" / f"rank{dist.get_rank()}.json"  # of the job, which may be several islands
        self._first, self._last = config.train.profile or (0, 0)  # steps count from 1
        self._profiler: profile | None = None

    def __enter__(self) -> Self:
        """Nothing begins before the first step."""
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Write the trace of steps that an error cut short."""
        self._write_trace()

    def begin_step(self, step: int) -> None:
        """Start tracing where ``train.profile`` says so."""
        if self._profiler is None and self._first <= step <= self._last:  # the first of them may have been jumped over
            gpu = [ProfilerActivity.CUDA] if self._device.type == "cuda" else []
            self._profiler = profile(activities=[ProfilerActivity.CPU, *gpu], profile_memory=True)
            self._profiler.start()

    def end_step(self, step: int, tokens_per_second: float) -> dict[str, float]:
        """What ``step`` achieved, for its row.

        Returns:
            ``flops_per_second`` of the island, by the model's formula, which leaves out what is computed twice; ``mfu``,
            their share of the devices' bf16 peak, where that is known; ``peak_memory_bytes`` of this rank so far.
        """
        if step >= self._last:
            self._write_trace()
        flops = tokens_per_second * self._flops_per_token
        utilization = {"mfu": flops / self._peak_flops} if self._peak_flops else {}
        return dict(flops_per_second=flops, **utilization, peak_memory_bytes=peak_memory_bytes(self._device))

    def _write_trace(self) -> None:
        if self._profiler:
            self._profiler.stop()
            self._trace.parent.mkdir(parents=True, exist_ok=True)
            self._profiler.export_chrome_trace(str(self._trace))
            self._profiler = None
