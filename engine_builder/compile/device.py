"""The compute capability of the GPU that CUDA would use, asked of the driver itself."""

from __future__ import annotations

import ctypes
from typing import Final

# cuda.h, CUdevice_attribute.
_COMPUTE_CAPABILITY_MAJOR: Final = 75
_COMPUTE_CAPABILITY_MINOR: Final = 76


def visible_sm() -> int | None:
    """Return the first visible device's compute capability (90 for 9.0), None without one.

    The driver honours CUDA_VISIBLE_DEVICES and orders devices as TensorRT will see them, which
    the management library does not.
    """
    try:
        cuda = ctypes.CDLL("libcuda.so.1")
    except OSError:
        return None
    count = ctypes.c_int(0)
    if cuda.cuInit(0) != 0 or cuda.cuDeviceGetCount(ctypes.byref(count)) != 0 or count.value == 0:
        return None
    device = ctypes.c_int(0)
    major, minor = ctypes.c_int(0), ctypes.c_int(0)
    calls = (
        cuda.cuDeviceGet(ctypes.byref(device), 0),
        cuda.cuDeviceGetAttribute(ctypes.byref(major), _COMPUTE_CAPABILITY_MAJOR, device),
        cuda.cuDeviceGetAttribute(ctypes.byref(minor), _COMPUTE_CAPABILITY_MINOR, device),
    )
    return 10 * major.value + minor.value if not any(calls) else None
