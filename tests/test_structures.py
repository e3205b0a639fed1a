"""Structures: the real exports, the spellings that exporters choose between, and near misses.

Expected counts are worked out from the architecture in the repository's model facts: per block three
block norms, two head norms (q, k) in each of two attentions, and one rotation each of q and k.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnx_ir as ir
import pytest

from engine_builder.errors import ConversionError
from engine_builder.graph.find import find_structures, require_dit
from engine_builder.sample import Spelling
from tests.conftest import TINY_MODELS
from tests.graphs import SAMPLES, Array, graph, names, sample, structures

LAYERS = 2
NORMS = LAYERS * (3 + 2 * 2)
ROTATIONS = LAYERS * 2
# Per layer: qkv and out of self-attention, q, kv and out of cross-attention, two each of local
# embedding and feed-forward.  Outside: two each of conditioning tokens, global, timestep and
# modulation embedding; the seconds' linear; in and out of the transformer.
LINEARS = LAYERS * 9 + 4 * 2 + 1 + 2
# As Gemm, because they run over one row and have a bias (TorchScript) or over two dimensions
# (dynamo): seconds, timestep (2), modulation (2); with dynamo also the bias-free global ones (2).
GEMMS = {"torchscript": 5, "dynamo": 7}


def exporter_of(name: str) -> str:
    return "torchscript" if "torchscript" in name else "dynamo"


def check_dit(path: Path, differential: bool) -> None:
    model = onnx.load(path)
    found = structures(model)
    exporter = exporter_of(path.name)
    assert found.counts() == {
        "norms": NORMS,
        "rotary_embeddings": ROTATIONS,
        # TorchScript takes cosine and sine for each rotation; dynamo once for the queries' angles and
        # once for the keys', which are scaled by the ratio of the two lengths.
        "rotary_trig_nodes": 2 * ROTATIONS if exporter == "torchscript" else 2 * 2,
        "fourier_features": 2,
        "attention_cores": LAYERS * 2 * (2 if differential else 1),
        "linears": LINEARS,
    }
    assert found.near_misses == ()
    require_dit(found)
    by_type = [linear.node.op_type for linear in found.linears]
    assert by_type.count("Gemm") == GEMMS[exporter]
    assert by_type.count("MatMul") == LINEARS - GEMMS[exporter]
    # The facts of the shared models say 24 of 24; dynamo writes two of these as Gemm.
    assert all(min(linear.in_features, linear.out_features) >= 128 for linear in found.linears)
    assert sorted({round(norm.epsilon, 9) for norm in found.norms}) == [1e-6, 1e-5]
    assert all(norm.kind == "rms" and norm.gain is not None for norm in found.norms)
    # A core's queries and keys come out of a rotation in self-attention and out of a norm in
    # cross-attention; differential cores split what was stacked for both.
    outputs = {r.output for r in found.rotary} | {norm.output for norm in found.norms}
    if not differential:
        assert {core.q for core in found.attention} | {core.k for core in found.attention} <= outputs
    inputs = {"t": 0, "seconds_total": 0}
    for features in found.fourier:
        read = {v.name for n in features.angle_nodes for v in n.inputs if v is not None}
        for name in inputs:
            inputs[name] += name in read
    assert inputs == {"t": 1, "seconds_total": 1}


@pytest.mark.parametrize("name", TINY_MODELS)
def test_the_real_exports_hold_what_the_architecture_says(name: str, tiny_models: Mapping[str, Path]) -> None:
    check_dit(tiny_models[name], differential=name.startswith("md"))


@pytest.mark.parametrize(("spelling", "differential"), SAMPLES)
def test_the_samples_hold_what_the_architecture_says(spelling: Spelling, differential: bool) -> None:
    check_dit(sample(spelling, differential), differential)


@pytest.mark.parametrize("spelling", [Spelling.TORCHSCRIPT17, Spelling.DYNAMO20])
def test_an_export_without_declared_types_holds_the_same(spelling: Spelling, tmp_path: Path) -> None:
    model = onnx.load(sample(spelling, True))
    del model.graph.value_info[:]
    path = tmp_path / sample(spelling, True).name
    onnx.save(model, path)
    check_dit(path, differential=True)


# Norms --------------------------------------------------------------------------------------------

HEAD = "(float[1,T,64] x) => (float[1,T,64] y)"
GAIN = np.linspace(0.5, 1.5, 64, dtype=np.float32)
NORM_CONSTANTS: dict[str, Any] = {
    "two": 2.0, "one": 1.0, "eps": 1e-6, "half": -0.5, "g": GAIN, "b": GAIN, "last": [-1], "axis2": [2],
    "tiny": 1e-12, "root": 8.0, "scale": 0.125, "size": 64.0,
}  # fmt: skip

NORM_SPELLINGS: dict[str, tuple[int, str]] = {
    "TorchScript": (17, "s = Pow(x, two) m = ReduceMean <axes = [-1]> (s) e = Add(m, eps) r = Sqrt(e)"
                        "i = Div(one, r) n = Mul(x, i) y = Mul(n, g)"),
    "dynamo": (18, "s = Pow(x, two) m = ReduceMean(s, axis2) e = Add(m, eps) r = Sqrt(e)"
                   "i = Reciprocal(r) n = Mul(x, i) y = Mul(n, g)"),
    "square by Mul": (18, "s = Mul(x, x) m = ReduceMean(s, last) e = Add(m, eps) r = Sqrt(e)"
                          "i = Reciprocal(r) n = Mul(x, i) y = Mul(n, g)"),
    "operands swapped": (17, "s = Pow(x, two) m = ReduceMean <axes = [2]> (s) e = Add(eps, m) r = Sqrt(e)"
                             "i = Div(one, r) n = Mul(i, x) y = Mul(g, n)"),
    "power of -1/2": (18, "s = Pow(x, two) m = ReduceMean(s, last) e = Add(m, eps) i = Pow(e, half)"
                          "n = Mul(x, i) y = Mul(n, g)"),
    "division by the root": (18, "s = Mul(x, x) m = ReduceMean(s, last) e = Add(m, eps) r = Sqrt(e)"
                                 "n = Div(x, r) y = Mul(n, g)"),
    "markers": (17, "c = Cast <to = 1> (x) s = Pow(c, two) m = ReduceMean <axes = [-1]> (s) e = Add(m, eps)"
                    "r = Sqrt(e) i = Div(one, r) c2 = Cast <to = 1> (x) n = Mul(c2, i)"
                    "c3 = Cast <to = 1> (n) y = Mul(c3, g)"),
    "gain through Identity": (17, "h = Identity(g) k = Identity(h) s = Pow(x, two)"
                                  "m = ReduceMean <axes = [-1]> (s) e = Add(m, eps) r = Sqrt(e)"
                                  "i = Div(one, r) n = Mul(x, i) y = Mul(n, k)"),
    "gain computed": (17, "h = Add(g, one) s = Pow(x, two) m = ReduceMean <axes = [-1]> (s) e = Add(m, eps)"
                          "r = Sqrt(e) i = Div(one, r) n = Mul(x, i) y = Mul(n, h)"),
    "constants as nodes": (17, "p = Constant <value = float {2.0}> () q = Constant <value_float = 1e-6> ()"
                               "s = Pow(x, p) m = ReduceMean <axes = [-1]> (s) e = Add(m, q) r = Sqrt(e)"
                               "i = Div(one, r) n = Mul(x, i) y = Mul(n, g)"),
    "composite": (23, "y = RMSNormalization <axis = -1, epsilon = 1e-6> (x, g)"),
}  # fmt: skip


@pytest.mark.parametrize("typed", [True, False], ids=["typed", "untyped"])
@pytest.mark.parametrize("spelling", NORM_SPELLINGS)
def test_an_rms_norm_is_found_in_every_spelling(spelling: str, typed: bool) -> None:
    opset, nodes = NORM_SPELLINGS[spelling]
    found = structures(graph(f"{HEAD} {{ {nodes} }}", NORM_CONSTANTS, opset=opset, typed=typed))
    (norm,) = found.norms
    assert (norm.kind, norm.x.name, norm.output.name) == ("rms", "x", "y")
    assert norm.epsilon == pytest.approx(1e-6)
    assert norm.gain is not None
    expected = {"gain computed": "h"}.get(spelling, "g")
    assert norm.gain.name == expected
    # Everything that computes is part of it, so that all of it can be kept in fp32.
    computing = {n.split("=")[0].strip() for n in nodes.split(")") if "=" in n and "(" in n}
    moved = {"c", "c2", "c3", "k", "p", "q"} | ({"h"} if "Identity" in spelling else set())
    assert names(norm.nodes) == {c.split()[-1] for c in computing if c} - moved
    assert found.near_misses == ()


@pytest.mark.parametrize(
    ("nodes", "kind", "gain"),
    [
        ("s = Mul(x, x) m = ReduceMean(s, last) e = Add(m, eps) r = Sqrt(e) y = Div(x, r)", "rms", None),
        ("y = LayerNormalization <axis = -1> (x, g, b)", "layer", "g"),
        (
            "a = ReduceMean(x, last) d = Sub(x, a) s = Pow(d, two) m = ReduceMean(s, last) e = Add(m, eps)"
            "r = Sqrt(e) n = Div(d, r) o = Mul(n, g) y = Add(o, b)",
            "layer",
            "g",
        ),
        (  # the difference is computed once for the square and once for the quotient
            "a = ReduceMean(x, last) d = Sub(x, a) s = Mul(d, d) m = ReduceMean(s, last) e = Add(m, eps)"
            "r = Sqrt(e) d2 = Sub(x, a) n = Div(d2, r) o = Mul(n, g) y = Add(b, o)",
            "layer",
            "g",
        ),
        (
            "l = ReduceL2(x, last) c = Clip(l, tiny) s = Shape(x) w = Expand(c, s) n = Div(x, w)"
            "o = Mul(n, root) y = Mul(o, g)",
            "l2",
            "g",
        ),
        ("l = ReduceL2(x, last) c = Max(l, tiny) y = Div(x, c)", "l2", None),
        ("l = ReduceL2(x, last) m = Mul(l, scale) c = Clip(m, eps) n = Div(x, c) y = Mul(n, g)", "l2", "g"),
        (
            "l = ReduceL2(x, last) q = Pow(l, two) m = Div(q, size) e = Add(m, eps) r = Sqrt(e)"
            "i = Div(one, r) n = Mul(x, i) y = Mul(n, g)",
            "l2",
            "g",
        ),
        (
            "q = Mul(x, x) l = ReduceSum(q, last) m = Mul(l, scale) e = Add(m, eps) r = Sqrt(e)"
            "i = Reciprocal(r) n = Mul(x, i) y = Mul(n, g)",
            "l2",
            "g",
        ),
        ("l = ReduceSumSquare(x, last) m = Div(l, size) r = Sqrt(m) y = Div(x, r)", "l2", None),
        (
            "l = ReduceL2 <keepdims = 0> (x, last) k = Unsqueeze(l, last) c = Max(k, tiny) y = Div(x, c)",
            "l2",
            None,
        ),
    ],
    ids=[
        "no gain",
        "LayerNormalization",
        "layer",
        "layer, unmerged",
        "length",
        "length, no gain",
        "length by the root of its size",
        "mean square from a length",
        "mean square from a sum",
        "sum of squares",
        "length without its axis",
    ],
)
def test_other_norms(nodes: str, kind: str, gain: str | None) -> None:
    found = structures(graph(f"{HEAD} {{ {nodes} }}", NORM_CONSTANTS, opset=18))
    (norm,) = found.norms
    assert (norm.kind, norm.x.name, norm.output.name) == (kind, "x", "y")
    assert (None if norm.gain is None else norm.gain.name) == gain
    integers = {"s"} if kind == "l2" else set()
    assert names(norm.nodes) == {n.split("=")[0].split()[-1] for n in nodes.split(")") if "(" in n} - integers


@pytest.mark.parametrize(
    "nodes",
    [
        "l = ReduceL2(x, last) y = Mul(l, g)",  # a length that is read for itself
        "l = ReduceSum(x, last) y = Div(x, l)",  # shares of a sum: no square in it
        "q = Pow(x, two) l = ReduceSum(q, last) r = Sqrt(l) z = Neg(x) y = Div(z, r)",
    ],
)
def test_what_a_length_divides_otherwise_is_no_norm(nodes: str) -> None:
    assert structures(graph(f"{HEAD} {{ {nodes} }}", NORM_CONSTANTS, opset=18)).norms == ()


def test_a_scale_behind_a_norm_without_gain_is_no_gain() -> None:
    nodes = "s = Mul(x, x) m = ReduceMean(s, last) e = Add(m, eps) r = Sqrt(e) n = Div(x, r) y = Mul(n, root)"
    (norm,) = structures(graph(f"{HEAD} {{ {nodes} }}", NORM_CONSTANTS, opset=18)).norms
    assert norm.gain is None
    assert norm.output.name == "n"


# Rotary embeddings --------------------------------------------------------------------------------

INVERSE = (10000.0 ** (-np.arange(0, 32, 2) / 32)).astype(np.float32)
ROTARY_CONSTANTS: dict[str, Any] = {
    "inv": INVERSE, "inv_row": INVERSE[None], "base": np.float32(10000.0) * np.ones(16, np.float32),
    "powers": (np.arange(0, 32, 2) / 32).astype(np.float32), "one": 1.0, "i0": 0, "i1": 1,
    "s0": [0], "s1": [1], "s2": [2], "s16": [16], "s32": [32], "end": [2**63 - 1], "last": [-1], "two": [2],
    "third": [3], "axis2": [-2], "split16": [16, 16], "split32": [32, 32], "halves": [0, 0, 0, 2, 16],
    "pairs": [0, 0, 0, 16, 2], "flat32": [0, 0, 0, 32], "axes01": [0, 1],
    "cos_table": np.cos(np.outer(np.arange(128), INVERSE)).astype(np.float32),
    "sin_table": np.sin(np.outer(np.arange(128), INVERSE)).astype(np.float32),
    "cos_wide": np.cos(np.outer(np.arange(128), np.tile(INVERSE, 2))).astype(np.float32),
    "sin_wide": np.sin(np.outer(np.arange(128), np.tile(INVERSE, 2))).astype(np.float32),
    "swap": np.r_[16:32, 0:16].astype(np.int64),
    "sign": np.r_[-np.ones(16), np.ones(16)].astype(np.float32),
}  # fmt: skip

POSITIONS = "sh = Shape <start = 2, end = 3> (x) T = Squeeze(sh) r = Range(i0, T, i1) p = Cast <to = 1> (r)"
OUTER = 'f = Einsum <equation = "i , j -> i j"> (p, inv)'
WIDE = "w = Concat <axis = -1> (f, f)"
TRIG = "c = Cos(w) s = Sin(w)"
# The rotated channels a, the rest z, and the turned half t of a.
CUT = "a = Slice(x, s0, s32, third, s1) z = Slice(x, s32, end, third, s1)"
TURN = (
    "a1 = Slice(a, s0, s16, third) a2 = Slice(a, s16, s32, third) m = Neg(a2) t = Concat <axis = -1> (m, a1)"
)
ROTATE = "u = Mul(a, c) v = Mul(t, s) o = Add(u, v)"
JOIN = "y = Concat <axis = -1> (o, z)"

ROTARY_SPELLINGS: dict[str, str] = {
    "Einsum": f"{POSITIONS} {OUTER} {WIDE} {TRIG} {CUT} {TURN} {ROTATE} {JOIN}",
    "outer product by MatMul": f"{POSITIONS} q = Unsqueeze(p, s1) f = MatMul(q, inv_row)"
                               f"{WIDE} {TRIG} {CUT} {TURN} {ROTATE} {JOIN}",
    "outer product by Mul": f"{POSITIONS} q = Unsqueeze(p, s1) f = Mul(q, inv)"
                            f"{WIDE} {TRIG} {CUT} {TURN} {ROTATE} {JOIN}",
    "frequencies computed": f"{POSITIONS} n = Pow(base, powers) i = Reciprocal(n) q = Unsqueeze(p, s1)"
                            f"f = Mul(q, i) {WIDE} {TRIG} {CUT} {TURN} {ROTATE} {JOIN}",
    "operands swapped": f"{POSITIONS} {OUTER} {WIDE} {TRIG} {CUT} {TURN}"
                        f"u = Mul(c, a) v = Mul(s, t) o = Add(v, u) {JOIN}",
    "rest first": f"{POSITIONS} {OUTER} {WIDE} {TRIG} {CUT} {TURN} {ROTATE} y = Concat <axis = -1> (z, o)",
    "cut by Split": f"{POSITIONS} {OUTER} {WIDE} {TRIG} a, z = Split <axis = 3> (x, split32)"
                    f"a1, a2 = Split <axis = 3> (a, split16) m = Neg(a2) t = Concat <axis = -1> (m, a1)"
                    f"{ROTATE} {JOIN}",
    "halves cut from the whole": f"{POSITIONS} {OUTER} {WIDE} {TRIG} {CUT}"
                                 f"a1 = Slice(x, s0, s16, third) a2 = Slice(x, s16, s32, third) m = Neg(a2)"
                                 f"t = Concat <axis = -1> (m, a1) {ROTATE} {JOIN}",
    "halves by an axis of two": f"{POSITIONS} {OUTER} {WIDE} {TRIG} {CUT} b = Reshape(a, halves)"
                                f"b1 = Slice(b, s0, s1, axis2) a1 = Squeeze(b1, axis2)"
                                f"b2 = Slice(b, s1, s2, axis2) a2 = Squeeze(b2, axis2) m = Neg(a2)"
                                f"t = Concat <axis = -1> (m, a1) {ROTATE} {JOIN}",
    "turned by Gather": f"{POSITIONS} {OUTER} {WIDE} {TRIG} {CUT} g = Gather <axis = 3> (a, swap)"
                        f"t = Mul(g, sign) {ROTATE} {JOIN}",
    "cosine given dimensions": f"{POSITIONS} {OUTER} {WIDE} c0 = Cos(w) S = Sin(w)"
                               f"c = Unsqueeze(c0, axes01) s = Unsqueeze(S, axes01)"
                               f"{CUT} {TURN} {ROTATE} {JOIN}",
    "cosine scaled": f"{POSITIONS} {OUTER} {WIDE} c0 = Cos(w) S = Sin(w) c = Mul(c0, one) s = Mul(S, one)"
                     f"{CUT} {TURN} {ROTATE} {JOIN}",
    "widened after the cosine": f"{POSITIONS} {OUTER} c0 = Cos(f) c = Concat <axis = -1> (c0, c0)"
                                f"S = Sin(f) s = Concat <axis = -1> (S, S) {CUT} {TURN} {ROTATE} {JOIN}",
    "angle computed twice": f"{POSITIONS} {OUTER} {WIDE} w2 = Concat <axis = -1> (f, f) c = Cos(w)"
                            f"s = Sin(w2) {CUT} {TURN} {ROTATE} {JOIN}",
    "halves apart": f"{POSITIONS} {OUTER} c = Cos(f) s = Sin(f) {CUT} a1, a2 = Split <axis = 3> (a, split16)"
                    f"u1 = Mul(a1, c) v1 = Mul(a2, s) o1 = Sub(u1, v1)"
                    f"u2 = Mul(a2, c) v2 = Mul(a1, s) o2 = Add(u2, v2)"
                    f"o = Concat <axis = -1> (o1, o2) {JOIN}",
    "halves apart, negated": f"{POSITIONS} {OUTER} c = Cos(f) s = Sin(f) {CUT}"
                             f"a1, a2 = Split <axis = 3> (a, split16)"
                             f"m = Neg(a2) u1 = Mul(a1, c) v1 = Mul(m, s) o1 = Add(u1, v1)"
                             f"v2 = Mul(s, a1) u2 = Mul(c, a2) o2 = Add(v2, u2)"
                             f"o = Concat <axis = -1> (o1, o2) {JOIN}",
    "interleaved": f"{POSITIONS} {OUTER} c = Cos(f) s = Sin(f) {CUT}"
                   f"a1 = Slice(a, s0, end, third, s2) a2 = Slice(a, s1, end, third, s2)"
                   f"u1 = Mul(a1, c) v1 = Mul(a2, s) o1 = Sub(u1, v1)"
                   f"u2 = Mul(a2, c) v2 = Mul(a1, s) o2 = Add(u2, v2)"
                   f"k1 = Unsqueeze(o1, last) k2 = Unsqueeze(o2, last) k = Concat <axis = -1> (k1, k2)"
                   f"o = Reshape(k, flat32) {JOIN}",
    "interleaved, turned": f"{POSITIONS} {OUTER} {WIDE} {TRIG} {CUT} a1 = Slice(a, s0, end, third, s2)"
                           f"a2 = Slice(a, s1, end, third, s2) m = Neg(a2) k1 = Unsqueeze(m, last)"
                           f"k2 = Unsqueeze(a1, last) k = Concat <axis = -1> (k1, k2) t = Reshape(k, flat32)"
                           f"{ROTATE} {JOIN}",
    "complex": f"{POSITIONS} {OUTER} c0 = Cos(f) c1 = Unsqueeze(c0, last) s0_ = Sin(f)"
               f"s1_ = Unsqueeze(s0_, last) k = Concat <axis = -1> (c1, s1_) c = Slice(k, s0, s1, two)"
               f"s = Slice(k, s1, s2, two) {CUT} b = Reshape(a, pairs) four = Identity(last)"
               f"a1 = Slice(b, s0, s1, last) a2 = Slice(b, s1, s2, last)"
               f"u1 = Mul(a1, c) v1 = Mul(a2, s) v2 = Mul(a1, s) u2 = Mul(a2, c) o1 = Sub(u1, v1)"
               f"o2 = Add(v2, u2) d = Concat <axis = -1> (o1, o2) o = Reshape(d, flat32) {JOIN}",
    "tables": f"{POSITIONS} c = Slice(cos_wide, s0, sh, s0) s = Slice(sin_wide, s0, sh, s0)"
              f"{CUT} {TURN} {ROTATE} {JOIN}",
    "tables by position": f"{POSITIONS} c = Gather <axis = 0> (cos_wide, r)"
                          f"s = Gather <axis = 0> (sin_wide, r) {CUT} {TURN} {ROTATE} {JOIN}",
    "tables, halves apart": f"{POSITIONS} c = Slice(cos_table, s0, sh, s0) s = Slice(sin_table, s0, sh, s0)"
                            f"{CUT} a1, a2 = Split <axis = 3> (a, split16)"
                            f"u1 = Mul(a1, c) v1 = Mul(a2, s) o1 = Sub(u1, v1)"
                            f"u2 = Mul(a2, c) v2 = Mul(a1, s) o2 = Add(u2, v2)"
                            f"o = Concat <axis = -1> (o1, o2) {JOIN}",
}  # fmt: skip

ROTATED = "(float[1,2,T,64] x) => (float[1,2,T,64] y)"


# Complex numbers come from the dynamo exporter alone, which declares every type and shape.
ROTARY_CASES = [(s, typed) for s in ROTARY_SPELLINGS for typed in (True, False) if typed or s != "complex"]


@pytest.mark.parametrize(("spelling", "typed"), ROTARY_CASES)
def test_a_rotation_is_found_in_every_spelling(spelling: str, typed: bool) -> None:
    found = structures(graph(f"{ROTATED} {{ {ROTARY_SPELLINGS[spelling]} }}", ROTARY_CONSTANTS, typed=typed))
    (rotation,) = found.rotary
    assert (rotation.x.name, rotation.output.name) == ("x", "y")
    assert found.near_misses == ()
    assert found.fourier == ()
    if "tables" in spelling:
        assert rotation.trig == ()
        assert {t.name for t in rotation.tables} == (
            {"cos_table", "sin_table"} if "apart" in spelling else {"cos_wide", "sin_wide"}
        )
        assert rotation.angle is None
    else:
        assert [n.op_type for n in rotation.trig] == ["Cos", "Sin"]
        assert rotation.tables == ()
        chain = names(rotation.angle_nodes)
        assert {"p", "f"} <= chain
        assert not chain & {"sh", "T", "r"}, "shapes and indices carry no rounding"
        if spelling == "frequencies computed":
            assert {"n", "i"} <= chain
        # The outer product of positions and frequencies is part of the angle, and no linear.
        assert found.linears == ()
    # Every float node between x or the cosine and y is in the rotation: none of it may be fp16.
    text = ROTARY_SPELLINGS[spelling]
    cut = {"a", "z"} if "z = Slice" in text else {"a"}
    assert {*cut, "o", "y"} <= names(rotation.nodes)
    if "c0" in text:
        assert "c" in names(rotation.nodes)


def test_a_rotation_of_all_channels_has_no_rest() -> None:
    constants = {**ROTARY_CONSTANTS, "s16": [32], "s32": [64]}
    constants["inv"] = (10000.0 ** (-np.arange(0, 64, 2) / 64)).astype(np.float32)
    turn = TURN.replace("(a,", "(x,")
    body = f"{POSITIONS} {OUTER} {WIDE} {TRIG} {turn} u = Mul(x, c) v = Mul(t, s) y = Add(u, v)"
    (rotation,) = structures(graph(f"{ROTATED} {{ {body} }}", constants)).rotary
    assert (rotation.x.name, rotation.output.name) == ("x", "y")


def test_queries_and_keys_that_share_a_cosine_are_two_rotations() -> None:
    # The same nodes again, every value but the shared cosine and sine under a name of its own.
    own = re.compile(r"\b(a1|a2|a|z|m|t|u|v|o|x|y)\b")
    keys = own.sub(r"k\1", f"{CUT} {TURN} {ROTATE} {JOIN}")
    body = f"{POSITIONS} {OUTER} {WIDE} {TRIG} {CUT} {TURN} {ROTATE} {JOIN} {keys}"
    head = "(float[1,2,T,64] x, float[1,2,T,64] kx) => (float[1,2,T,64] y, float[1,2,T,64] ky)"
    found = structures(graph(f"{head} {{ {body} }}", ROTARY_CONSTANTS))
    assert [(r.x.name, r.output.name) for r in found.rotary] == [("x", "y"), ("kx", "ky")]
    assert found.counts()["rotary_trig_nodes"] == 2


@pytest.mark.parametrize("source", ["angle", "table"])
def test_the_composite_operator(source: str) -> None:
    trig = f"{OUTER} c0 = Cos(f) s0_ = Sin(f)" if source == "angle" else ""
    c, s = ("c0", "s0_") if source == "angle" else ("cos_table", "sin_table")
    body = (
        f"{POSITIONS} {trig} c1 = Slice({c}, s0, sh, s0) c = Unsqueeze(c1, s0)"
        f"s1_ = Slice({s}, s0, sh, s0) s = Unsqueeze(s1_, s0)"
        "y = RotaryEmbedding <rotary_embedding_dim = 32> (x, c, s)"
    )
    (rotation,) = structures(graph(f"{ROTATED} {{ {body} }}", ROTARY_CONSTANTS, opset=23, typed=False)).rotary
    assert (rotation.x.name, rotation.output.name) == ("x", "y")
    assert names(rotation.nodes) == {"c1", "c", "s1_", "s", "y"}
    assert [n.op_type for n in rotation.trig] == (["Cos", "Sin"] if source == "angle" else [])
    assert [t.name for t in rotation.tables] == ([] if source == "angle" else ["cos_table", "sin_table"])


def test_positions_may_be_a_graph_input() -> None:
    positions = "p = Cast <to = 1> (positions)"
    body = f"{positions} {OUTER} {WIDE} {TRIG} {CUT} {TURN} {ROTATE} {JOIN}"
    head = "(float[1,2,T,64] x, int64[T] positions) => (float[1,2,T,64] y)"
    found = structures(graph(f"{head} {{ {body} }}", ROTARY_CONSTANTS))
    assert len(found.rotary) == 1
    assert found.fourier == ()


def test_the_keys_angle_may_be_scaled_by_the_ratio_of_lengths() -> None:
    scaled = "n = Cast <to = 1> (T) k = Div(n, n) f = Mul(f0, k)"
    body = f"{POSITIONS} {OUTER.replace('f =', 'f0 =')} {scaled} {WIDE} {TRIG} {CUT} {TURN} {ROTATE} {JOIN}"
    (rotation,) = structures(graph(f"{ROTATED} {{ {body} }}", ROTARY_CONSTANTS)).rotary
    assert {"n", "k", "f", "f0", "p"} <= names(rotation.angle_nodes)


# Fourier features ---------------------------------------------------------------------------------

FREQUENCIES = np.geomspace(0.5, 10000, 128, dtype=np.float32)
FOURIER_CONSTANTS: dict[str, Any] = {
    "w": FREQUENCIES, "w_row": FREQUENCIES[None], "pi2": 6.2831855, "s1": [1], "last": [-1], "zero": 0.0,
    "longest": 384.0, "flat": [1, 256], "thousand": 1000.0,
}  # fmt: skip

FOURIER_SPELLINGS: dict[str, str] = {
    "Mul": "u = Unsqueeze(t, s1) a = Mul(u, w) b = Mul(a, pi2) c = Cos(b) s = Sin(b)"
           "y = Concat <axis = -1> (c, s)",
    "sine first": "u = Unsqueeze(t, s1) a = Mul(u, w) b = Mul(a, pi2) c = Cos(b) s = Sin(b)"
                  "y = Concat <axis = -1> (s, c)",
    "MatMul": "u = Unsqueeze(t, s1) b0 = Mul(pi2, u) b = MatMul(b0, w_row) c = Cos(b) s = Sin(b)"
              "y = Concat <axis = -1> (c, s)",
    "Einsum": 'a = Einsum <equation = "b,d->bd"> (t, w) b = Mul(a, pi2) c = Cos(b) s = Sin(b)'
              "y = Concat <axis = 1> (c, s)",
    "clipped and divided": "k = Clip(t, zero, longest) d = Div(k, longest) u = Unsqueeze(d, s1) a = Mul(u, w)"
                           "b = Mul(a, pi2) c = Cos(b) s = Sin(b) y = Concat <axis = -1> (c, s)",
    "interleaved": "u = Unsqueeze(t, s1) a = Mul(u, w) b = Mul(a, pi2) c = Cos(b) s = Sin(b)"
                   "c1 = Unsqueeze(c, last) s1_ = Unsqueeze(s, last) k = Concat <axis = -1> (c1, s1_)"
                   "y = Reshape(k, flat)",
    "angle computed twice": "u = Unsqueeze(t, s1) a = Mul(u, w) b = Mul(a, pi2) a2 = Mul(u, w)"
                            "b2 = Mul(a2, pi2) c = Cos(b) s = Sin(b2) y = Concat <axis = -1> (c, s)",
}  # fmt: skip


@pytest.mark.parametrize("typed", [True, False], ids=["typed", "untyped"])
@pytest.mark.parametrize("spelling", FOURIER_SPELLINGS)
def test_fourier_features_are_found_with_their_whole_path(spelling: str, typed: bool) -> None:
    body = FOURIER_SPELLINGS[spelling]
    found = structures(
        graph(f"(float[1] t) => (float[1,256] y) {{ {body} }}", FOURIER_CONSTANTS, typed=typed)
    )
    (features,) = found.fourier
    assert (features.cos.name, features.sin.name) == ("c", "s")
    before = body[: body.index("c = Cos")]
    assert names(features.angle_nodes) == {
        part.split("=")[0].split()[-1] for part in before.split(")") if "=" in part
    }, "the path reaches back to the graph input"
    assert found.linears == ()
    assert found.near_misses == ()


def test_integer_timesteps_make_fourier_features_too() -> None:
    body = (
        "f = Cast <to = 1> (t) u = Unsqueeze(f, s1) b = Mul(u, w) c = Cos(b) s = Sin(b)"
        "y = Concat <axis = -1> (s, c)"
    )
    found = structures(graph(f"(int64[1] t) => (float[1,256] y) {{ {body} }}", FOURIER_CONSTANTS))
    assert names(found.fourier[0].angle_nodes) == {"f", "u", "b"}


# Attention ----------------------------------------------------------------------------------------

ATTENTION_CONSTANTS: dict[str, Any] = {
    "scale": 0.125, "root": 8.0, "quarter": [64**-0.25], "zero": 0.0, "low": -1e4, "flat3": [-1, 16, 64],
    "up4": [1, 2, 64, 16], "minus_inf": np.float32(-np.inf), "axis2": [2], "many": [1, 2, 2, 16, 64],
    "back": [1, 4, 16, 64], "scores": [1, 2, 16, 16],
}  # fmt: skip
KT = "kt = Transpose <perm = [0, 1, 3, 2]> (k)"

ATTENTION_SPELLINGS: dict[str, tuple[str, str | None]] = {
    "scale behind, by Mul": (f"{KT} qk = MatMul(q, kt) sc = Mul(qk, scale) p = Softmax <axis = -1> (sc)"
                             "y = MatMul(p, v)", None),
    "scale behind, by Div": (f"{KT} qk = MatMul(q, kt) sc = Div(qk, root) p = Softmax <axis = -1> (sc)"
                             "y = MatMul(p, v)", None),
    "scale on q": (f"{KT} qs = Mul(q, scale) qk = MatMul(qs, kt) p = Softmax <axis = -1> (qk)"
                   "y = MatMul(p, v)", None),
    "scale on both": (f"{KT} qs = Mul(q, quarter) ks = Mul(kt, quarter) qk = MatMul(qs, ks)"
                      "p = Softmax <axis = -1> (qk) y = MatMul(p, v)", None),
    "scale from a shape": (f"{KT} sh = Shape <start = -1> (q) d = Cast <to = 1> (sh) r = Sqrt(d)"
                           "qk = MatMul(q, kt) sc = Div(qk, r) p = Softmax <axis = -1> (sc)"
                           "y = MatMul(p, v)", None),
    "positive axis": (f"{KT} qk = MatMul(q, kt) p = Softmax <axis = 3> (qk) y = MatMul(p, v)", None),
    "no scale": (f"{KT} qk = MatMul(q, kt) p = Softmax(qk) y = MatMul(p, v)", None),
    "markers": (f"{KT} qk = MatMul(q, kt) sc = Mul(qk, scale) c1 = Cast <to = 1> (sc)"
                "p = Softmax <axis = -1> (c1) c2 = Cast <to = 1> (p) y = MatMul(c2, v)", None),
    "additive mask": (f"{KT} qk = MatMul(q, kt) sc = Mul(qk, scale) am = Add(sc, bias)"
                      "p = Softmax <axis = -1> (am) y = MatMul(p, v)", "bias"),
    "additive mask first": (f"{KT} qk = MatMul(q, kt) sc = Mul(qk, scale) am = Add(bias, sc)"
                            "p = Softmax <axis = -1> (am) y = MatMul(p, v)", "bias"),
    "boolean mask": (f"{KT} qk = MatMul(q, kt) sc = Mul(qk, scale) am = Where(mask, sc, low)"
                     "p = Softmax <axis = -1> (am) y = MatMul(p, v)", "mask"),
    "boolean mask, inverted": (f"{KT} qk = MatMul(q, kt) sc = Mul(qk, scale) no = Not(mask)"
                               "am = Where(no, minus_inf, sc) p = Softmax <axis = -1> (am)"
                               "y = MatMul(p, v)", "no"),
    "products by Einsum": ('qk = Einsum <equation = "bhid,bhjd->bhij"> (q, k) sc = Mul(qk, scale)'
                           "p = Softmax <axis = -1> (sc)"
                           'y = Einsum <equation = "b h i j, b h j d -> b h i d"> (p, v)', None),
    "scores unfolded from the batch": ("qf = Reshape(q, flat3) kf = Reshape(k, flat3)"
                                       "kt = Transpose <perm = [0, 2, 1]> (kf) qk = MatMul(qf, kt)"
                                       "u = Reshape(qk, scores) p = Softmax <axis = -1> (u)"
                                       "y = MatMul(p, v)", None),
    "guard against empty rows": (f"{KT} qk = MatMul(q, kt) am = Add(qk, bias) p0 = Softmax <axis = -1> (am)"
                                 "e = IsNaN(p0) p = Where(e, zero, p0) y = MatMul(p, v)", "bias"),
    "keys turned in three dimensions": ("kf = Reshape(k, flat3) kr = Transpose <perm = [0, 2, 1]> (kf)"
                                        "kt = Reshape(kr, up4) ks = Mul(kt, quarter) qs = Mul(q, quarter)"
                                        "qk = MatMul(qs, ks) p = Softmax <axis = -1> (qk)"
                                        "y = MatMul(p, v)", None),
}  # fmt: skip
CORE = "(float[1,2,16,64] q, float[1,2,16,64] k, float[1,2,16,64] v, bool[1,1,1,16] mask, float[1,1,1,16] bias) => (float[1,2,16,64] y)"  # noqa: E501


@pytest.mark.parametrize("typed", [True, False], ids=["typed", "untyped"])
@pytest.mark.parametrize("spelling", ATTENTION_SPELLINGS)
def test_an_attention_core_is_found_in_every_spelling(spelling: str, typed: bool) -> None:
    body, mask = ATTENTION_SPELLINGS[spelling]
    found = structures(graph(f"{CORE} {{ {body} }}", ATTENTION_CONSTANTS, typed=typed))
    (core,) = found.attention
    folded = {"q": "qf", "k": "kf"} if "unfolded" in spelling else {}
    assert (core.q.name, core.k.name) == (folded.get("q", "q"), folded.get("k", "k"))
    assert (core.v.name, core.output.name) == ("v", "y")
    assert (None if core.mask is None else core.mask.name) == mask
    assert core.name == "y"
    assert {"qk", "y"} <= names(core.nodes)
    assert core.softmax.op_type == "Softmax"
    assert found.linears == ()
    assert found.near_misses == ()


def test_grouped_keys_and_values_are_repeated_before_the_core() -> None:
    repeat = "{0}1 = Unsqueeze({0}0, axis2) {0}2 = Expand({0}1, many) {0} = Reshape({0}2, back)"
    body = (
        f"{repeat.format('k')} {repeat.format('v')} {KT} qk = MatMul(q, kt) sc = Mul(qk, scale)"
        "p = Softmax <axis = -1> (sc) y = MatMul(p, v)"
    )
    head = "(float[1,4,16,64] q, float[1,2,16,64] k0, float[1,2,16,64] v0) => (float[1,4,16,64] y)"
    (core,) = structures(graph(f"{head} {{ {body} }}", ATTENTION_CONSTANTS)).attention
    assert (core.q.name, core.k.name, core.v.name) == ("q", "k", "v")


def test_attention_over_a_folded_batch() -> None:
    body = (
        "kt = Transpose <perm = [0, 2, 1]> (k) qk = MatMul(q, kt) p = Softmax <axis = 2> (qk)y = MatMul(p, v)"
    )
    head = "(float[B,16,64] q, float[B,16,64] k, float[B,16,64] v) => (float[B,16,64] y)"
    (core,) = structures(graph(f"{head} {{ {body} }}", ATTENTION_CONSTANTS)).attention
    assert (core.q.name, core.k.name) == ("q", "k")


def test_probabilities_may_be_folded_into_the_batch() -> None:
    body = (
        f"{KT} qk = MatMul(q, kt) p = Softmax(qk) f = Reshape(p, batched) vf = Reshape(v, flat3)"
        "y = MatMul(f, vf)"
    )
    constants = {"flat3": [-1, 16, 64], "batched": [2, 16, 16]}
    head = "(float[1,2,16,64] q, float[1,2,16,64] k, float[1,2,16,64] v) => (float[2,16,64] y)"
    (core,) = structures(graph(f"{head} {{ {body} }}", constants)).attention
    assert (core.q.name, core.k.name, core.v.name) == ("q", "k", "vf")


def test_keys_may_arrive_turned() -> None:
    """One Transpose may bring (B, T, H, D) to (B, H, D, T)."""
    body = "kt = Transpose <perm = [0, 2, 3, 1]> (k) qk = MatMul(q, kt) p = Softmax(qk) y = MatMul(p, v)"
    head = "(float[1,2,16,64] q, float[1,16,2,64] k, float[1,2,16,64] v) => (float[1,2,16,64] y)"
    (core,) = structures(graph(f"{head} {{ {body} }}", ATTENTION_CONSTANTS)).attention
    assert (core.q.name, core.k.name) == ("q", "kt")


@pytest.mark.parametrize("mask", ["mask", "bias"])
def test_the_composite_attention_and_its_decomposition(mask: str) -> None:
    model = graph(f"{CORE} {{ y = Attention(q, k, v, {mask}) }}", opset=23, typed=False)
    (core,) = structures(model).attention
    assert (core.q.name, core.k.name, core.v.name) == ("q", "k", "v")
    assert core.mask is not None


@pytest.mark.parametrize(
    ("head", "call", "reason"),
    [
        (
            "(float[1,16,128] q, float[1,16,128] k, float[1,16,128] v) => (float[1,16,128] y)",
            "y = Attention <q_num_heads = 2, kv_num_heads = 2> (q, k, v)",
            "Attention with packed heads cannot be decomposed",
        ),
        (
            "(float[1,4,16,64] q, float[1,2,16,64] k, float[1,2,16,64] v) => (float[1,4,16,64] y)",
            "y = Attention(q, k, v)",
            "Attention with 4 query heads over 2 key heads cannot be decomposed",
        ),
        (
            "(float[1,2,16,64] q, float[1,2,16,64] k, float[1,2,16,64] v) => (float[1,2,16,64] y)",
            "y = Attention <is_causal = 1, softcap = 2.0> (q, k, v)",
            "Attention with a causal mask and softcap cannot be decomposed",
        ),
    ],
)
def test_what_cannot_be_decomposed_is_refused_with_its_reason(head: str, call: str, reason: str) -> None:
    from engine_builder.graph.passes.decompose_attention import DecomposeAttentionPass

    model = ir.from_proto(graph(f"{head} {{ {call} }}", opset=23))
    with pytest.raises(ir.passes.PassError) as caught:
        ir.passes.Sequential(DecomposeAttentionPass())(model)
    assert isinstance(caught.value.__cause__, ConversionError)
    assert caught.value.__cause__.message == reason
    assert caught.value.__cause__.where == "node y"


# Linears ------------------------------------------------------------------------------------------

WEIGHT = np.zeros((64, 192), np.float32)


@pytest.mark.parametrize(
    ("nodes", "side", "axis_out"),
    [
        ("y = MatMul(x, w)", 1, 1),
        ("m = MatMul(x, w) y = Add(m, b)", 1, 1),
        ("m = MatMul(x, w) y = Add(b, m)", 1, 1),
        ("t = Transpose <perm = [1, 0]> (wt) y = MatMul(x, t)", 1, 0),
        ("i = Identity(w) y = MatMul(x, i)", 1, 1),
        ("y = Gemm(x, w, b)", 1, 1),
        ("y = Gemm <transB = 1> (x, wt, b)", 1, 0),
        ("t = Transpose(wt) u = Transpose(t) y = Gemm <transB = 1> (x, u)", 1, 0),
        ("z = Transpose(x) m = MatMul(wt, z) y = Transpose(m)", 0, 0),
        ("z = Transpose(x) m = Gemm <transA = 1> (w, z) y = Transpose(m)", 0, 1),
    ],
)
def test_a_linear_is_found_in_every_spelling(nodes: str, side: int, axis_out: int) -> None:
    constants = {"w": WEIGHT, "wt": WEIGHT.T.copy(), "b": np.zeros(192, np.float32)}
    constants = {k: v for k, v in constants.items() if f"{k}," in nodes or f"{k})" in nodes}
    found = structures(graph(f"(float[5,64] x) => (float[5,192] y) {{ {nodes} }}", constants))
    (linear,) = found.linears
    assert (linear.in_features, linear.out_features) == (64, 192)
    assert (linear.weight_input, linear.weight_axis_out) == (side, axis_out)
    assert linear.weight.name in ("w", "wt")
    assert found.near_misses == ()


# Near misses --------------------------------------------------------------------------------------


def miss(body: str, *, head: str = HEAD, constants: Mapping[str, Any] | None = None, opset: int = 18) -> str:
    found = structures(graph(f"{head} {{ {body} }}", constants or NORM_CONSTANTS, opset=opset))
    return "; ".join(f"{m.structure} {m.node}: {m.reason}" for m in found.near_misses)


MEAN = "s = Pow(x, two) m = ReduceMean(s, last)"
NORM_MISSES = [
    (f"{MEAN} r = Sqrt(m) y = Div(x, r)", "norm m: no epsilon is added to the mean of squares"),
    (f"{MEAN} e = Add(m, x) y = Sqrt(e)", "norm m: the epsilon added at e is not a constant scalar"),
    (f"{MEAN} e = Add(m, eps) y = Mul(x, e)", "norm m: no square root follows e"),
    (f"{MEAN} e = Add(m, eps) i = Pow(e, two) y = Mul(x, i)", "norm m: i raises to a power that is not -0.5"),
    (f"{MEAN} e = Add(m, eps) r = Sqrt(e) y = Mul(x, r)", "norm m: r is neither inverted nor divides the squared value"),  # noqa: E501
    (f"{MEAN} e = Add(m, eps) r = Sqrt(e) i = Reciprocal(r) z = Neg(x) y = Mul(z, i)", "norm m: nothing multiplies the squared value by i"),  # noqa: E501
    ("s = Pow(x, two) m = ReduceMean(s) e = Add(m, eps) r = Sqrt(e) y = Div(x, r)", "norm m: the mean of squares runs over every axis"),  # noqa: E501
    ("s = Pow(x, two) m = ReduceMean <keepdims = 0> (s, last) k = Unsqueeze(m, last) e = Add(k, eps) r = Sqrt(e) y = Div(x, r)", "norm m: the mean of squares does not keep its reduced dimension"),  # noqa: E501
]  # fmt: skip


@pytest.mark.parametrize(("body", "expected"), NORM_MISSES)
def test_a_norm_that_is_none_says_why(body: str, expected: str) -> None:
    assert miss(body) == expected


ROTARY_MISSES = [
    (f"{POSITIONS} {OUTER} {WIDE} c = Cos(w) {CUT} o = Mul(a, c) {JOIN}",
     "angle c: no sine is taken of its angle w"),
    (f"{POSITIONS} {OUTER} {WIDE} s = Sin(w) {CUT} o = Mul(a, s) {JOIN}",
     "angle s: no cosine is taken of its angle w"),
    (f"{POSITIONS} {OUTER} {WIDE} {TRIG} {CUT} u = Mul(a, c) v = Mul(z, s) k = Relu(v) o = Add(u, k) {JOIN}",
     "rotary embedding u: it is not added to a product with the sine of w; "
     "rotary embedding v: it is not added to a product with the cosine of w"),
    (f"{POSITIONS} {OUTER} {WIDE} {TRIG} {CUT} t = Relu(a) {ROTATE} {JOIN}",
     "rotary embedding u: the half that the sine multiplies comes from Relu t, not from a turned a; "
     "rotary embedding v: it is not added to a product with the cosine of w"),
    (f"{POSITIONS} {OUTER} {WIDE} {TRIG} {CUT} u = Mul(a, c) v = Mul(a, s) o = Add(u, v) {JOIN}",
     "rotary embedding u: the half that the sine multiplies is not turned; "
     "rotary embedding v: it is not added to a product with the cosine of w"),
    (f"{POSITIONS} {OUTER} {WIDE} {TRIG} d = Add(c, s) {CUT} o = Mul(a, d) {JOIN}",
     "rotary embedding c: its value takes part in no rotation; "
     "rotary embedding s: its value takes part in no rotation"),
    (f"{POSITIONS} {OUTER} c = Cos(f) s = Sin(f) {CUT} a1, a2 = Split <axis = 3> (a, split16)"
     "u1 = Mul(a1, c) v1 = Mul(a2, s) o1 = Add(u1, v1) u2 = Mul(a2, c) v2 = Mul(a1, s) o2 = Add(u2, v2)"
     f"o = Concat <axis = -1> (o1, o2) {JOIN}",
     "rotary embedding o2: neither o1 nor o2 subtracts, or both do; "
     "rotary embedding u1: it is not added to a product with the sine of f; "
     "rotary embedding v1: it is not added to a product with the cosine of f"),
]  # fmt: skip


@pytest.mark.parametrize(("body", "expected"), ROTARY_MISSES)
def test_trigonometry_that_rotates_nothing_says_why(body: str, expected: str) -> None:
    assert miss(body, head=ROTATED, constants=ROTARY_CONSTANTS, opset=17) == expected


ATTENTION_MISSES = [
    (f"{KT} qk = MatMul(q, kt) p = Softmax <axis = 2> (qk) y = MatMul(p, v)",
     "attention core p: the softmax runs over axis 2, not over the keys"),
    (f"{KT} qk = MatMul(q, kt) t = Tanh(qk) p = Softmax(t) y = MatMul(p, v)",
     "attention core p: the scores pass through Tanh t, which TensorRT does not fuse"),
    (f"{KT} qk = MatMul(q, kt) sc = Mul(qk, bias) p = Softmax(sc) y = MatMul(p, v)",
     "attention core p: sc multiplies the scores by something that is not a scale"),
    ("r = Relu(bias) p = Softmax(r) y0 = Mul(p, v_) y = Add(y0, q)",
     "attention core p: the softmax reads Relu r, not a product of queries and keys"),
    ("p = Softmax(bias) y0 = Mul(p, v_) y = Add(y0, q)",
     "attention core p: the softmax reads a graph input or constant"),
    (f"{KT} qk = MatMul(q, kt) p = Softmax(qk) m = MatMul(p, v) n = MatMul(p, q) y = Add(m, n)",
     "attention core p: its probabilities are not read by one product with the values alone"),
    (f"{KT} qk = MatMul(q, kt) p = Softmax(qk) y = MatMul(kt, p) z = Neg(y)",
     "attention core p: the probabilities are the right operand of y"),
    ("qk = MatMul(q, weight) p = Softmax(qk) y = MatMul(p, v)",
     "attention core p: qk multiplies by a constant: a linear layer, not queries and keys"),
    ('qk = Einsum <equation = "bhid,bhjd->bhji"> (q, k) p = Softmax(qk) y = MatMul(p, v)',
     "attention core p: the softmax reads Einsum qk, not a product of queries and keys"),
]  # fmt: skip


@pytest.mark.parametrize(("body", "expected"), ATTENTION_MISSES)
def test_a_softmax_that_attends_to_nothing_says_why(body: str, expected: str) -> None:
    constants: dict[str, Array] = {
        "v_": np.zeros((1, 2, 16, 64), np.float32)[..., :16].copy(),
        "weight": np.zeros((64, 16), np.float32),
    }
    head = CORE if "y0" not in body and "(kt, p)" not in body else CORE.replace("64] y)", "16] y)")
    if "(kt, p)" in body:
        head = CORE.replace("float[1,2,16,64] y)", "float[1,2,64,16] z)")
    if "y0" in body:
        head = head.replace("float[1,2,16,64] q", "float[1,2,16,16] q")
    used = {k: v for k, v in constants.items() if k in body}
    assert miss(body, head=head, constants=used or {"unused": 0.0}, opset=17) == expected


def test_probabilities_that_leave_the_graph_are_not_fused() -> None:
    head = CORE.replace("y)", "y, float[1,2,16,16] p)")
    body = f"{KT} qk = MatMul(q, kt) p = Softmax(qk) y = MatMul(p, v)"
    expected = "attention core p: its probabilities are the graph output p"
    assert miss(body, head=head, constants={"unused": 0.0}) == expected


@pytest.mark.parametrize(
    ("body", "expected"),
    [
        ("y = Gemm(x, z)", "linear y: neither operand is a constant matrix"),
        ("y0 = MatMul(one_, two_) y = Add(y0, x)", "linear y0: both operands are constant"),
    ],
)
def test_a_product_that_is_no_linear_says_why(body: str, expected: str) -> None:
    constants = {"one_": np.zeros((4, 4), np.float32), "two_": np.zeros((4, 4), np.float32)}
    used = {k: v for k, v in constants.items() if k in body}
    head = "(float[4,4] x, float[4,4] z) => (float[4,4] y)"
    assert miss(body, head=head, constants=used or {"unused": 0.0}) == expected


# What a DiT must have -----------------------------------------------------------------------------


def test_a_graph_without_the_structures_of_a_dit_is_refused_with_reasons() -> None:
    found = structures(graph(f"{HEAD} {{ {NORM_MISSES[0][0]} }}", NORM_CONSTANTS, opset=18))
    with pytest.raises(ConversionError) as caught:
        require_dit(found)
    error = caught.value
    assert error.exit_code == 5
    assert error.message == (
        "the graph has no RMSNorm, no rotary embedding, no Fourier features, no attention core, no linear, "
        "which an SA3 DiT must have; nearest: m: no epsilon is added to the mean of squares"
    )
    assert error.hint == "for another kind of model set model.kind: generic"


def test_a_graph_in_which_nothing_came_near_says_so() -> None:
    found = find_structures(ir.from_proto(graph("(float[4] x) => (float[4] y) { y = Relu(x) }")))
    with pytest.raises(ConversionError, match="must have; nothing came near"):
        require_dit(found)


def test_only_what_is_absent_is_named() -> None:
    found = find_structures(ir.load(sample(Spelling.DYNAMO20, False)))
    without = type(found)(found.norms, (), found.fourier, found.attention, found.linears, ())
    with pytest.raises(ConversionError, match=r"^the graph has no rotary embedding, which an SA3 DiT"):
        require_dit(without)


def test_many_near_misses_are_counted_not_listed() -> None:
    bodies = [NORM_MISSES[0][0].replace("y =", f"y{i} =") for i in range(6)]
    renamed = [
        body.replace("s =", f"s{i} =").replace("m =", f"m{i} =").replace("r =", f"r{i} =")
        .replace("(s,", f"(s{i},").replace("(m)", f"(m{i})").replace(", r)", f", r{i})")
        for i, body in enumerate(bodies)
    ]  # fmt: skip
    outputs = ", ".join(f"float[1,T,64] y{i}" for i in range(6))
    found = structures(
        graph(f"(float[1,T,64] x) => ({outputs}) {{ {' '.join(renamed)} }}", NORM_CONSTANTS, opset=18)
    )
    assert len(found.near_misses) == 6
    with pytest.raises(ConversionError) as caught:
        require_dit(found)
    told = [f"m{i}: no epsilon is added to the mean of squares" for i in range(4)]
    assert caught.value.message.endswith(
        "; ".join(("; nearest: " + told[0], *told[1:], "and 2 more near misses"))
    )
