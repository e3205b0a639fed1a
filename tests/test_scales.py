"""The scales file: what it looks like, what it refuses, and the weight ranges in it."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jsonschema
import numpy as np
import onnx_ir as ir
import pytest
from hypothesis import given
from hypothesis import strategies as st

from engine_builder.errors import ResourceError, SourceModelError
from engine_builder.graph import weights
from engine_builder.graph.passes.insert_qdq import LinearScale
from engine_builder.graph.structures import Linear
from engine_builder.quantize.scales import (
    ZERO_FLOOR,
    Calibration,
    Floored,
    LinearRange,
    Scales,
    ScalesData,
    ScalesSample,
    ScalesSource,
    load_scales,
    save_scales,
    scales_schema,
    single,
)
from engine_builder.quantize.weight_amax import weight_amax

SOURCE = "5f" * 32
DATA = "0a" * 32

TEXT = """{
 "schema": "sa3-builder/scales/1",
 "source": {
  "name": "dit.onnx",
  "sha256": "SOURCE"
 },
 "calibration": {
  "tool": "nvidia-modelopt",
  "method": "max",
  "provider": "cpu",
  "versions": {"nvidia-modelopt": "0.47.0"}
 },
 "data": {
  "synthetic": true,
  "sha256": "DATA"
 },
 "samples": [
  {"name": "draw 1", "length": 64, "t": 1.0},
  {"name": "draw 1", "length": 64, "t": 0.5}
 ],
 "floored": [
  {"linear": "b", "operand": "activation"}
 ],
 "missing": {
  "c": "it lies in a subgraph"
 },
 "linears": {
  "a": {"activation_amax": 3.5, "weight_amax": 0.25, "weight_channel_amax": [0.25, 0.125]},
  "b": {"activation_amax": 0.02734375, "weight_amax": 2.0}
 }
}
""".replace("SOURCE", SOURCE).replace("DATA", DATA)


def example() -> Scales:
    return Scales(
        source=ScalesSource(name="dit.onnx", sha256=SOURCE),
        calibration=Calibration(method="max", provider="cpu", versions={"nvidia-modelopt": "0.47.0"}),
        data=ScalesData(synthetic=True, sha256=DATA),
        samples=(
            ScalesSample(name="draw 1", length=64, t=1.0),
            ScalesSample(name="draw 1", length=64, t=0.5),
        ),
        floored=(Floored(linear="b", operand="activation"),),
        missing={"c": "it lies in a subgraph"},
        linears={
            "a": LinearRange(activation_amax=3.5, weight_amax=0.25, weight_channel_amax=(0.25, 0.125)),
            "b": LinearRange(activation_amax=ZERO_FLOOR, weight_amax=2.0),
        },
    )


def written(folder: Path, text: str | bytes = TEXT) -> Path:
    path = folder / "scales.json"
    path.write_bytes(text.encode() if isinstance(text, str) else text)
    return path


def test_a_scales_file_has_one_line_per_linear_and_fixed_bytes() -> None:
    assert example().to_json() == TEXT


def test_what_is_saved_is_read_back(tmp_path: Path) -> None:
    path = tmp_path / "new" / "scales.json"
    save_scales(example(), path)
    assert path.read_text() == TEXT
    assert load_scales(path).model_dump() == example().model_dump()
    assert load_scales(path).synthetic


def test_the_schema_describes_the_file() -> None:
    schema = scales_schema()
    jsonschema.Draft202012Validator.check_schema(schema)
    validator = jsonschema.Draft202012Validator(schema)
    validator.validate(json.loads(TEXT))
    wrong = json.loads(TEXT.replace("3.5", "0.0"))
    assert [list(e.absolute_path) for e in validator.iter_errors(wrong)] == [
        ["linears", "a", "activation_amax"]
    ]


def test_a_folder_that_cannot_be_written_to_is_a_resource_error(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(ResourceError):
        save_scales(example(), tmp_path / "file" / "scales.json")


def test_ranges_per_tensor_and_per_channel(tmp_path: Path) -> None:
    scales = load_scales(written(tmp_path))
    assert scales.ranges("per_tensor") == {
        "a": LinearScale(3.5, (0.25,)),
        "b": LinearScale(0.02734375, (2.0,)),
    }
    with pytest.raises(SourceModelError, match="no weight range per output channel for 'b'"):
        scales.ranges("per_channel")
    only_a = scales.model_copy(update={"linears": {"a": scales.linears["a"]}})
    assert only_a.ranges("per_channel") == {"a": LinearScale(3.5, (0.25, 0.125))}


def test_the_scales_of_another_model_are_refused(tmp_path: Path) -> None:
    scales = load_scales(written(tmp_path))
    scales.require_source(SOURCE)
    with pytest.raises(SourceModelError) as caught:
        scales.require_source("77" * 32)
    assert caught.value.exit_code == 4
    assert caught.value.where == str(tmp_path / "scales.json")
    assert "dit.onnx" in caught.value.message
    assert "5f5f5f5f5f5f" in caught.value.message
    assert "777777777777" in caught.value.message


def test_a_linear_without_scales_is_named_with_the_reason(tmp_path: Path) -> None:
    scales = load_scales(written(tmp_path))
    scales.require(["a", "b"])
    with pytest.raises(
        SourceModelError, match="the linear 'c': it lies in a subgraph, and for 1 more linears"
    ):
        scales.require(["a", "c", "d"])
    with pytest.raises(SourceModelError) as caught:
        scales.require(["d"])
    assert caught.value.message == "no scale for the linear 'd'"


FAULTS: tuple[tuple[str, str, str], ...] = (
    ("3.5", "0.0", "linears.a.activation_amax is zero"),
    ("3.5", "0", "linears.a.activation_amax is zero"),
    ("3.5", "-3.5", "linears.a.activation_amax is -3.5: a range that is negative"),
    ("3.5", "NaN", "linears.a.activation_amax is nan: a range that is not finite"),
    ("3.5", "Infinity", "linears.a.activation_amax is inf: a range that is not finite"),
    ("3.5", "-Infinity", "linears.a.activation_amax is -inf: a range that is not finite"),
    ("3.5", "1e999", "linears.a.activation_amax is inf: a range that is not finite"),
    ("3.5", '"3.5"', "linears.a.activation_amax is wrong: input should be a valid number"),
    ("3.5", "null", "linears.a.activation_amax is wrong: input should be a valid number"),
    ("3.5", "true", "linears.a.activation_amax is wrong: input should be a valid number"),
    ("0.25, ", "-0.25, ", "linears.a.weight_amax is -0.25: a range that is negative"),
    ("[0.25, 0.125]", "[0.25, 0.0]", "linears.a.weight_channel_amax.1 is zero"),
    ("[0.25, 0.125]", "[]", "linears.a.weight_channel_amax is wrong: tuple should have at least 1 item"),
    (
        '"weight_amax": 2.0',
        '"weight": 2.0',
        "linears.b.weight_amax is wrong: field required; and 1 more fault",
    ),
    ('"a": {', '"b": {', "is no JSON: the key 'b' is given twice"),
    (
        "scales/1",
        "scales/2",
        "is no scales file: its schema is 'sa3-builder/scales/2', not sa3-builder/scales/1",
    ),
    ('"schema"', '"scheme"', "is no scales file: it names no schema, not sa3-builder/scales/1"),
    (SOURCE, "5f", "source.sha256 is wrong: string should match pattern"),
    ('"max"', '"min"', "calibration.method is wrong: input should be 'max' or 'entropy'"),
    ('"synthetic": true', '"synthetic": "no"', "data.synthetic is wrong: input should be a valid boolean"),
    ('"length": 64', '"length": -1', "samples.0.length is wrong: input should be greater than or equal to 0"),
    ("]}", "]", "is no JSON: Expecting ',' delimiter"),
    (TEXT, "", "is no JSON: Expecting value"),
    (TEXT, "[]", "is no scales file: it names no schema"),
    (TEXT, "[" * 100000, "nested too deeply"),
    (TEXT, '{"schema": 1' + "0" * 5000 + "}", "is no JSON: Exceeds the limit"),
)


@pytest.mark.parametrize(("old", "new", "message"), FAULTS)
def test_faults_are_told_in_one_line(tmp_path: Path, old: str, new: str, message: str) -> None:
    assert old in TEXT
    path = written(tmp_path, TEXT.replace(old, new, 1))
    with pytest.raises(SourceModelError) as caught:
        load_scales(path)
    assert message in caught.value.message
    assert caught.value.where == str(path)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda folder: folder / "none.json", "no such scales file"),
        (lambda folder: folder, "is a folder"),
        (lambda folder: written(folder, b"\xff\xfe\x00"), "is no JSON"),
        (lambda folder: written(folder, b"\x80"), "is no JSON"),
        (lambda folder: Path("a\0b"), "cannot be read"),
    ],
)
def test_files_that_are_none(tmp_path: Path, make: Callable[[Path], Path], message: str) -> None:
    with pytest.raises(SourceModelError, match=message):
        load_scales(make(tmp_path))


def test_no_linear_at_all_is_a_fault(tmp_path: Path) -> None:
    document: dict[str, Any] = {**json.loads(TEXT), "linears": {}}
    with pytest.raises(SourceModelError, match="linears is wrong"):
        load_scales(written(tmp_path, json.dumps(document)))


def test_the_floor_of_zero_has_the_smallest_normal_fp16_scale() -> None:
    assert ZERO_FLOOR == 448 / 16384 == 0.02734375
    scale = np.float16(ZERO_FLOOR / 448)
    assert scale == np.finfo(np.float16).tiny == 2.0**-14


@given(st.floats(width=32, min_value=2.0**-126, allow_infinity=False))
def test_a_number_is_written_short_and_read_back_as_the_same_fp32(value: float) -> None:
    text = json.dumps(single(value))
    assert np.float32(json.loads(text)) == np.float32(value)
    assert len(text) <= 24


def test_a_tenth_is_written_as_one() -> None:
    assert json.dumps(single(float(np.float32(0.1)))) == "0.1"


def test_reading_scales_needs_neither_torch_nor_modelopt(tmp_path: Path) -> None:
    code = (
        "import sys; from pathlib import Path; from engine_builder.quantize.scales import load_scales;"
        "load_scales(Path(sys.argv[1]));"
        "print(sorted({m.split('.')[0] for m in sys.modules} & {'torch', 'modelopt', 'onnxruntime'}))"
    )
    run = subprocess.run(
        [sys.executable, "-c", code, str(written(tmp_path))],
        capture_output=True,
        text=True,
        check=True,
        cwd=Path(__file__).parent.parent,
    )
    assert run.stdout.strip() == "[]"


# Weights ------------------------------------------------------------------------------------------


def linear(tensor: ir.TensorProtocol, axis: int) -> Linear:
    weight = ir.Value(name="w", const_value=tensor)
    x = ir.Value(name="x")
    node = ir.node("MatMul", [x, weight], name="m")
    rows, columns = (int(size) for size in tensor.shape.numpy())
    sizes = (rows, columns)
    return Linear(node, weight, 1, axis, sizes[1 - axis], sizes[axis], x, node.outputs[0])


MATRIX = np.array([[1, -7, 2], [0, 3, -2.5], [-4, 5, 2], [0.5, 0, 0]], np.float32)
BY_COLUMN = [4, 7, 2.5]
BY_ROW = [7, 3, 5, 0.5]


@pytest.mark.parametrize("chunk", [1, 2, 3, 4, 5, 11, 12, 100])
@pytest.mark.parametrize(("axis", "expected"), [(1, BY_COLUMN), (0, BY_ROW)])
def test_weight_ranges_do_not_depend_on_the_chunks(
    monkeypatch: pytest.MonkeyPatch, chunk: int, axis: int, expected: list[float]
) -> None:
    monkeypatch.setattr(weights, "CHUNK_ELEMENTS", chunk)
    amax = weight_amax(linear(ir.tensor(MATRIX), axis))
    assert amax.channels.tolist() == expected
    assert amax.tensor == 7.0


def test_weights_are_read_from_their_file(tmp_path: Path) -> None:
    (tmp_path / "w.bin").write_bytes(b"odd" + MATRIX.tobytes())
    tensor = ir.ExternalTensor(
        "w.bin", 3, MATRIX.nbytes, ir.DataType.FLOAT, shape=ir.Shape((4, 3)), name="w", base_dir=str(tmp_path)
    )
    assert weight_amax(linear(tensor, 1)).channels.tolist() == BY_COLUMN


@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
@pytest.mark.parametrize("axis", [0, 1])
def test_a_weight_that_is_not_finite_is_refused(bad: float, axis: int) -> None:
    matrix = MATRIX.copy()
    matrix[2, 1] = bad
    with pytest.raises(SourceModelError, match=r"node m: the weight w holds values that are not finite"):
        weight_amax(linear(ir.tensor(matrix), axis))


def test_an_all_zero_weight_has_a_range_of_zero() -> None:
    amax = weight_amax(linear(ir.tensor(np.zeros((4, 3), np.float32)), 1))
    assert (amax.tensor, amax.channels.tolist()) == (0.0, [0.0, 0.0, 0.0])
