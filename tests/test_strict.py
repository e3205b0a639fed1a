"""The strict evaluator: rounding, accumulation, refusals, memory, and agreement with onnxruntime."""

from __future__ import annotations

import tracemalloc
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import onnx
import onnx_ir as ir
import onnxruntime
import pytest
from onnx import TensorProto, helper, numpy_helper

from engine_builder.errors import ConversionError
from verify.inputs import input_specs, seeded_inputs
from verify.kernels.rounding import BLOCK, round_in_place
from verify.kernels.workers import Workers, _openblas, single_threaded_blas
from verify.strict import StrictEvaluator, _Core

FP16, BF16, E4M3 = ir.DataType.FLOAT16, ir.DataType.BFLOAT16, ir.DataType.FLOAT8E4M3FN
LIBRARY = {FP16: np.float16, BF16: ml_dtypes.bfloat16, E4M3: ml_dtypes.float8_e4m3fn}

Array = np.ndarray[Any, np.dtype[Any]]


def model_of(text: str, *, opset: int = 20) -> onnx.ModelProto:
    """A model whose graph is written in ONNX's text form; its nodes are called n0, n1, ..."""
    head = f'<ir_version: 10, opset_import: ["" : {opset}]>'
    model: onnx.ModelProto = onnx.parser.parse_model(f"{head} graph {text}")
    for number, node in enumerate(model.graph.node):
        node.name = f"n{number}"
    return model


def strict(model: onnx.ModelProto, *, threads: int = 2) -> StrictEvaluator:
    return StrictEvaluator(ir.from_proto(model), threads=threads)


def evaluate(text: str, *, opset: int = 20, threads: int = 2, **inputs: Array) -> Array:
    """The only output of a graph in text form."""
    (output,) = strict(model_of(text, opset=opset), threads=threads).run(inputs).values()
    return output


def rounded(values: Array, dtype: ir.DataType) -> Array:
    array = np.array(values, np.float32)
    round_in_place(array, dtype)
    return array


@pytest.mark.parametrize(
    ("dtype", "value", "expected"),
    [
        # fp16 has 10 fraction bits: ties at half of 2**-10 go to the even fraction.
        (FP16, 1 + 2**-11, 1.0),
        (FP16, 1 + 3 * 2**-11, 1 + 2**-9),
        (FP16, 1 + 2**-11 + 2**-20, 1 + 2**-10),
        (FP16, 2049.0, 2048.0),
        (FP16, 2051.0, 2052.0),
        (FP16, 65519.0, 65504.0),
        (FP16, 65520.0, np.inf),  # the tie between 65504 and 65536
        (FP16, -1e30, -np.inf),
        (FP16, 2**-24, 2**-24),  # the least subnormal
        (FP16, 2**-25, 0.0),  # the tie between it and 0
        (FP16, 3 * 2**-25, 2**-23),
        # bf16 has 7.
        (BF16, 1 + 2**-8, 1.0),
        (BF16, 1 + 3 * 2**-8, 1 + 2**-6),
        (BF16, 257.0, 256.0),
        (BF16, 3.3895314e38, 3.3895314e38),  # its largest value
        (BF16, 3.4e38, np.inf),
        # E4M3 has 3, least exponent -6, largest value 448, no infinity.
        (E4M3, 17.0, 16.0),
        (E4M3, 19.0, 20.0),
        (E4M3, 0.3, 0.3125),
        (E4M3, 448.0, 448.0),
        (E4M3, 2**-9, 2**-9),
        (E4M3, 2**-10, 0.0),
    ],
)
def test_rounds_to_nearest_even(dtype: ir.DataType, value: float, expected: float) -> None:
    assert rounded(np.array(value), dtype) == np.float32(expected)


@pytest.mark.parametrize("dtype", [FP16, BF16, E4M3])
@pytest.mark.parametrize("ordered", [True, False])
def test_rounding_equals_the_library_on_any_bits(dtype: ir.DataType, ordered: bool) -> None:
    """In order, each block has values of one magnitude; unordered, every block meets an overflow."""
    random = np.random.default_rng(0)
    bits = random.integers(0, 2**32, 1_000_000, dtype=np.uint32).view(np.float32)
    # Ties, which arbitrary bits seldom are: few significant bits at every exponent.
    ties = np.ldexp(random.integers(-8192, 8192, 500_000), random.integers(-150, 115, 500_000))
    values = np.concatenate([bits, ties.astype(np.float32)])
    if ordered:
        values = values[np.argsort(np.abs(values))]
    with np.errstate(all="ignore"):
        expected = values.astype(LIBRARY[dtype]).astype(np.float32)
    np.testing.assert_array_equal(rounded(values, dtype), expected)


@pytest.mark.parametrize("size", [1, BLOCK - 1, BLOCK, BLOCK + 1, 3 * BLOCK + 7])
def test_rounding_reaches_every_block(size: int) -> None:
    values = np.full(size, 2051, np.float32)
    assert (rounded(values, FP16) == 2052).all()


def test_products_sum_in_fp32_and_round_once() -> None:
    """2051 ones are 2052 in fp16 (a tie, to even); summed in fp16 they stick at 2048."""
    text = "(float16[1,K] a, float16[K,1] b) => (float16[1,1] y) { y = MatMul(a, b) }"
    ones = np.ones(2051, np.float16)
    assert evaluate(text, a=ones[None], b=ones[:, None]).item() == 2052
    total = np.float16(0)
    for one in ones:
        total += one
    assert total == 2048


def test_a_bias_joins_before_the_rounding() -> None:
    """2049 - 1 is 2048; with the product rounded first it would be 2048 - 1 = 2047."""
    text = """(float16[1,K] a, float16[K,1] b, float16[1] c) => (float16[1,1] y) { y = Gemm(a, b, c) }"""
    ones = np.ones(2049, np.float16)
    assert evaluate(text, a=ones[None], b=ones[:, None], c=np.array([-1], np.float16)).item() == 2048
    assert np.float16(2049) + np.float16(-1) == 2047


def test_reductions_sum_in_fp32() -> None:
    """300 ones: 300 is a bf16 value, but a bf16 sum sticks at 256; fp16's sum of 60000s overflows."""
    total = "(bfloat16[N] x) => (bfloat16[1] y) { y = ReduceSum(x) }"
    assert float(evaluate(total, x=np.ones(300, ml_dtypes.bfloat16)).item()) == 300
    mean = "(float16[N] x) => (float16[1] y) { y = ReduceMean(x) }"
    assert evaluate(mean, x=np.full(4096, 60000, np.float16)).item() == 60000


def test_convolution_sums_in_fp32() -> None:
    text = "(float16[1,C,1] x, float16[1,C,1] w) => (float16[1,1,1] y) { y = Conv(x, w) }"
    assert evaluate(text, x=np.ones((1, 2051, 1), np.float16), w=np.ones((1, 2051, 1), np.float16)) == 2052


def test_softmax_sums_in_fp32() -> None:
    """1000 equal scores give bf16(0.001) = 131 * 2**-17; a bf16 sum, stuck at 256, would give 1/256."""
    text = "(bfloat16[1,N] x) => (bfloat16[1,N] y) { y = Softmax(x) }"
    y = evaluate(text, x=np.zeros((1, 1000), ml_dtypes.bfloat16)).astype(np.float64)
    assert (y == 131 * 2.0**-17).all()


def test_norms_square_in_fp32() -> None:
    """Rows of 300: 300**2 overflows fp16, the norm is 1."""
    text = "(float16[2,8] x, float16[8] g) => (float16[2,8] y) { y = RMSNormalization(x, g) }"
    y = evaluate(text, opset=23, x=np.full((2, 8), 300, np.float16), g=np.full(8, 0.5, np.float16))
    assert (y == 0.5).all()


def test_the_same_norm_spelled_out_in_fp16_overflows() -> None:
    text = "(float16[2,8] x) => (float16[2,8] y) { y = Mul(x, x) }"
    assert np.isinf(evaluate(text, x=np.full((2, 8), 300, np.float16))).all()


def test_each_tensor_is_rounded_to_its_type() -> None:
    """(2048 + 1) + 1 in fp16 is 2048 twice; in one fp32 step it would be 2050."""
    text = "(float16[1] x, float16[1] one) => (float16[1] y) { a = Add(x, one)  y = Add(a, one) }"
    y = evaluate(text, x=np.array([2048], np.float16), one=np.array([1], np.float16))
    assert y.dtype == np.float16
    assert y.item() == 2048


HELD = {
    "add": "(T[N,300] x) => (f) { y = Add(x, x) z = Mul(y, x) w = Add(z, x) f = Cast<to = 1>(w) }",
    "attention": (
        "(T[N,300] x) => (float[1,1,N,300] f) { a = Constant<value_ints = [0, 1]>() q = Unsqueeze(x, a)"
        " y = Attention(q, q, q) f = Cast<to = 1>(y) }"
    ),
    "conv": (
        "(T[N,300] x) => (f) { a = Constant<value_ints = [2]>() c = Unsqueeze(x, a) y = Conv(c, c)"
        " f = Cast<to = 1>(y) }"
    ),
    "einsum": '(T[N,300] x) => (f) { y = Einsum<equation = "ij,kj->ik">(x, x) f = Cast<to = 1>(y) }',
    "exp": "(T[N,300] x) => (float[N,300] f) { y = Exp(x) f = Cast<to = 1>(y) }",
    "gelu": "(T[N,300] x) => (float[N,300] f) { y = Gelu(x) f = Cast<to = 1>(y) }",
    "gemm": "(T[N,300] x) => (f) { y = Gemm<transB = 1>(x, x) f = Cast<to = 1>(y) }",
    "matmul": "(T[N,300] x) => (f) { r = Transpose(x) y = MatMul(x, r) f = Cast<to = 1>(y) }",
    "mean": "(T[N,300] x) => (float[1,1] f) { y = ReduceMean(x) f = Cast<to = 1>(y) }",
    "norm": (
        "(T[N,300] x) => (float[N,300] f) { i = Constant<value_int = 0>() g = Gather(x, i)"
        " y = RMSNormalization(x, g) f = Cast<to = 1>(y) }"
    ),
    "softmax": "(T[N,300] x) => (float[N,300] f) { y = Softmax(x) f = Cast<to = 1>(y) }",
}


@pytest.mark.parametrize("dtype", [FP16, BF16])
@pytest.mark.parametrize("rows", [3, 700])
@pytest.mark.parametrize("name", HELD)
def test_no_kernel_keeps_more_than_the_type_holds(name: str, rows: int, dtype: ir.DataType) -> None:
    """Cast to fp32 right after, a result has values of its own type alone; and it is not all zero."""
    model = model_of(HELD[name].replace("T[", f"{dtype.name.lower()}["), opset=23)
    x = np.random.default_rng(2).standard_normal((rows, 300)).astype(dtype.numpy())
    f = strict(model).run({"x": x})["f"]
    assert f.dtype == np.float32
    assert f.any()
    np.testing.assert_array_equal(f, f.astype(dtype.numpy()).astype(np.float32))


def test_attention_rounds_where_its_decomposition_does() -> None:
    """The standard scales q and k by the root of the scale each; every step has the type of q."""
    together = "(float16[1,2,40,8] q, float16[1,2,8,50] k, float16[1,2,50,8] v, float16[40,50] m) => (y)"
    apart = model_of(
        together
        + "{ w = Constant<value_float = 0.59460354>() r = Cast<to = 10>(w) a = Mul(q, r) b = Mul(k, r)"
        " s = MatMul(a, b) n = Add(s, m) p = Softmax(n) y = MatMul(p, v) }"
    )
    composite = model_of(
        together + "{ t = Transpose<perm = [0, 1, 3, 2]>(k) y = Attention(q, t, v, m) }", opset=23
    )
    random = np.random.default_rng(5)
    inputs = {
        value.name: (
            2 * random.standard_normal([dim.dim_value for dim in value.type.tensor_type.shape.dim])
        ).astype(np.float16)
        for value in apart.graph.input
    }
    np.testing.assert_array_equal(strict(composite).run(inputs)["y"], strict(apart).run(inputs)["y"])


@pytest.mark.parametrize(
    ("value", "to", "expected"),
    [
        (70000.0, "FLOAT16", np.inf),
        (1e39, "BFLOAT16", np.inf),
        (500.0, "FLOAT8E4M3FN", 448.0),
        (-np.inf, "FLOAT8E4M3FN", -448.0),
        (-2.7, "INT64", -2),
        (2.5, "BOOL", True),
    ],
)
def test_casts(value: float, to: str, expected: float) -> None:
    model = model_of(f"(float[1] x) => (y) {{ y = Cast<to = {TensorProto.DataType.Value(to)}>(x) }}")
    with np.errstate(over="ignore"):
        y = strict(model).run({"x": np.array([value], np.float32)})["y"]
    assert float(y.item()) == expected
    assert ir.DataType.from_numpy(y.dtype).name == to


def test_quantization_saturates_and_rounds_once() -> None:
    """17 is a tie between 16 and 18 (even: 16); 0.3 is nearest 10/32."""
    model = model_of(
        "(float16[5] x, float16 s, float8e4m3fn z) => (float16[5] y)"
        "{ q = QuantizeLinear(x, s, z)  y = DequantizeLinear(q, s, z) }"
    )
    x = np.array([1000, -np.inf, 0.3, 17, -0.0], np.float16)
    zero = np.zeros((), ml_dtypes.float8_e4m3fn)
    one, half = (np.array(scale, np.float16) for scale in (1, 0.5))
    assert strict(model).run({"x": x, "s": one, "z": zero})["y"].tolist() == [448, -448, 0.3125, 16, 0]
    # By 1/2: 1000 -> 2000 saturates, 17 -> 34 is a tie between 32 and 36, and back by 1/2.
    assert strict(model).run({"x": x, "s": half, "z": zero})["y"].tolist() == [224, -224, 0.3125, 16, 0]


def test_a_dequantized_value_has_its_declared_type() -> None:
    """1.125 * (1 + 2**-10) is 1153.125 / 1024; fp16's neighbours of it are whole 1024ths."""
    text = "(float8e4m3fn[1] q, float16 s) => (float16[1] y) { y = DequantizeLinear(q, s) }"
    y = evaluate(text, q=np.array([1.125], ml_dtypes.float8_e4m3fn), s=np.array(1 + 2**-10, np.float16))
    assert y.item() == 1153 / 1024


def test_scales_per_output_channel() -> None:
    text = "(float8e4m3fn[2,3] q, float[3] s) => (float[2,3] y) { y = DequantizeLinear<axis = 1>(q, s) }"
    q = np.ones((2, 3), ml_dtypes.float8_e4m3fn)
    assert evaluate(text, q=q, s=np.array([1, 2, 4], np.float32)).tolist() == [[1, 2, 4]] * 2


@pytest.mark.parametrize("scale", [0.0, -1.0, np.nan, np.inf])
def test_a_scale_that_tensorrt_rejects_is_refused(scale: float) -> None:
    text = "(float8e4m3fn[1] q, float16 s) => (float16[1] y) { y = DequantizeLinear(q, s) }"
    with pytest.raises(ConversionError, match=r"n0.*scale"):
        evaluate(text, q=np.ones(1, ml_dtypes.float8_e4m3fn), s=np.array(scale, np.float16))


H = "float16[2,2] h, float[2,2] f"
MIXED = {
    "Add": f"({H}) => (y) {{ y = Add(h, f) }}",
    "Concat": f"({H}) => (y) {{ y = Concat<axis = 0>(h, h, f) }}",
    "MatMul": f"({H}) => (y) {{ y = MatMul(h, f) }}",
    "Where": f"({H}, bool[2,2] c) => (y) {{ y = Where(c, h, f) }}",
    "Pow": f"({H}) => (y) {{ y = Pow(h, f) }}",
    "RMSNormalization": f"({H}) => (y) {{ y = RMSNormalization(h, f) }}",
    "Gemm": f"({H}) => (y) {{ y = Gemm(h, h, f) }}",
    "Clip": f"({H}, float low) => (y) {{ y = Clip(h, low) }}",
    "QuantizeLinear": f"({H}, float s, float8e4m3fn z) => (y) {{ y = QuantizeLinear(h, s, z) }}",
    "PRelu": f"({H}) => (y) {{ y = PRelu(h, f) }}",
}
SCALARS: dict[str, Array] = {
    "h": np.ones((2, 2), np.float16),
    "f": np.ones((2, 2), np.float32),
    "c": np.ones((2, 2), np.bool_),
    "low": np.array(0, np.float32),
    "s": np.array(1, np.float32),
    "z": np.array(0, ml_dtypes.float8_e4m3fn),
}


@pytest.mark.parametrize("op_type", MIXED)
def test_mixed_float_types_are_refused_with_the_node(op_type: str) -> None:
    model = model_of(MIXED[op_type], opset=23)
    given = {value.name: SCALARS[value.name] for value in model.graph.input}
    with pytest.raises(ConversionError, match=rf"node 'n0' \({op_type}\).*float and float16") as caught:
        strict(model).run(given)
    assert caught.value.exit_code == 5


def test_a_broken_declaration_is_refused() -> None:
    model = model_of("(float16[1] x) => (float[1] y) { y = Neg(x) }")
    with pytest.raises(ConversionError, match="'y' is declared float but is float16"):
        strict(model).run({"x": np.ones(1, np.float16)})


def test_an_input_of_another_type_is_refused() -> None:
    with pytest.raises(ConversionError, match="'x' is declared float16 but is given float"):
        evaluate("(float16[1] x) => (float16[1] y) { y = Neg(x) }", x=np.ones(1, np.float32))
    with pytest.raises(ConversionError, match="no values are given for the input 'x'"):
        evaluate("(float16[1] x) => (float16[1] y) { y = Neg(x) }")


def test_an_unsorted_graph_is_refused() -> None:
    model = model_of("(float[1] x) => (float[1] y) { a = Neg(x)  y = Neg(a) }")
    model.graph.node.reverse()
    with pytest.raises(ConversionError, match=r"n1.*before it is computed.*sorted"):
        strict(model)


def test_an_unknown_operator_is_refused() -> None:
    model = model_of("(float[1] x) => (float[1] y) { y = Neg(x) }")
    model.graph.node[0].op_type = "Negate"
    with pytest.raises(ConversionError, match=r"node 'n0' \(Negate\).*no such operator"):
        strict(model)


def test_an_impossible_shape_is_refused_with_the_node() -> None:
    text = "(float[2,3] x, float[2,3] w) => (y) { y = MatMul(x, w) }"
    with pytest.raises(ConversionError, match=r"node 'n0' \(MatMul\).*\(2, 3\), \(2, 3\)"):
        evaluate(text, x=np.ones((2, 3), np.float32), w=np.ones((2, 3), np.float32))


OPERATORS = {
    "conv": (
        "(float[2,4,11] x, float[6,2,3] w, float[6] b) => (y)"
        "{ y = Conv<group = 2, strides = [2], dilations = [2], pads = [3, 1]>(x, w, b) }"
    ),
    "conv_same": '(float[1,2,7,6] x, float[3,2,3,2] w) => (y) { y = Conv<auto_pad = "SAME_LOWER">(x, w) }',
    "conv_transpose": (
        "(float[1,4,5] x, float[4,3,4] w, float[6] b) => (y)"
        "{ y = ConvTranspose<group = 2, strides = [2], pads = [1, 2], output_padding = [1]>(x, w, b) }"
    ),
    "gemm": (
        "(float[4,3] a, float[5,4] b, float[3,1] c) => (y)"
        "{ y = Gemm<transA = 1, transB = 1, alpha = 0.5, beta = 2.0>(a, b, c) }"
    ),
    "matmul_vectors": "(float[4] a, float[3,4,2] b) => (y) { y = MatMul(a, b) }",
    "matmul_broadcast": "(float[2,1,3,4] a, float[5,4,2] b) => (y) { y = MatMul(a, b) }",
    "einsum": '(float[2,3] a, float[4] b) => (y) { y = Einsum<equation = "ij,k->ikj">(a, b) }',
    "softmax_axis": "(float[2,3,4] x) => (y) { y = Softmax<axis = 1>(x) }",
    "log_softmax": "(float[2,3] x) => (y) { y = LogSoftmax(x) }",
    "layer_norm": (
        "(float[2,3,4] x, float[3,4] g, float[3,4] b) => (y) { y = LayerNormalization<axis = 1>(x, g, b) }"
    ),
    "reduce": (
        "(float[2,3,4] x) => (y) { axes = Constant<value_ints = [0, -1]>()"
        " a = ReduceL2<keepdims = 0>(x, axes)  b = ReduceMax(x)  y = Add(a, b) }"
    ),
    "slice": (
        "(float[7,5] x) => (y) { s = Constant<value_ints = [6, 4]>() e = Constant<value_ints = [-100, 1]>()"
        " a = Constant<value_ints = [0, -1]>() t = Constant<value_ints = [-2, -1]>()"
        " y = Slice(x, s, e, a, t) }"
    ),
    "pad": (
        "(float[3,4] x, float v) => (y) { p = Constant<value_ints = [2, -1]>()"
        " a = Constant<value_ints = [1]>() y = Pad(x, p, v, a) }"
    ),
    "pad_reflect": (
        '(float[3,4] x) => (y) { p = Constant<value_ints = [1, 0, 2, 3]>() y = Pad<mode = "reflect">(x, p) }'
    ),
    "split": "(float[2,7] x) => (b, a) { a, b = Split<axis = 1, num_outputs = 2>(x) }",
    "gather": ("(float[4,3] x) => (y) { i = Constant<value_ints = [-1, 0]>() y = Gather<axis = 0>(x, i) }"),
    "range": (
        "(float[1] x) => (y) { s = Constant<value_float = 1.5>() l = Constant<value_float = -2.0>()"
        " d = Constant<value_float = -0.75>() r = Range(s, l, d) y = Add(r, x) }"
    ),
    "integers": (
        "(float[4] x) => (y) { k = Constant<value_ints = [-7, 7, -1, 5]>() d = Constant<value_int = 2>()"
        " q = Div(k, d) f = Cast<to = 1>(q) y = Add(f, x) }"
    ),
    "pow_square": "(float[2,3] x) => (y) { e = Constant<value_floats = [2.0]>() y = Pow(x, e) }",
    "clip_relu": (
        "(float[9] x) => (y) { l = Constant<value_float = -0.5>() c = Clip(x, l) r = Relu(x) y = Sub(c, r) }"
    ),
    "squeeze": (
        "(float[1,3,1] x) => (y) { a = Squeeze(x) i = Constant<value_ints = [0, -1]>()"
        " b = Unsqueeze(a, i) s = Shape<start = 1>(b) f = ConstantOfShape(s) y = Add(f, b) }"
    ),
    "attention": "(float[1,2,5,4] q, float[1,2,6,4] k, float[1,2,6,3] v) => (y) { y = Attention(q, k, v) }",
    "attention_grouped": (
        "(float[2,5,16] q, float[2,6,8] k, float[2,6,8] v, float[5,6] m) => (y)"
        "{ y = Attention<q_num_heads = 4, kv_num_heads = 2, scale = 0.3>(q, k, v, m) }"
    ),
    "attention_causal": (
        "(float[1,2,6,4] q, float[1,2,6,4] k, float[1,2,6,4] v) => (y)"
        "{ y = Attention<is_causal = 1>(q, k, v) }"
    ),
    # Operators without a kernel of their own, one of them a function in the standard.
    "gelu": "(float[3,4] x) => (y) { y = Gelu(x) }",
    "group_norm": (
        "(float[2,4,5] x, float[4] g, float[4] b) => (y) { y = GroupNormalization<num_groups = 2>(x, g, b) }"
    ),
    "mod_erf": "(float[5] x) => (y) { a = Mod<fmod = 1>(x, x) b = Erf(x) y = Add(a, b) }",
}


@pytest.mark.parametrize("name", OPERATORS)
def test_fp32_operators_equal_onnxruntime(name: str) -> None:
    model = model_of(OPERATORS[name], opset=23)
    random = np.random.default_rng(3)
    inputs = {
        value.name: random.standard_normal(
            [dim.dim_value for dim in value.type.tensor_type.shape.dim], np.float32
        )
        for value in model.graph.input
    }
    session = onnxruntime.InferenceSession(model.SerializeToString(), providers=["CPUExecutionProvider"])
    outputs = strict(model).run(inputs)
    for output, expected in zip(session.get_outputs(), session.run(None, inputs), strict=True):
        assert outputs[output.name].dtype == expected.dtype
        np.testing.assert_allclose(outputs[output.name], expected, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("op_type", ["Erf", "Gelu"])
def test_operators_of_the_reference_implementation_round_once(op_type: str) -> None:
    x = np.linspace(-3, 3, 50).astype(np.float16)
    half = evaluate(f"(float16[N] x) => (y) {{ y = {op_type}(x) }}", x=x)
    single = evaluate(f"(float[N] x) => (y) {{ y = {op_type}(x) }}", x=x.astype(np.float32))
    assert half.dtype == np.float16
    np.testing.assert_array_equal(half, single.astype(np.float16))


def test_subgraphs_read_the_graph_around_them() -> None:
    branch = {
        name: helper.make_graph(
            [helper.make_node(op, ["x", "x"], [f"{name}_y"])],
            name,
            [],
            [helper.make_tensor_value_info(f"{name}_y", TensorProto.FLOAT16, [2])],
        )
        for name, op in (("then_branch", "Add"), ("else_branch", "Mul"))
    }
    model = model_of("(bool c, float16[2] x) => (float16[2] y) { a = Neg(x) y = Neg(a) }")
    del model.graph.node[:]
    model.graph.node.append(helper.make_node("If", ["c"], ["y"], **branch))
    x = np.array([3, 5], np.float16)
    assert strict(model).run({"c": np.array(True), "x": x})["y"].tolist() == [6, 10]
    assert strict(model).run({"c": np.array(False), "x": x})["y"].tolist() == [9, 25]


def test_outputs_that_are_left_out() -> None:
    """LSTM without its first output, and attention without its trailing ones."""
    model = model_of(
        "(float[2,1,3] x, float[1,16,3] w, float[1,16,4] r) => (float[1,1,4] h)"
        "{ y, h = LSTM<hidden_size = 4>(x, w, r) }"
    )
    random = np.random.default_rng(0)
    inputs = {
        name: random.standard_normal(shape, np.float32)
        for name, shape in {"x": (2, 1, 3), "w": (1, 16, 3), "r": (1, 16, 4)}.items()
    }
    expected = strict(model).run(inputs)["h"]
    model.graph.node[0].output[0] = ""
    assert expected.shape == (1, 1, 4)
    np.testing.assert_array_equal(strict(model).run(inputs)["h"], expected)

    model = model_of(OPERATORS["attention"], opset=23)
    model.graph.node[0].output.extend(["", ""])
    q, k, v = np.ones((1, 2, 5, 4)), np.ones((1, 2, 6, 4)), np.full((1, 2, 6, 3), 7)
    inputs = {name: array.astype(np.float32) for name, array in {"q": q, "k": k, "v": v}.items()}
    np.testing.assert_allclose(strict(model).run(inputs)["y"], 7, rtol=1e-6)


def test_a_tensor_is_freed_after_its_last_reader() -> None:
    """Forty sums of 4 MiB each: three are alive at a time, not forty."""
    size, count = 1 << 20, 40
    body = " ".join(f"v{n + 1} = Add(v{n}, v{n})" for n in range(count))
    model = model_of(f"(float[N] v0) => (float[N] v{count}) {{ {body} }}")
    evaluator = strict(model)
    x = np.zeros(size, np.float32)
    tracemalloc.start()
    try:
        evaluator.run({"v0": x})
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert peak < 3.5 * x.nbytes


CORE = (
    "(float16[1,4,T,8] q, float16[1,4,8,S] k, float16[1,4,S,8] v, float16[1,1,T,S] m)"
    " => (float16[1,4,T,8] y{0})"
    "{{ d = Constant<value = float16[1] {{3}}>() a = MatMul(q, k) b = Div(a, d) c = Add(b, m)"
    " s = Softmax<axis = 3>(c) y = MatMul(s, v) }}"
)


def core_inputs(rows: int, columns: int) -> dict[str, Array]:
    random = np.random.default_rng(1)
    shapes = {
        "q": (1, 4, rows, 8),
        "k": (1, 4, 8, columns),
        "v": (1, 4, columns, 8),
        "m": (1, 1, rows, columns),
    }
    return {name: random.standard_normal(shape).astype(np.float16) for name, shape in shapes.items()}


def test_an_attention_core_holds_no_score_matrix() -> None:
    """4 heads of 700 x 900 scores are 10 MB in fp32; the core takes a fraction of that."""
    evaluator = strict(model_of(CORE.format("")), threads=1)
    inputs = core_inputs(700, 900)
    given = sum(array.size * 4 for array in inputs.values())
    tracemalloc.start()
    try:
        evaluator.run(inputs)
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert peak - given < 4 * 700 * 900 * 4 / 2


def test_an_attention_core_by_row_blocks_equals_its_nodes() -> None:
    """An inner value that is also an output keeps the nodes apart; the sums' order may differ."""
    inputs = core_inputs(700, 900)
    together = strict(model_of(CORE.format("")))
    apart = strict(model_of(CORE.format(", float16[1,4,T,S] c")))
    assert any(isinstance(stage, _Core) for stage in together._stages)
    assert not any(isinstance(stage, _Core) for stage in apart._stages)
    np.testing.assert_allclose(
        together.run(inputs)["y"].astype(np.float32),
        apart.run(inputs)["y"].astype(np.float32),
        atol=2**-11,
    )


def test_threads_do_not_change_the_result() -> None:
    inputs = core_inputs(300, 500)
    one, two = (strict(model_of(CORE.format("")), threads=n).run(inputs)["y"] for n in (1, 2))
    np.testing.assert_array_equal(one, two)


def test_an_exception_on_a_worker_is_raised_in_the_caller() -> None:
    def fail(job: int) -> None:
        if job == 3:
            raise KeyError(job)

    with Workers(2) as workers, pytest.raises(KeyError):
        workers.each(fail, range(5))


def test_blas_threads_are_restored() -> None:
    library = _openblas()
    if library is None:
        pytest.skip("numpy comes without its own OpenBLAS here")
    count = library["scipy_openblas_get_num_threads64_"]
    before = count()
    with single_threaded_blas():
        assert count() == 1
    assert count() == before


def test_external_weights_are_read_where_they_are_used(tmp_path: Path) -> None:
    model = model_of("(float16[1,256] x) => (float16[1,256] y) { y = MatMul(x, w) }")
    weight = np.eye(256, dtype=np.float16) * np.float16(3)
    model.graph.initializer.append(numpy_helper.from_array(weight, "w"))
    path = tmp_path / "model.onnx"
    onnx.save(model, path, save_as_external_data=True, location="model.onnx.data", size_threshold=0)
    loaded = ir.load(path)
    y = StrictEvaluator(loaded).run({"x": np.ones((1, 256), np.float16)})["y"]
    assert (y == 3).all()
    tensor = loaded.graph.initializers["w"].const_value
    assert isinstance(tensor, ir.ExternalTensor)
    assert tensor.raw is None, "the weight is still mapped"


def test_a_file_that_is_no_model_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "broken.onnx"
    path.write_bytes(b"no model")
    with pytest.raises(ConversionError, match=r"broken\.onnx.*cannot be read"):
        StrictEvaluator(path)


@pytest.mark.parametrize("name", ["sm_torchscript17", "md_torchscript17", "sm_dynamo20", "sm_dynamo23"])
def test_fp32_models_equal_onnxruntime(tiny_models: Mapping[str, Path], name: str) -> None:
    path = tiny_models[name]
    specs = input_specs(onnx.load(path, load_external_data=False).graph)
    inputs = seeded_inputs(specs, length=64, t=0.5)
    session = onnxruntime.InferenceSession(str(path), providers=["CPUExecutionProvider"])
    (expected,) = session.run(["velocity"], inputs)
    actual = StrictEvaluator(path).run(inputs)["velocity"]
    assert actual.dtype == np.float32
    assert np.abs(actual - expected).max() < 1e-5 * np.abs(expected).max()
