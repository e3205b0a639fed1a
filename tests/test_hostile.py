"""A part of the hostile files, met by the command line; and fuzzing of the scales and layer parsers."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

from engine_builder.errors import SourceModelError
from engine_builder.graph.shapes import _grown_size
from engine_builder.quantize.scales import Scales, load_scales
from tests.hostile import CASES, SCALES, Case, meet
from verify.layers import EngineLayers, NotDetailed, parse_build_log, parse_inspector_json

# A process each, so that only some run here; `make hostile` runs all of them.  Those of which a wrong answer
# would be worst are chosen by name, the others by taking every sixteenth.
CHOSEN = {
    "recipe: a tag that runs a program",
    "recipe: a billion laughs",
    "recipe: a name that leaves the output",
    "recipe: a plugin without leave",
    "model file: weights above the folder",
    "model file: weights by a link out of the folder",
    "model graph: a constant of 10^13 elements",
    "scales: infinity",
    "layers: 100,000 brackets deep",
}


def some() -> list[Case]:
    return [case for index, case in enumerate(CASES) if str(case) in CHOSEN or index % 16 == 4]


def test_there_are_enough_cases_and_each_has_its_name() -> None:
    names = [str(case) for case in CASES]
    assert len(set(names)) == len(names) >= 60
    assert set(names) >= CHOSEN


@pytest.mark.parametrize("case", some(), ids=str)
def test_a_hostile_file_does_no_harm(case: Case, tmp_path: Path) -> None:
    cost = meet(case, tmp_path)
    assert cost.harm == (), cost


_JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=6), inner, max_size=4),
    max_leaves=10,
)


def check_told(error: Exception) -> str:
    """An error's text, which must be one line that a terminal may be shown."""
    told = str(error)
    assert told.isprintable()
    assert len(told) < 2_000
    return told


def scales_or_fault(path: Path) -> Scales | str:
    try:
        return load_scales(path)
    except SourceModelError as error:
        return check_told(error)


@settings(max_examples=150, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.binary(max_size=60) | _JSON.map(lambda value: json.dumps(value).encode()))
@example(b"\xef\xbb\xbf{}")
@example(b'{"schema": "\\ud800"}')
def test_any_bytes_are_scales_or_a_source_error(tmp_path: Path, data: bytes) -> None:
    (tmp_path / "s.json").write_bytes(data)
    assert isinstance(scales_or_fault(tmp_path / "s.json"), str)


@settings(max_examples=150, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.sampled_from(sorted(SCALES)), _JSON)
@example("linears", {"\ud800": {"activation_amax": 1.0, "weight_amax": 1.0}})
@example("linears", {"/a": {"activation_amax": 10**400, "weight_amax": 1.0}})
@example("samples", [{"name": "a\n\x1b[2J", "length": 10**400, "t": 1e400}])
def test_any_value_of_a_section_is_scales_or_a_source_error(tmp_path: Path, key: str, value: Any) -> None:
    (tmp_path / "s.json").write_text(json.dumps({**SCALES, key: value}))
    result = scales_or_fault(tmp_path / "s.json")
    if isinstance(result, Scales):
        for linear in result.linears.values():
            assert 0 < linear.activation_amax < float("inf")


_LINE = st.text(alphabet='Name: ab,[]{}()LayrTpIntOu1x0\x1e\x1f\n\\"é\x00', max_size=200)


def layers_or_fault(parse: Any, text: str) -> None:
    try:
        assert isinstance(parse(text), EngineLayers)
    except (SourceModelError, NotDetailed) as error:
        check_told(error)


@settings(max_examples=150, deadline=None)
@given(_LINE)
@example("")
@example("\ud800")
def test_any_text_is_a_build_log_or_an_expected_error(text: str) -> None:
    layers_or_fault(parse_build_log, text)
    layers_or_fault(parse_build_log, f"Layers:\n{text}")


_LAYER = st.fixed_dictionaries(
    {},
    optional=dict.fromkeys(
        ("Name", "LayerType", "Inputs", "Outputs", "Metadata", "TacticName", "StreamId"), _JSON
    ),
)


@settings(max_examples=200, deadline=None)
@given(st.lists(_LAYER | _JSON, max_size=3), _JSON)
@example([{"Name": "a", "LayerType": "b", "Inputs": [{"Name": 1, "Dimensions": [None]}], "Outputs": []}], [])
@example([{"Name": "a", "LayerType": "b", "Inputs": [], "Outputs": [], "Metadata": ["x"]}], [{"Name": []}])
def test_any_json_is_layers_or_an_expected_error(layers: list[Any], bindings: Any) -> None:
    for key in ("Bindings", "I/O Tensors"):
        layers_or_fault(parse_inspector_json, json.dumps({"Layers": layers, key: bindings}))


@settings(max_examples=100, deadline=None)
@given(_JSON)
def test_any_json_document_is_layers_or_an_expected_error(document: Any) -> None:
    layers_or_fault(parse_inspector_json, json.dumps(document))


def test_a_computed_tensor_is_bounded_by_what_comes_of_it() -> None:
    """An expansion of a tensor to its own shape makes nothing; 4,160 rows of positions are no bomb."""
    rows = np.zeros((1, 4160, 1))
    assert _grown_size("Expand", [rows, np.array([1, 4160, 1])]) == 4160
    assert _grown_size("Expand", [rows, np.array([2, 1, 32])]) == 2 * 4160 * 32
    assert _grown_size("Range", [np.array(0), np.array(10**12), np.array(1)]) == 1e12
    assert _grown_size("Range", [np.array(0.0), np.array(4160.0), np.array(0.5)]) == 8320
    assert _grown_size("Tile", [rows, np.array([1, 10**6, 10**6])]) == 4160e12
    assert _grown_size("Pad", [rows, np.array([0, 10**12, 0, 0, 0, 0])]) == 4160 + 1e12
    assert _grown_size("Add", [rows, rows]) == 0
