"""GPUs through NVIDIA's management library, and whether driver, CUDA and the installed torch fit together. No torch here."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Gpu:
    """Bytes. ``capability``: compute capability, e.g. "9.0"."""

    name: str
    total: int
    free: int
    capability: str


@dataclass(frozen=True)
class Gpus:
    """``cuda``: the newest CUDA that the driver can run, e.g. "13.0". ``reason``: why there is none, "" = there are."""

    devices: tuple[Gpu, ...] = ()
    driver: str = ""
    cuda: str = ""
    reason: str = ""


def find() -> Gpus:
    """What the driver tells. Never raises: no driver is an answer."""
    try:
        import pynvml
    except ImportError:
        return Gpus(reason="nvidia-ml-py is not installed")
    try:
        pynvml.nvmlInit()
    except pynvml.NVMLError as error:
        return Gpus(reason=f"no NVIDIA driver ({error})")
    try:
        version = pynvml.nvmlSystemGetCudaDriverVersion_v2()
        devices = tuple(_device(pynvml, i) for i in range(pynvml.nvmlDeviceGetCount()))
        return Gpus(devices, _text(pynvml.nvmlSystemGetDriverVersion()), f"{version // 1000}.{version % 1000 // 10}")
    except pynvml.NVMLError as error:
        return Gpus(reason=f"the driver answers with an error ({error})")
    finally:
        pynvml.nvmlShutdown()


def _device(nvml: Any, index: int) -> Gpu:
    handle = nvml.nvmlDeviceGetHandleByIndex(index)
    memory = nvml.nvmlDeviceGetMemoryInfo(handle)
    major, minor = nvml.nvmlDeviceGetCudaComputeCapability(handle)
    return Gpu(_text(nvml.nvmlDeviceGetName(handle)), int(memory.total), int(memory.free), f"{major}.{minor}")


def _text(value: str | bytes) -> str:
    return value.decode() if isinstance(value, bytes) else value


def pairing(found: Gpus, torch: dict[str, Any]) -> tuple[str, str, str]:
    """(status, value, remedy): do the driver and this build of torch fit? ``torch``: facts of `backends.probe`."""
    built = torch.get("cuda")
    if not built:
        return "warn", f"torch {torch['version']} is built without CUDA", "Install the CUDA build of torch " + torch["version"].split("+")[0] + "."
    if tuple(map(int, built.split(".")[:1])) > tuple(map(int, found.cuda.split(".")[:1])):
        return ("fail", f"torch is built for CUDA {built}, the driver {found.driver} runs up to {found.cuda}",
                "Update the NVIDIA driver, or install a build of torch for CUDA " + found.cuda.split(".")[0] + ".")
    if not torch.get("cuda_devices"):
        return "fail", f"CUDA {built} and driver {found.driver} fit, but torch sees no device", "Check CUDA_VISIBLE_DEVICES and the container."
    return "ok", f"torch for CUDA {built}, driver {found.driver} (up to CUDA {found.cuda})", ""


def checks(torch: dict[str, Any] | None, found: Gpus | None = None) -> Iterator[Any]:
    """Findings for the doctor. ``torch`` None: it was not asked, the pairing is left out."""
    from gainz_ui.services.doctor import Check
    from gainz_ui.units import size
    found = found or find()
    if not found.devices:
        yield Check("gpu", "GPU", "info", f"none: {found.reason or 'the driver lists no device'}; models run on the CPU")
        return
    for number, device in enumerate(found.devices):
        yield Check("gpu", f"GPU {number}", "ok", f"{device.name}, {size(device.free)} free of {size(device.total)}, "
                                                  f"compute capability {device.capability}")
    if torch is not None:
        yield Check("gpu", "Driver and CUDA", *pairing(found, torch))


# ---------------------------------------------------------------------------------------------- while it works
@dataclass(frozen=True)
class GpuUse:
    """One device at one moment. Bytes; ``busy``: share of the last moment in which it computed, None = it does not tell."""

    name: str
    used: int
    total: int
    busy: float | None


class GpuWatch:
    """Asks the driver again and again. Where there is none it asks once and never again; a driver that fails later gives nothing."""

    def __init__(self) -> None:
        self._nvml: Any = None
        self._asked = False

    def use(self) -> tuple[GpuUse, ...]:
        if not self._asked:
            self._asked = True
            self._nvml = _opened()
        if self._nvml is None:
            return ()
        try:
            return tuple(_use(self._nvml, i) for i in range(self._nvml.nvmlDeviceGetCount()))
        except self._nvml.NVMLError:
            return ()


def _opened() -> Any:
    """The library, initialised, or None."""
    try:
        import pynvml
    except ImportError:
        return None
    try:
        pynvml.nvmlInit()
    except pynvml.NVMLError:
        return None
    return pynvml


def _use(nvml: Any, index: int) -> GpuUse:
    handle = nvml.nvmlDeviceGetHandleByIndex(index)
    memory = nvml.nvmlDeviceGetMemoryInfo(handle)
    try:
        busy = nvml.nvmlDeviceGetUtilizationRates(handle).gpu / 100
    except nvml.NVMLError:                  # slices of a card do not count it
        busy = None
    return GpuUse(_text(nvml.nvmlDeviceGetName(handle)), int(memory.used), int(memory.total), busy)
