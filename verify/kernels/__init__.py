"""What each ONNX operator computes, in fp32 with one rounding at the end.

Every kernel takes a ``Call`` and the operands as ``Tensor`` and returns new tensors; no kernel
writes to an operand, so that views may be shared.
"""

from __future__ import annotations

from collections.abc import Mapping

from verify.kernels.attention import ATTENTION
from verify.kernels.convolution import CONVOLUTIONS
from verify.kernels.elementwise import ELEMENTWISE
from verify.kernels.layout import LAYOUT
from verify.kernels.products import PRODUCTS
from verify.kernels.quantization import QUANTIZATION
from verify.kernels.reductions import REDUCTIONS
from verify.kernels.tensor import Kernel

KERNELS: Mapping[str, Kernel] = {
    **ATTENTION,
    **CONVOLUTIONS,
    **ELEMENTWISE,
    **LAYOUT,
    **PRODUCTS,
    **QUANTIZATION,
    **REDUCTIONS,
}
"""By operator type of the ``ai.onnx`` domain; what is missing here goes to onnx's reference operators."""

__all__ = ["KERNELS"]
