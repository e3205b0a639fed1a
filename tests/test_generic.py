"""Models that are no SA3 DiT: a plain encoder transformer and convolutional networks."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnx_ir as ir
import onnxruntime
import pytest

from engine_builder.errors import ConversionError
from engine_builder.precision.convert import Conversion, convert
from engine_builder.precision.options import ConversionOptions
from tests.edges import declared, faults
from tests.graphs import Array, graph
from verify.strict import StrictEvaluator

FP32, FP16, BF16 = onnx.TensorProto.FLOAT, onnx.TensorProto.FLOAT16, onnx.TensorProto.BFLOAT16
HALF = {"fp16": FP16, "bf16": BF16}
WIDTH, HEADS, VOCABULARY, LAYERS = 64, 4, 100, 2


def weights(**shapes: tuple[int, ...]) -> dict[str, Array]:
    """Gaussian weights scaled by the square root of what they sum over; biases and gains around 0 and 1."""
    made: dict[str, Array] = {}
    for seed, (name, shape) in enumerate(shapes.items()):
        values = np.random.default_rng(seed).standard_normal(shape, dtype=np.float32)
        if len(shape) == 1:
            made[name] = np.float32(0.1) * values + np.float32(name.startswith("g"))
        else:
            made[name] = values / np.float32(np.sqrt(np.prod(shape[1:] if len(shape) > 2 else shape[:1])))
    return made


def encoder() -> onnx.ModelProto:
    """Token embedding, sinusoidal positions computed at run time, post-norm blocks, a padding mask."""
    body = [
        "tokens = Gather(table, ids)",
        "sh = Shape <start = 1, end = 2> (ids) T = Squeeze(sh) r = Range(zero, T, one) p = Cast <to = 1> (r)",
        "q0 = Unsqueeze(p, last) angle = Mul(q0, frequencies) s0 = Sin(angle) c0 = Cos(angle)",
        "positions = Concat <axis = -1> (s0, c0) x0 = Add(tokens, positions)",
        "m = Equal(mask, zero) m1 = Unsqueeze(m, axes12)",
    ]
    shapes: dict[str, tuple[int, ...]] = {"table": (VOCABULARY, WIDTH)}
    for i in range(LAYERS):
        for part in "qkv":
            shapes |= {f"w{part}{i}": (WIDTH, WIDTH), f"b{part}{i}": (WIDTH,)}
            body.append(
                f"{part}l{i} = MatMul(x{i}, w{part}{i}) {part}b{i} = Add({part}l{i}, b{part}{i})"
                f"{part}r{i} = Reshape({part}b{i}, split)"
                f"{part}t{i} = Transpose <perm = [0, 2, 1, 3]> ({part}r{i})"
            )
        shapes |= {
            f"wo{i}": (WIDTH, WIDTH), f"wa{i}": (WIDTH, 4 * WIDTH), f"wb{i}": (4 * WIDTH, WIDTH),
            f"ga{i}": (WIDTH,), f"ba{i}": (WIDTH,), f"gb{i}": (WIDTH,), f"bb{i}": (WIDTH,),
        }  # fmt: skip
        body.append(
            f"kk{i} = Transpose <perm = [0, 1, 3, 2]> (kt{i}) sc{i} = MatMul(qt{i}, kk{i})"
            f"sd{i} = Mul(sc{i}, scale)"
            f"sm{i} = Where(m1, low, sd{i}) pr{i} = Softmax <axis = -1> (sm{i}) at{i} = MatMul(pr{i}, vt{i})"
            f"ax{i} = Transpose <perm = [0, 2, 1, 3]> (at{i}) ar{i} = Reshape(ax{i}, join)"
            f"ao{i} = MatMul(ar{i}, wo{i})"
            f"h{i} = Add(x{i}, ao{i}) n{i} = LayerNormalization <axis = -1> (h{i}, ga{i}, ba{i})"
            f"f{i} = MatMul(n{i}, wa{i}) fr{i} = Relu(f{i}) fo{i} = MatMul(fr{i}, wb{i})"
            f"g{i} = Add(n{i}, fo{i}) x{i + 1} = LayerNormalization <axis = -1> (g{i}, gb{i}, bb{i})"
        )
    constants: dict[str, Any] = {
        **weights(**shapes),
        "frequencies": (10000.0 ** (-np.arange(0, WIDTH, 2) / WIDTH)).astype(np.float32),
        "zero": 0, "one": 1, "last": [-1], "axes12": [1, 2], "split": [0, 0, HEADS, WIDTH // HEADS],
        "join": [0, 0, WIDTH], "scale": (WIDTH // HEADS) ** -0.5, "low": np.float32(np.finfo(np.float32).min),
    }  # fmt: skip
    head = f"(int64[1,T] ids, int64[1,T] mask) => (float[1,T,{WIDTH}] x{LAYERS})"
    return graph(f"{head} {{ {' '.join(body)} }}", constants)


def autoencoder() -> onnx.ModelProto:
    """Strided convolutions with group norms and sine activations (x + sin(ax)^2 / a), and back again."""
    body = (
        "a0 = Conv <pads = [3, 3]> (x, w0, b0)"
        "u0 = Mul(a0, s0) v0 = Sin(u0) t0 = Mul(v0, v0) d0 = Div(t0, s0) a1 = Add(a0, d0)"
        "a2 = Conv <pads = [1, 1], strides = [2]> (a1, w1, b1)"
        "r2 = Reshape(a2, groups) i2 = InstanceNormalization (r2, ones, zeros) sh = Shape(a2)"
        "j2 = Reshape(i2, sh)"
        "k2 = Mul(j2, gain) n2 = Add(k2, shift)"
        "e2 = Sigmoid(n2) a3 = Mul(n2, e2) z = Conv <pads = [1, 1]> (a3, w2, b2)"
        "c0 = ConvTranspose <pads = [1, 1], strides = [2]> (z, w3, b3) c1 = Elu(c0)"
        'c2 = Resize <mode = "nearest"> (c1, , doubled)'
        "c3 = AveragePool <kernel_shape = [2], strides = [2]> (c2)"
        "o = Conv <pads = [3, 3]> (c3, w4, b4) y = Tanh(o)"
    )
    constants: dict[str, Any] = {
        **weights(
            w0=(16, 2, 7), b0=(16,), w1=(32, 16, 4), b1=(32,), w2=(8, 32, 3), b2=(8,), w3=(8, 16, 4),
            b3=(16,), w4=(2, 16, 7), b4=(2,),
        ),
        "s0": np.full((1, 16, 1), 1.5, np.float32), "groups": [0, 4, -1], "ones": np.ones(4, np.float32),
        "zeros": np.zeros(4, np.float32), "gain": np.full((32, 1), 1.2, np.float32),
        "shift": np.full((32, 1), 0.1, np.float32), "doubled": np.asarray([1, 1, 2], np.float32),
    }  # fmt: skip
    return graph(f"(float[1,2,n] x) => (float[1,2,m] y) {{ {body} }}", constants)


FEEDS: dict[str, dict[str, Array]] = {
    "encoder": {
        "ids": np.random.default_rng(0).integers(0, VOCABULARY, (1, 12)),
        "mask": np.asarray([[1] * 9 + [0] * 3]),
    },
    "autoencoder": {"x": np.random.default_rng(0).standard_normal((1, 2, 64), dtype=np.float32)},
}
MODELS = {"encoder": encoder, "autoencoder": autoencoder}


def converted(name: str, trunk: Any, folder: Path, **more: Any) -> tuple[Conversion, Path]:
    out = folder / f"{name}_{trunk}.onnx"
    lengths = [{k: v.shape for k, v in FEEDS[name].items()}]
    chosen = ConversionOptions(trunk, trunk, generic=True, **more)
    return convert(ir.from_proto(MODELS[name]()), out, chosen, lengths), out


def reference(name: str) -> Array:
    session = onnxruntime.InferenceSession(
        MODELS[name]().SerializeToString(), providers=["CPUExecutionProvider"]
    )
    return np.asarray(session.run(None, FEEDS[name])[0])


def cosine(one: Array, two: Array) -> float:
    a, b = one.astype(np.float64).ravel(), two.astype(np.float64).ravel()
    return float(a @ b / (np.linalg.norm(a) * np.linalg.norm(b)))


@pytest.mark.parametrize("trunk", ["fp16", "bf16"])
@pytest.mark.parametrize("name", MODELS)
def test_it_converts_consistently_and_computes_the_same(name: str, trunk: str, tmp_path: Path) -> None:
    _, out = converted(name, trunk, tmp_path)
    assert faults(out) == []
    source, model = MODELS[name](), onnx.load(out)
    for old, new in ((source.graph.input, model.graph.input), (source.graph.output, model.graph.output)):
        assert [(v.name, v.type.tensor_type.elem_type) for v in new] == [
            (v.name, v.type.tensor_type.elem_type) for v in old
        ], "names and types are the graph's own, not a DiT's"
    evaluator = StrictEvaluator(ir.load(out), threads=2)
    (got,) = evaluator.run(FEEDS[name]).values()
    # A dozen roundings in a row: 2**-11 and 2**-8 each.
    assert cosine(got, reference(name)) >= {"fp16": 0.99999, "bf16": 0.9995}[trunk]


def test_the_report_says_what_an_encoder_is_made_of(tmp_path: Path) -> None:
    done, out = converted("encoder", "fp16", tmp_path)
    assert dict(done.counts) == {
        "norms": 2 * LAYERS, "rotary_embeddings": 0, "rotary_trig_nodes": 0,
        "fourier_features": 1,  # the sinusoidal positions
        "attention_cores": LAYERS, "linears": 6 * LAYERS,
    }  # fmt: skip
    assert {norm["kind"] for norm in done.structures["norms"]} == {"layer"}
    assert [core["mask"] for core in done.structures["attention_cores"]] == ["m1"] * LAYERS
    assert done.structures["near_misses"] == []
    types = declared(onnx.load(out).graph)
    # The norms and the angles are protected, the cores and the linears are in the trunk.
    assert {types[f"n{i}"] for i in range(LAYERS)} == {FP32}
    assert {types[name] for name in ("p", "q0", "angle", "s0", "c0")} == {FP32}
    for part in ("sc", "pr", "at", "ql", "f", "fo"):
        assert {types[f"{part}{i}"] for i in range(LAYERS)} == {FP16}
    stored = {t.name: onnx.numpy_helper.to_array(t) for t in onnx.load(out).graph.initializer}
    assert float(stored["low"]) == -65504.0, "a masked score stays finite"


def test_the_report_says_what_an_autoencoder_is_made_of(tmp_path: Path) -> None:
    done, out = converted("autoencoder", "fp16", tmp_path)
    assert {k: v for k, v in done.counts.items() if v} == {"norms": 1}
    assert [norm["kind"] for norm in done.structures["norms"]] == ["instance"]
    assert [(m["node"], m["reason"]) for m in done.structures["near_misses"]] == [
        ("v0", "no cosine is taken of its angle u0")
    ]
    types = declared(onnx.load(out).graph)
    assert types["i2"] == FP32
    # A sine of activations is an activation: it does not drag the whole network into fp32.
    assert {types[name] for name in ("v0", "a1", "a2", "z", "c1")} == {FP16}


def test_an_operator_without_bf16_is_named(tmp_path: Path) -> None:
    """The standard has no bf16 for the region of interest of Resize."""
    done, _ = converted("autoencoder", "bf16", tmp_path)
    assert done.forced_fp32 == ("c2",)


@pytest.mark.parametrize("name", MODELS)
def test_without_the_word_generic_it_is_refused(name: str, tmp_path: Path) -> None:
    with pytest.raises(ConversionError, match="which an SA3 DiT must have") as caught:
        convert(ir.from_proto(MODELS[name]()), tmp_path / "out.onnx", ConversionOptions("fp16", "fp16"), [{}])
    assert caught.value.hint == "for another kind of model set model.kind: generic"


def test_positions_that_are_not_rotary_are_not_baked(tmp_path: Path) -> None:
    done, out = converted("encoder", "bf16", tmp_path, rotary="baked")
    assert done.tables == ()
    assert sum(n.op_type in ("Sin", "Cos") for n in onnx.load(out).graph.node) == 2
