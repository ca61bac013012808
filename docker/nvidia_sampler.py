"""Sample NVIDIA GPUs through NVML; without pynvml they have no samples."""

from __future__ import annotations

import sampler

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable
    from typing import Any


def devices() -> sampler.Devices | None:
    """Return a function that reads index and values of all GPUs; None without pynvml or a working driver."""
    try:
        import pynvml as nvml
    except ImportError:
        return None
    try:
        nvml.nvmlInit()
        handles = [nvml.nvmlDeviceGetHandleByIndex(index) for index in range(nvml.nvmlDeviceGetCount())]
    except nvml.NVMLError:
        return None
    uncorrected, since_boot = nvml.NVML_MEMORY_ERROR_TYPE_UNCORRECTED, nvml.NVML_VOLATILE_ECC
    readings: dict[str, Callable[[Any], float]] = {
        "utilisation (%)": lambda handle: nvml.nvmlDeviceGetUtilizationRates(handle).gpu,
        # As nvidia-smi reports it: version 1 counts memory that the driver reserves as used.
        "memory (MiB)": lambda handle: (
            nvml.nvmlDeviceGetMemoryInfo(handle, version=nvml.nvmlMemory_v2).used / sampler.MIB
        ),
        "temperature (°C)": lambda handle: nvml.nvmlDeviceGetTemperature(handle, nvml.NVML_TEMPERATURE_GPU),
        "power (W)": lambda handle: nvml.nvmlDeviceGetPowerUsage(handle) / 1000,
        "SM clock (MHz)": lambda handle: nvml.nvmlDeviceGetClockInfo(handle, nvml.NVML_CLOCK_SM),
        "uncorrected ECC errors (count)": lambda handle: nvml.nvmlDeviceGetTotalEccErrors(
            handle, uncorrected, since_boot
        ),
        # An idle GPU lowers its clocks, which is no throttling.
        "throttle reasons (bit mask)": lambda handle: (
            nvml.nvmlDeviceGetCurrentClocksThrottleReasons(handle) & ~nvml.nvmlClocksThrottleReasonGpuIdle
        ),
    }

    def value(reading: Callable[[Any], float], handle: object) -> float | None:
        """Return a reading of a GPU, or None if NVML answers with an error."""
        try:
            return reading(handle)
        except nvml.NVMLError:
            return None

    def values(handle: object) -> sampler.Values:
        return {name: value(reading, handle) for name, reading in readings.items()}

    return lambda: enumerate(map(values, handles))
