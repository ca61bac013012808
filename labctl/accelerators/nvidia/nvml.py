"""A host's NVIDIA GPUs as NVML shows them, as JSON in the form of ``report.Report``.

The script of ``readings`` runs its text on that host by ``python3 -c``, from Python 3.8, with pynvml, and prints
``output()``. What a GPU or a driver does not have is left out. Source: NVML API Reference Guide.
"""

from __future__ import annotations

import json
from typing import Any

if __name__ == "__main__":  # on the host that it examines: labctl itself has no pynvml
    import pynvml

STATES = {0: "Disabled", 1: "Enabled"}
COMPUTE_MODES = {0: "Default", 1: "Exclusive_Thread", 2: "Prohibited", 3: "Exclusive_Process"}
FABRIC_STATES = {1: "Not Started", 2: "In Progress", 3: "Completed"}
RECOVERY_ACTIONS = {
    0: "None",
    1: "Reset",
    2: "Reboot",
    3: "Drain P2P",
    4: "Drain and Reset",
    6: "Bus Reset",
    7: "Reboot",
}
# Bits of nvmlClocksEventReason*.
SLOWDOWNS = {8: "HW slowdown", 0x40: "HW thermal slowdown", 0x80: "HW power brake", 0x20: "SW thermal slowdown"}
NVLINK_ERRORS = {"nvlink_replays": 0, "nvlink_recoveries": 1, "nvlink_crc": 2}
CORRECTED, UNCORRECTED = 0, 1
VOLATILE, AGGREGATE = 0, 1
SLOWDOWN_THRESHOLD = 1
SLOWDOWN_MARGIN, RECOVERY_ACTION = 194, 230
MEMORY_V2 = 0x02000028
ADDRESS_TRANSLATION = 2
VGPU_HOSTS = (3, 4)
GONE = (15, 16)
"""NVML_ERROR_GPU_IS_LOST and NVML_ERROR_RESET_REQUIRED."""


class Card:
    """A GPU by its index; ``error`` is what NVML says of one that is lost."""

    def __init__(self, index: int) -> None:
        self.error = ""
        try:
            self.handle = pynvml.nvmlDeviceGetHandleByIndex(index)
        except pynvml.NVMLError as error:
            self.handle, self.error = None, str(error)

    def ask(self, function: str, *arguments: Any) -> Any:
        """Return the answer of a function of NVML; None if the GPU, the driver or pynvml does not have it."""
        try:
            return getattr(pynvml, function)(self.handle, *arguments)
        except Exception as error:  # noqa: BLE001 - pynvml's own differ from version to version
            if getattr(error, "value", None) in GONE:
                self.error = str(error)
            return None

    def field(self, number: int) -> int | None:
        """Return a field value of NVML; None if unsupported."""
        values = self.ask("nvmlDeviceGetFieldValues", [number])
        return values[0].value.siVal if values and values[0].nvmlReturn == 0 else None


def text(value: Any) -> str | None:
    """Return a text of pynvml, which has bytes in older versions."""
    return value.decode() if isinstance(value, bytes) else value


def output() -> str:
    """Return the report as JSON, a value per line: the script that prints it looks for lines with ``"pid":``."""
    pynvml.nvmlInit()
    return json.dumps(report(), indent=0)


def report() -> dict[str, Any]:
    """Return the driver, its CUDA and every GPU."""
    cuda = pynvml.nvmlSystemGetCudaDriverVersion()
    return {
        "driver": text(pynvml.nvmlSystemGetDriverVersion()),
        "cuda": f"{cuda // 1000}.{cuda % 1000 // 10}",
        "gpus": [gpu(index) for index in range(pynvml.nvmlDeviceGetCount())],
    }


def gpu(index: int) -> dict[str, Any]:
    """Return a GPU's values, with the error of one that is lost."""
    card = Card(index)
    values: dict[str, Any] = {"index": index}
    if card.handle is not None:
        for part in (identity, memory, errors, repairs, clocks, links, fabric, users):
            values.update(part(card))
    values["error"] = card.error
    return {name: value for name, value in values.items() if value is not None}


def identity(card: Card) -> dict[str, Any]:
    """Return what stays as it is."""
    pci = card.ask("nvmlDeviceGetPciInfo")
    mig = card.ask("nvmlDeviceGetMigMode")
    return {
        "address": text(pci.busId) if pci else None,
        "name": text(card.ask("nvmlDeviceGetName")),
        "uuid": text(card.ask("nvmlDeviceGetUUID")),
        "serial": text(card.ask("nvmlDeviceGetSerial")),
        "part": text(card.ask("nvmlDeviceGetBoardPartNumber")),
        "vbios": text(card.ask("nvmlDeviceGetVbiosVersion")),
        "persistence": STATES.get(card.ask("nvmlDeviceGetPersistenceMode")),
        "compute_mode": COMPUTE_MODES.get(card.ask("nvmlDeviceGetComputeMode")),
        "mig": STATES.get(mig[0]) if mig else None,
    }


def memory(card: Card) -> dict[str, Any]:
    """Return memory in MiB; that in use only where NVML tells it from reserved memory."""
    total = card.ask("nvmlDeviceGetMemoryInfo")
    exact = card.ask("nvmlDeviceGetMemoryInfo", MEMORY_V2)
    return {
        "memory": total.total >> 20 if total else None,
        "used": exact.used >> 20 if exact else None,
        "vgpu_host": card.ask("nvmlDeviceGetVirtualizationMode") in VGPU_HOSTS,
        "system_memory": card.ask("nvmlDeviceGetAddressingMode") == ADDRESS_TRANSLATION,
    }


def errors(card: Card) -> dict[str, Any]:
    """Return the errors of memory."""
    info: Any = getattr(pynvml, "c_nvmlEccSramErrorStatus_v1_t", lambda: None)()
    answered = card.ask("nvmlDeviceGetSramEccErrorStatus", pynvml.byref(info)) if info else None
    return {
        "uncorrectable": card.ask("nvmlDeviceGetTotalEccErrors", UNCORRECTED, VOLATILE),
        "corrected": card.ask("nvmlDeviceGetTotalEccErrors", CORRECTED, VOLATILE),
        "uncorrectable_ever": card.ask("nvmlDeviceGetTotalEccErrors", UNCORRECTED, AGGREGATE),
        "sram_exceeded": None if answered is None else bool(info.bThresholdExceeded),
    }


def repairs(card: Card) -> dict[str, Any]:
    """Return what was repaired of memory, and what is still to be done."""
    rows = card.ask("nvmlDeviceGetRemappedRows") or (None, None, None, None)
    banks = card.ask("nvmlDeviceGetRowRemapperHistogram")
    pages = [card.ask("nvmlDeviceGetRetiredPages", cause) for cause in (0, 1)]
    pending = card.ask("nvmlDeviceGetRetiredPagesPendingStatus")
    action = card.field(RECOVERY_ACTION)
    return {
        "remap_pending": None if rows[2] is None else bool(rows[2]),
        "remap_failed": None if rows[3] is None else bool(rows[3]),
        "full_banks": banks.none if banks else None,
        "retired": None if None in pages else sum(map(len, pages)),
        "retirement_pending": None if pending is None else bool(pending),
        "recovery": RECOVERY_ACTIONS.get(-1 if action is None else action),
    }


def clocks(card: Card) -> dict[str, Any]:
    """Return reasons for lower clocks, power limits in W, and the margin to the slowdown temperature in degrees."""
    reasons = card.ask("nvmlDeviceGetCurrentClocksEventReasons")
    if reasons is None:
        reasons = card.ask("nvmlDeviceGetCurrentClocksThrottleReasons")
    enforced = card.ask("nvmlDeviceGetEnforcedPowerLimit")
    default = card.ask("nvmlDeviceGetPowerManagementDefaultLimit")
    used = card.ask("nvmlDeviceGetUtilizationRates")
    return {
        "slowdowns": None if reasons is None else [name for bit, name in SLOWDOWNS.items() if reasons & bit],
        "limit": enforced / 1000 if enforced else None,
        "default_limit": default / 1000 if default else None,
        "idle": used.gpu == 0 if used else None,
        "margin": margin(card),
    }


def margin(card: Card) -> Any:
    """Return the degrees up to the slowdown temperature, which newer GPUs have as a margin of its own."""
    own, lowest = card.ask("nvmlDeviceGetMarginTemperature"), card.field(SLOWDOWN_MARGIN)
    if own is not None and lowest is not None:
        return own - lowest
    now = card.ask("nvmlDeviceGetTemperature", 0)
    slowdown = card.ask("nvmlDeviceGetTemperatureThreshold", SLOWDOWN_THRESHOLD)
    return slowdown - now if slowdown and now is not None else None


def links(card: Card) -> dict[str, Any]:
    """Return the number of active NVLinks and the sum of their errors; nothing without NVLink."""
    most = getattr(pynvml, "NVML_NVLINK_MAX_LINKS", 18)
    states = [card.ask("nvmlDeviceGetNvLinkState", link) for link in range(most)]
    active = [link for link, state in enumerate(states) if state]
    values: dict[str, Any] = {}
    if any(state is not None for state in states):
        values["nvlinks"] = len(active)
    for name, counter in NVLINK_ERRORS.items():
        counts = [card.ask("nvmlDeviceGetNvLinkErrorCounter", link, counter) for link in active]
        if counts and None not in counts:
            values[name] = sum(counts)
    return values


def fabric(card: Card) -> dict[str, Any]:
    """Return the state of the registration with the fabric manager; nothing without NVSwitch."""
    info: Any = getattr(pynvml, "c_nvmlGpuFabricInfo_t", lambda: None)()
    answered = card.ask("nvmlDeviceGetGpuFabricInfo", pynvml.byref(info)) if info else None
    if answered is None:
        return {}
    error = text(pynvml.nvmlErrorString(info.status)) if info.status else ""
    return {"fabric": FABRIC_STATES.get(info.state), "fabric_error": error}


def users(card: Card) -> dict[str, Any]:
    """Return the processes with memory of the GPU."""
    compute = card.ask("nvmlDeviceGetComputeRunningProcesses")
    graphics = card.ask("nvmlDeviceGetGraphicsRunningProcesses")
    if compute is None or graphics is None:
        return {}
    drawing = {process.pid for process in graphics}
    return {"processes": [user(process, drawing) for process in [*compute, *graphics]]}


def user(process: Any, drawing: set[int]) -> dict[str, Any]:
    """Return a process, its memory in MiB, and whether it only computes."""
    try:
        name = text(pynvml.nvmlSystemGetProcessName(process.pid))
    except pynvml.NVMLError:  # it has ended, or it is another user's
        name = ""
    used = process.usedGpuMemory
    compute = process.pid not in drawing
    return {"pid": process.pid, "name": name, "memory": used >> 20 if used else None, "compute": compute}
