"""Weights converted in a stream: rounding, what is counted, and how much memory it takes."""

from __future__ import annotations

import subprocess
import sys
import textwrap
from io import BytesIO
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import onnx
import onnx_ir as ir
import pytest

from engine_builder.graph.weights import CHUNK_ELEMENTS, ConversionLedger, ConvertedTensor, TensorLoss, stream
from tests.conftest import REPOSITORY
from tests.graphs import Array

FP16, BF16 = ir.DataType.FLOAT16, ir.DataType.BFLOAT16
LIBRARY: dict[ir.DataType, Any] = {FP16: np.float16, BF16: ml_dtypes.bfloat16}


def convert(values: Any, dtype: ir.DataType, *, clip: bool = False) -> tuple[Array, TensorLoss]:
    ledger = ConversionLedger()
    source = ir.tensor(np.asarray(values, np.float32), name="w")
    array = ConvertedTensor(source, "w", dtype, ledger, clip=clip).numpy()
    (loss,) = ledger.losses()
    return array, loss


# Counts -------------------------------------------------------------------------------------------

# fp16: largest 65504, 65520 is half way to 65536 and goes there; least normal 2**-14, least 2**-24.
# bf16: largest (2 - 2**-7) * 2**127 = 0x7F7F, half way to 2**128 is (2 - 2**-8) * 2**127; normal 2**-126.
BF16_HALF_WAY = (2 - 2**-8) * 2.0**127


@pytest.mark.parametrize(
    ("dtype", "value", "expected", "overflowed", "subnormal"),
    [
        (FP16, 65504.0, 65504.0, 0, 0),
        (FP16, 65519.996, 65504.0, 0, 0),
        (FP16, 65520.0, np.inf, 1, 0),
        (FP16, -65520.0, -np.inf, 1, 0),
        (FP16, 3.4028235e38, np.inf, 1, 0),
        (FP16, 2.0**-14, 2.0**-14, 0, 0),
        (FP16, 2.0**-14 * (1 - 2.0**-10), 2.0**-14 * (1 - 2.0**-10), 0, 1),
        (FP16, -(2.0**-15), -(2.0**-15), 0, 1),
        (FP16, 2.0**-24, 2.0**-24, 0, 1),
        (FP16, 2.0**-26, 0.0, 0, 1),  # lost altogether, which is counted with what loses precision
        (FP16, 0.0, 0.0, 0, 0),
        (FP16, -0.0, -0.0, 0, 0),
        (FP16, 1 + 2.0**-11, 1.0, 0, 0),  # a tie goes to the even neighbour
        (FP16, 1 + 3 * 2.0**-11, 1 + 2.0**-9, 0, 0),
        (BF16, 65520.0, 65536.0, 0, 0),
        (BF16, 3.3895314e38, 3.3895313892515355e38, 0, 0),
        (BF16, np.nextafter(np.float32(BF16_HALF_WAY), np.float32(0)), 3.3895313892515355e38, 0, 0),
        (BF16, BF16_HALF_WAY, np.inf, 1, 0),
        (BF16, -3.4028235e38, -np.inf, 1, 0),
        (BF16, 2.0**-126, 2.0**-126, 0, 0),
        (BF16, 2.0**-127, 2.0**-127, 0, 1),
        (BF16, 2.0**-149, 0.0, 0, 1),
        (BF16, 1 + 2.0**-8, 1.0, 0, 0),
    ],
)  # fmt: skip
def test_one_value(
    dtype: ir.DataType, value: float, expected: float, overflowed: int, subnormal: int
) -> None:
    array, loss = convert([value], dtype)
    assert float(array[0]) == expected
    assert np.signbit(array[0].astype(np.float32)) == np.signbit(np.float32(value))
    assert (loss.overflowed, loss.subnormal, loss.not_finite) == (overflowed, subnormal, 0)
    assert (loss.elements, loss.max_abs) == (1, abs(float(np.float32(value))))


@pytest.mark.parametrize(("dtype", "largest"), [(FP16, 65504.0), (BF16, 3.3895313892515355e38)])
def test_clipping_keeps_the_sign_and_still_counts(dtype: ir.DataType, largest: float) -> None:
    array, loss = convert([3.4028235e38, -3.4028235e38, 1.0], dtype, clip=True)
    assert array.astype(np.float64).tolist() == [largest, -largest, 1.0]
    assert loss.overflowed == 2


def test_what_is_not_finite_is_counted_by_itself() -> None:
    values = [np.nan, np.inf, -np.inf, 7e4, 1e-6, 3.0]
    array, loss = convert(values, FP16)
    assert np.isnan(array[0])
    assert array[1:3].tolist() == [np.inf, -np.inf]
    assert (loss.not_finite, loss.overflowed, loss.subnormal, loss.elements) == (3, 1, 1, 6)
    assert loss.max_abs == 7e4, "the largest finite value"


def test_nothing_is_counted_in_nothing() -> None:
    array, loss = convert(np.zeros((0, 4)), FP16)
    assert array.shape == (0, 4)
    assert (loss.elements, loss.max_abs, loss.overflowed, loss.subnormal) == (0, 0.0, 0, 0)


def test_a_tensor_that_is_written_twice_is_counted_once() -> None:
    ledger = ConversionLedger()
    values = np.asarray([1e5, 1.0], np.float32)
    for name in ("b", "a"):
        tensor = ConvertedTensor(ir.tensor(values, name=name), name, FP16, ledger, clip=False)
        tensor.tobytes()
        tensor.numpy()
    assert [(loss.tensor, loss.overflowed) for loss in ledger.losses()] == [("a", 1), ("b", 1)]


# Streaming ----------------------------------------------------------------------------------------

SIZES = [1, 2, CHUNK_ELEMENTS - 1, CHUNK_ELEMENTS, CHUNK_ELEMENTS + 1, 3 * CHUNK_ELEMENTS + 7]


def drawn(size: int) -> Array:
    """Values of every magnitude that a float has, with both signs."""
    random = np.random.default_rng(size)
    bits = random.integers(0, 2**32, size, dtype=np.uint32)
    values = bits.view(np.float32)
    return np.where(np.isfinite(values), values, np.float32(1))


def external(values: Array, folder: Path, offset: int = 64) -> ir.ExternalTensor:
    (folder / "weights.bin").write_bytes(b"\xff" * offset + values.tobytes() + b"\xff" * 32)
    return ir.ExternalTensor(
        "weights.bin", offset, values.nbytes, ir.DataType.FLOAT, shape=ir.Shape(values.shape), name="w",
        base_dir=folder,
    )  # fmt: skip


@pytest.mark.parametrize("place", ["inline", "external"])
@pytest.mark.parametrize("dtype", [FP16, BF16])
@pytest.mark.parametrize("size", SIZES)
def test_a_stream_rounds_as_the_whole_would(
    size: int, dtype: ir.DataType, place: str, tmp_path: Path
) -> None:
    values = drawn(size)
    source = external(values, tmp_path) if place == "external" else ir.tensor(values, name="w")
    ledger = ConversionLedger()
    tensor = ConvertedTensor(source, "w", dtype, ledger, clip=False)
    with np.errstate(over="ignore"):
        expected = values.astype(LIBRARY[dtype])
    np.testing.assert_array_equal(tensor.numpy().view(np.uint16), expected.view(np.uint16))
    assert tensor.tobytes() == expected.tobytes()
    written = BytesIO()
    tensor.tofile(written)
    assert written.getvalue() == expected.tobytes()
    assert tensor.nbytes == expected.nbytes
    normal = 2.0**-14 if dtype == FP16 else 2.0**-126
    (loss,) = ledger.losses()
    assert loss.overflowed == np.count_nonzero(np.isinf(expected))
    assert loss.subnormal == np.count_nonzero((np.abs(values) < normal) & (values != 0))
    assert loss.max_abs == float(np.abs(values).max())


def test_the_shape_survives(tmp_path: Path) -> None:
    values = drawn(2 * 3 * 5).reshape(2, 3, 5)
    tensor = ConvertedTensor(external(values, tmp_path), "w", BF16, ConversionLedger(), clip=False)
    assert tensor.shape == ir.Shape([2, 3, 5])
    np.testing.assert_array_equal(tensor.numpy(), values.astype(ml_dtypes.bfloat16))


def test_a_chunk_is_never_larger_than_promised(tmp_path: Path) -> None:
    sizes = [block.size for block in stream(external(drawn(3 * CHUNK_ELEMENTS + 7), tmp_path))]
    assert sizes == [CHUNK_ELEMENTS] * 3 + [7]


def test_a_file_that_ends_inside_a_tensor_says_which(tmp_path: Path) -> None:
    tensor = external(drawn(1000), tmp_path)
    (tmp_path / "weights.bin").write_bytes(b"\0" * 2000)
    with pytest.raises(OSError, match=r"weights\.bin: ends inside the tensor w$"):
        for _ in stream(tensor):
            pass


# Memory -------------------------------------------------------------------------------------------

LAYERS, WIDTH = 25, 2048
MODEL_BYTES = LAYERS * WIDTH * WIDTH * 4
"""A stack of linears with 419 MB of fp32 weights."""
LIMIT_BYTES = 200 << 20
"""Interpreter, libraries, and what is in flight between the writer's threads."""


def big_model(folder: Path) -> Path:
    """The stack, with its weights in a sidecar that takes no room on disk but for its first row."""
    nodes, weights = [], []
    for i in range(LAYERS):
        nodes.append(onnx.helper.make_node("MatMul", [f"x{i}", f"w{i}"], [f"x{i + 1}"], f"linear{i}"))
        tensor = onnx.TensorProto(
            name=f"w{i}", data_type=onnx.TensorProto.FLOAT, dims=[WIDTH, WIDTH],
            data_location=onnx.TensorProto.EXTERNAL,
        )  # fmt: skip
        size = WIDTH * WIDTH * 4
        for key, value in (("location", "big.data"), ("offset", str(i * size)), ("length", str(size))):
            tensor.external_data.add(key=key, value=value)
        weights.append(tensor)
    values = [
        onnx.helper.make_tensor_value_info(f"x{i}", onnx.TensorProto.FLOAT, ["n", WIDTH])
        for i in range(LAYERS + 1)
    ]
    graph = onnx.helper.make_graph(nodes, "big", values[:1], values[-1:], weights, value_info=values[1:-1])
    opset = onnx.helper.make_opsetid("", 20)
    onnx.save(onnx.helper.make_model(graph, opset_imports=[opset], ir_version=9), folder / "big.onnx")
    with (folder / "big.data").open("wb") as file:
        file.write(np.linspace(-1, 1, WIDTH, dtype=np.float32).tobytes())
        file.truncate(MODEL_BYTES)
    return folder / "big.onnx"


def test_memory_does_not_grow_with_the_model(tmp_path: Path) -> None:
    script = textwrap.dedent("""
        import re, sys
        from pathlib import Path
        import onnx_ir as ir
        from engine_builder.precision.convert import convert
        from engine_builder.precision.options import ConversionOptions
        out = Path(sys.argv[2])
        options = ConversionOptions("bf16", "bf16", generic=True)
        done = convert(ir.load(sys.argv[1]), out, options, [{"x0": (1, 2048)}])
        assert done.counts["linears"] == 25, done.counts
        assert [f.name for f in done.files] == ["out.onnx", "out.onnx.data"]
        # Not ru_maxrss: that of a child starts with what its parent had when it forked.
        print(int(re.search(r"VmHWM:\\s+(\\d+) kB", Path("/proc/self/status").read_text())[1]) * 1024)
    """)
    source, out = big_model(tmp_path), tmp_path / "out.onnx"
    ran = subprocess.run(
        [sys.executable, "-c", script, str(source), str(out)],
        cwd=REPOSITORY, capture_output=True, text=True, timeout=120, check=False,
        env={"PYTHONPATH": str(REPOSITORY), "OPENBLAS_NUM_THREADS": "1", "PATH": "/usr/bin:/bin"},
    )  # fmt: skip
    assert ran.returncode == 0, ran.stderr
    assert out.with_name("out.onnx.data").stat().st_size >= MODEL_BYTES // 2
    peak = int(ran.stdout)
    assert 50 << 20 < peak < LIMIT_BYTES < MODEL_BYTES
    first = np.fromfile(out.with_name("out.onnx.data"), ml_dtypes.bfloat16, WIDTH)
    np.testing.assert_array_equal(
        first, np.linspace(-1, 1, WIDTH, dtype=np.float32).astype(ml_dtypes.bfloat16)
    )
