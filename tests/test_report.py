"""The report's verdict, its schema and its differences; the schemas of all files."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import yaml
from jsonschema import Draft202012Validator

from benchmarks.workshop import Workshop, judge_graph
from engine_builder.errors import SourceModelError
from tests.conftest import REPOSITORY
from verify.identity import Check, Failure, Status
from verify.report import differences, load_report, read_report, verdict_of
from verify.schemas import SCHEMAS, SchemaName

BROKEN = Failure("n", "it is wrong", ("n",), ())
PASSED = Check("a", Status.PASSED, 2, 2)
FAILED = Check("b", Status.FAILED, 3, 1, (BROKEN, BROKEN))
UNKNOWN = Check("c", Status.NOT_VERIFIABLE, 1, 0, note="no evidence")
ABSENT = Check("d", Status.NOT_APPLICABLE, 0, 0)


@pytest.mark.parametrize(
    ("checks", "verdict"),
    [
        ([PASSED], "passed"),
        ([PASSED, ABSENT], "passed"),
        ([PASSED, UNKNOWN], "not verifiable"),
        ([PASSED, UNKNOWN, FAILED], "failed"),
        ([ABSENT], "not verifiable"),
        ([], "not verifiable"),
    ],
)
def test_the_verdict_follows_from_the_checks(checks: list[Check], verdict: str) -> None:
    assert verdict_of(checks)[0] == verdict


def test_each_check_in_the_way_has_one_reason() -> None:
    _, reasons = verdict_of([PASSED, FAILED, UNKNOWN])
    assert reasons == (
        "b: 1 of 3 kept; n: it is wrong, and 1 more",
        "c: not verifiable: no evidence",
    )
    located = Check("fidelity", Status.FAILED, 1, 0, (BROKEN,), note="the first node to differ: Add m")
    assert verdict_of([located])[1] == (
        "fidelity: 0 of 1 kept; n: it is wrong; the first node to differ: Add m",
    )


def test_differences_are_told_leaf_by_leaf_and_by_name() -> None:
    a = {"n": 1, "same": [1], "checks": [{"name": "x", "kept": 2}, {"name": "y", "kept": 1}], "gone": None}
    b = {"n": 2, "same": [1], "checks": [{"name": "y", "kept": 1}, {"name": "x", "kept": 0}], "new": [3]}
    assert differences(a, b) == [("n", 1, 2), ("checks.x.kept", 2, 0), ("new", None, [3])]
    assert differences(a, a) == []


def test_lists_that_grow_or_lose_a_named_entry() -> None:
    one = {"failures": [{"subject": "p", "reason": "r"}]}
    assert differences({"failures": []}, one) == [("failures.p", None, {"subject": "p", "reason": "r"})]
    assert differences(one, {"failures": []}) == [("failures.p", {"subject": "p", "reason": "r"}, None)]
    # Entries that share a name cannot be told apart by it.
    twice = {"failures": [one["failures"][0], one["failures"][0]]}
    assert differences(one, twice) == [("failures", one["failures"], twice["failures"])]


def test_a_report_reads_back_and_is_the_same_text(workshop: Workshop, tmp_path: Path) -> None:
    good = workshop.convert("fp16")
    report = judge_graph(good.path, good, None)
    path = tmp_path / "r.verify.json"
    path.write_text(report.to_json())
    assert load_report(path) == read_report(path) == report
    assert load_report(path).to_json() == report.to_json()


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "Invalid JSON: EOF while parsing"),
        ('{"schema": "sa3-builder/verify/1"', "Invalid JSON: EOF while parsing"),
        ("[]", "Input should be an object"),
        ('{"schema": "sa3-builder/verify/9"}', "schema: Input should be 'sa3-builder/verify/1'"),
        ('{"schema": "sa3-builder/verify/1"}', "verdict: Field required"),
        (b"\xff\xfe", "invalid start byte"),
    ],
)
def test_a_file_that_is_no_report_is_refused_in_one_line(
    tmp_path: Path, text: str | bytes, message: str
) -> None:
    path = tmp_path / "r.verify.json"
    path.write_bytes(text.encode() if isinstance(text, str) else text)
    with pytest.raises(SourceModelError) as caught:
        load_report(path)
    assert message in caught.value.message
    assert caught.value.where == str(path)
    assert "\n" not in str(caught.value)


def test_a_report_that_is_not_there_is_a_source_error(tmp_path: Path) -> None:
    with pytest.raises(SourceModelError, match="No such file"):
        load_report(tmp_path / "none.json")


@pytest.mark.parametrize("name", SchemaName)
def test_every_schema_is_one(name: SchemaName) -> None:
    schema = SCHEMAS[name]()
    Draft202012Validator.check_schema(schema)
    assert schema["$schema"] == "https://json-schema.org/draft/2020-12/schema"


def valid(name: SchemaName, value: Any) -> None:
    Draft202012Validator(SCHEMAS[name]()).validate(value)


def test_real_files_follow_their_schemas(workshop: Workshop) -> None:
    good = workshop.convert("fp8")
    valid(SchemaName.VERIFY, json.loads(judge_graph(good.path, good, None).to_json()))
    valid(SchemaName.SCALES, json.loads(workshop.scales.read_text()))
    recipes = sorted((REPOSITORY / "recipes").glob("*.yaml"))
    assert recipes
    for recipe in recipes:
        valid(SchemaName.RECIPE, yaml.safe_load(recipe.read_text()))


def test_a_report_with_a_key_too_many_or_too_few_does_not(workshop: Workshop) -> None:
    good = workshop.convert("fp16")
    report = json.loads(judge_graph(good.path, good, None).to_json())
    schema = Draft202012Validator(SCHEMAS[SchemaName.VERIFY]())
    assert schema.is_valid(report)
    assert not schema.is_valid({**report, "extra": 1})
    assert not schema.is_valid({key: value for key, value in report.items() if key != "verdict"})
    assert not schema.is_valid({**report, "verdict": "maybe"})
