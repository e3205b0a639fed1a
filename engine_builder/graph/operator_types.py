"""What the ONNX standard says about the float types an operator takes."""

from __future__ import annotations

from functools import lru_cache

import onnx
import onnx_ir as ir

_SPELLED = {
    ir.DataType.FLOAT: "tensor(float)",
    ir.DataType.FLOAT16: "tensor(float16)",
    ir.DataType.BFLOAT16: "tensor(bfloat16)",
}


@lru_cache(maxsize=4096)
def schema_of(op_type: str, domain: str, opset: int) -> onnx.defs.OpSchema | None:
    """The standard's definition of an operator at ``opset``; None if it knows no such operator."""
    try:
        return onnx.defs.get_schema(op_type, opset, domain)
    except onnx.defs.SchemaError:
        return None


@lru_cache(maxsize=4096)
def supports(op_type: str, domain: str, opset: int, dtype: ir.DataType) -> bool:
    """Whether the operator, at this opset, takes ``dtype`` wherever it takes fp32.

    ``Conv`` takes bf16 from opset 22 on, for example.  An operator that the standard does not know
    is not retyped.
    """
    schema = schema_of(op_type, domain, opset)
    if schema is None:
        return False
    spelled = _SPELLED[dtype]
    for parameter in (*schema.inputs, *schema.outputs):
        allowed = parameter.types
        if parameter.type_str == _SPELLED[ir.DataType.FLOAT]:
            continue  # fp32 whatever the data's type: see ``is_pinned``
        if _SPELLED[ir.DataType.FLOAT] in allowed and spelled not in allowed:
            return False
    return True


@lru_cache(maxsize=4096)
def is_pinned(op_type: str, domain: str, opset: int, operand: int) -> bool:
    """Whether the standard fixes this operand to fp32, as the scales of ``Resize``."""
    schema = schema_of(op_type, domain, opset)
    if schema is None or operand >= len(schema.inputs):
        return False
    return bool(schema.inputs[operand].type_str == _SPELLED[ir.DataType.FLOAT])


@lru_cache(maxsize=4096)
def output_is_pinned(op_type: str, domain: str, opset: int, index: int) -> bool:
    """Whether the standard fixes this output to fp32, whatever the type of the data."""
    schema = schema_of(op_type, domain, opset)
    if schema is None or index >= len(schema.outputs):
        return False
    return bool(schema.outputs[index].type_str == _SPELLED[ir.DataType.FLOAT])
