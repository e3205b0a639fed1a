"""Recipes: what is accepted, and that every fault is one line with file, line and key."""

# ruff: noqa: E501 - the tables of faults read best with one fault a line

from __future__ import annotations

import json
import os
import re
import time
from collections.abc import Callable
from pathlib import Path

import jsonschema
import pytest
import yaml
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from engine_builder.errors import RecipeError
from engine_builder.recipe import (
    CountBound,
    Profile,
    Recipe,
    ShapeRange,
    load_recipe,
    recipe_schema,
    resolve_profiles,
)
from engine_builder.source import TensorSpec

GOOD = """\
schema: sa3-builder/1
model:
  name: sa3-sm-music
  onnx: models/dit.onnx
precision: fp16
profiles:
  - x:              [[1, 256, 1], [1, 256, 1292], [1, 256, 4096]]
    local_add_cond: [[1, 257, 1], [1, 257, 1292], [1, 257, 4096]]
target: {backend: tensorrt_rtx, sm: 89}
build: {workspace_gb: 16}
verify:
  fidelity: {lengths: [64, 1292, 4092], t: [1.0, 0.5, 0.02], min_cosine: 0.9999}
output: {dir: out}
"""

INPUTS = (
    TensorSpec("x", "float32", (1, 256, "L")),
    TensorSpec("t", "float32", (1,)),
    TensorSpec("t5_hidden", "float32", (1, 256, 768)),
    TensorSpec("t5_mask", "float32", (1, 256)),
    TensorSpec("seconds_total", "float32", (1,)),
    TensorSpec("local_add_cond", "float32", (1, 257, "L")),
)


def write(folder: Path, text: str | bytes) -> Path:
    path = folder / "r.yaml"
    path.write_bytes(text.encode() if isinstance(text, str) else text)
    return path


def load(folder: Path, *changes: tuple[str, str]) -> Recipe:
    text = GOOD
    for old, new in changes:
        assert old in text
        text = text.replace(old, new)
    return load_recipe(write(folder, text))


def outcome(path: Path) -> Recipe | RecipeError:
    try:
        return load_recipe(path)
    except RecipeError as error:
        return error


def fault(path: Path) -> str:
    error = outcome(path)
    assert isinstance(error, RecipeError)
    assert error.exit_code == 2
    text = str(error)
    assert text.isprintable()
    assert len(text) < 600
    return text


def test_the_documented_recipe(tmp_path: Path) -> None:
    recipe = load(tmp_path)
    assert recipe.model.name == "sa3-sm-music"
    assert recipe.model.kind == "sa3-dit"
    assert recipe.model.onnx == tmp_path / "models/dit.onnx"
    assert recipe.precision.recipe == "fp16"
    assert recipe.precision.rotary is None
    assert recipe.profiles[0]["x"] == ShapeRange((1, 256, 1), (1, 256, 1292), (1, 256, 4096))
    assert recipe.target.backend == "tensorrt_rtx"
    assert recipe.target.sm == (89,)
    assert recipe.build.workspace_gb == 16
    assert recipe.verify.fidelity is not None
    assert recipe.verify.fidelity.t == (1.0, 0.5, 0.02)
    assert recipe.min_cosine() == 0.9999
    assert recipe.output.dir == tmp_path / "out"


def test_the_recipes_of_the_repository_load() -> None:
    recipes = sorted((Path(__file__).parent.parent / "recipes").glob("**/*.yaml"))
    assert recipes
    for path in recipes:
        assert load_recipe(path).schema_version == "sa3-builder/1"


def test_every_key_of_the_interface(tmp_path: Path) -> None:
    path = write(
        tmp_path,
        """\
schema: sa3-builder/1
model:
  name: m
  kind: generic
  sample: {size: small, spelling: dynamo23, seed: 7, differential: true}
  sha256: ABCDEF0123456789abcdef0123456789abcdef0123456789abcdef0123456789
precision:
  recipe: fp8
  rotary: computed
  clip_overflow: true
  scales: ../scales.json
  weights: per_channel
  include: ["*/ff/*"]
  exclude: ["*to_out*"]
  trunk: bf16
  min_cosine: 0.999
target: {backend: tensorrt, sm: [sm_89, "90", 120]}
build:
  workspace_gb: 0.5
  optimization_level: 5
  aux_streams: 0
  timing_cache: /c/timing.bin
  strict_timing_cache: on
  hardware_compatibility: ampere_plus
  version_compatible: true
  refit: identical
  strip_plan: true
  weight_streaming: true
  plugins: [libp.so]
verify:
  fidelity: off
  expect:
    gemms: {fp8: ">=170", fp32: 0}
    fused_attention: {count: 96, type: [bf16, fp16]}
    runtime_trig: "<= 2"
output: {dir: /out, name: dit_fp8.trt}
""",
    )
    recipe = load_recipe(path)
    assert recipe.model.sha256 == "abcdef0123456789" * 4
    assert recipe.precision.scales == tmp_path / "../scales.json"
    assert recipe.target.sm == (89, 90, 120)
    assert recipe.build.timing_cache == Path("/c/timing.bin")
    assert recipe.build.refit == "identical"
    assert recipe.build.plugins == (tmp_path / "libp.so",)
    assert recipe.verify.fidelity is None
    assert recipe.fidelity_lengths() == ()
    assert recipe.min_cosine() is None
    expect = recipe.verify.expect
    assert expect.gemms == {"fp8": CountBound(">=", 170), "fp32": CountBound("==", 0)}
    assert expect.fused_attention is not None
    assert expect.fused_attention.type == ("bf16", "fp16")
    assert expect.runtime_trig == CountBound("<=", 2)


@pytest.mark.parametrize(
    ("bound", "holds", "fails"),
    [(">=170", 170, 169), ("<=2", 2, 3), ("==4", 4, 5), (">0", 1, 0), ("<3", 2, 3)],
)
def test_count_bounds(tmp_path: Path, bound: str, holds: int, fails: int) -> None:
    recipe = load(tmp_path, ("verify:\n", f'verify:\n  expect: {{runtime_trig: "{bound}"}}\n'))
    trig = recipe.verify.expect.runtime_trig
    assert trig is not None
    assert trig.holds(holds)
    assert not trig.holds(fails)
    assert str(trig) == bound


def test_defaults_that_depend_on_the_precision(tmp_path: Path) -> None:
    sweep = (
        "  fidelity: {lengths: [64, 1292, 4092], t: [1.0, 0.5, 0.02], min_cosine: 0.9999}\n",
        "  expect: {}\n",
    )
    bf16 = load(tmp_path, ("precision: fp16", "precision: bf16"), sweep)
    assert bf16.precision.rotary == "baked"
    assert bf16.min_cosine() == 0.99
    computed = load(tmp_path, ("precision: fp16", "precision: {recipe: bf16, rotary: computed}"))
    assert computed.precision.rotary == "computed"
    fp8 = load(tmp_path, ("precision: fp16", "precision: {recipe: fp8, min_cosine: 0.95}"), sweep)
    assert (fp8.precision.trunk, fp8.precision.weights) == ("fp16", "per_tensor")
    assert fp8.min_cosine() == 0.95


def test_default_lengths_follow_the_profiles(tmp_path: Path) -> None:
    text = (
        "  fidelity: {lengths: [64, 1292, 4092], t: [1.0, 0.5, 0.02], min_cosine: 0.9999}\n",
        "  fidelity: on\n",
    )
    assert load(tmp_path, text).fidelity_lengths() == (64, 1292, 4092)
    assert load(tmp_path, text, ("1292]", "1000]"), ("4096]", "2000]")).fidelity_lengths() == (64, 1292, 2000)
    assert load(tmp_path, text, ("1]", "50]"), ("1292]", "50]"), ("4096]", "50]")).fidelity_lengths() == (50,)


FAULTS: list[tuple[str, str, str, int, str]] = [
    # what, old text, new text, line, message
    ("unknown section", "build:", "biuld:", 10, "biuld: unknown key"),
    ("unknown key", "workspace_gb", "workspace_bg", 10, "did you mean workspace_gb?"),
    ("unknown key far from any", "workspace_gb", "zzz", 10, "known keys: workspace_gb, optimization_level"),
    ("unknown sweep key", "min_cosine", "min_cos", 12, "verify.fidelity.min_cos: unknown key"),
    ("missing key", "  name: sa3-sm-music\n", "", 2, "model.name: required key is missing"),
    ("missing section", "output: {dir: out}\n", "", 1, "output: required key is missing"),
    ("wrong schema", "sa3-builder/1", "sa3-builder/2", 1, "schema: must be 'sa3-builder/1', not \"sa3-builder/2\""),
    ("duplicate key", "build:", "model: {}\nbuild:", 10, "model: duplicate key, first given in line 2"),
    ("duplicate input", "    local_add_cond", "    x", 8, "profiles[0].x: duplicate key, first given in line 7"),
    ("min above opt", "[1, 256, 1]", "[1, 256, 2000]", 7, "profiles[0].x: min 2000 > opt 1292 in dimension 2"),
    ("opt above max", "[1, 257, 4096]", "[1, 257, 1000]", 8, "local_add_cond: opt 1292 > max 1000 in dimension 2"),
    ("unequal ranks", "[1, 256, 1]", "[1, 256]", 7, "min, opt and max have 2, 3 and 3 dimensions"),
    ("two shapes", "[1, 256, 1], ", "", 7, "profiles[0].x: must be three shapes [min, opt, max], not 2 shapes"),
    ("zero dimension", "[1, 256, 1]", "[1, 256, 0]", 7, "profiles[0].x: min has dimension 0, outside 1.."),
    ("negative dimension", "[1, 256, 1]", "[1, -256, 1]", 7, "min has dimension -256"),
    ("huge dimension", "4096]]\n    l", "4294967296]]\n    l", 7, "max has dimension 4294967296"),
    ("fractional dimension", "[1, 256, 1]", "[1, 256, 1.5]", 7, "min must hold whole numbers, not 1.5"),
    ("shape not a list", "[1, 256, 1]", "256", 7, "min must be a shape such as [1, 256, 64], not 256"),
    ("empty profile", "target:", "  - {}\ntarget:", 9, "profiles[1]:"),
    ("profiles not a list", "  - x:  ", "    x:  ", 6, "profiles: must be a list, not a mapping"),
    ("unknown precision", "fp16", "fp61", 5, "did you mean fp16?"),
    ("empty precision", "precision: fp16", "precision:", 5, "precision: must be a mapping, not null"),
    ("precision without recipe", "precision: fp16", "precision: {rotary: baked}", 5, "precision.recipe: required"),
    ("scales for fp16", "fp16", "{recipe: fp16, scales: s}", 5, "precision.scales: is no option of fp16 (it is one of fp8)"),
    ("islands for bf16", "fp16", "{recipe: bf16, islands: full}", 5, "precision.islands: is no option of bf16"),
    ("tf32 for fp8", "fp16", "{recipe: fp8, tf32: true}", 5, "precision.tf32: is no option of fp8 (it is one of fp32)"),
    ("rotary for fp32", "fp16", "{recipe: fp32, rotary: baked}", 5, "it is one of fp16, bf16, fp8"),
    ("unknown option value", "fp16", "{recipe: fp16, rotary: bakde}", 5, "did you mean baked?"),
    ("text for a flag", "fp16", '{recipe: fp16, bound_attention: "yes"}', 5, 'must be true or false, not "yes"'),
    ("fp8 on old hardware", "fp16", "fp8", 9, "target.sm: sm 86 has no fp8 tensor cores (fp8 needs 89 or higher)"),
    ("two origins", "  onnx:", "  sample: {}\n  onnx:", 2, "model: needs exactly one of onnx and sample; both are given"),
    ("no origin", "  onnx: models/dit.onnx\n", "", 2, "model: needs exactly one of onnx and sample; neither is given"),
    ("path as a name", "sa3-sm-music", "a/b", 3, 'model.name: "a/b" is not allowed'),
    ("parent as a name", "sa3-sm-music", "..", 3, 'model.name: ".." is not allowed'),
    ("name with a newline", "sa3-sm-music", '"a\\n"', 3, "model.name: character U+000A is not allowed"),
    ("number as a name", "sa3-sm-music", "007", 3, "model.name: must be text, not 7"),
    ("output name with a folder", "dir: out", "dir: out, name: ../x.trt", 13, "output.name:"),
    ("output name of a report", "dir: out", "dir: out, name: a.json", 13, "output.name: 'a.json' would pass for a report"),
    ("empty path", "models/dit.onnx", '""', 4, 'model.onnx: must be a path, not ""'),
    ("short hash", "  name:", "  sha256: abc\n  name:", 3, "model.sha256: \"abc\" is not allowed (64 hex digits"),
    ("unknown sample size", "  onnx: models/dit.onnx", "  sample: {size: tinny}", 4, "did you mean tiny?"),
    ("unknown backend", "tensorrt_rtx", "tensor_rt", 9, "target.backend: must be 'tensorrt' or 'tensorrt_rtx'"),
    ("architecture with a point", "sm: 89", "sm: 8.9", 9, "target.sm: must be an architecture such as 89, not 8.9 (write 89)"),
    ("same architecture twice", "sm: 89", "sm: [89, sm_89]", 9, "target.sm: sm 89 is given twice"),
    ("no architecture", "sm: 89", "sm: []", 9, "target.sm: names no architecture"),
    ("negative workspace", "workspace_gb: 16", "workspace_gb: -1", 10, "build.workspace_gb: must be greater than 0, not -1"),
    ("workspace of nan", "workspace_gb: 16", "workspace_gb: .nan", 10, "build.workspace_gb: must be a finite number"),
    ("text for a number", "workspace_gb: 16", "workspace_gb: 16GB", 10, 'must be a number, not "16GB"'),
    ("level out of range", "workspace_gb: 16", "optimization_level: 6", 10, "must be less than or equal to 5, not 6"),
    ("strict about nothing", "workspace_gb: 16", "strict_timing_cache: true", 10, "strict_timing_cache: needs a cache"),
    ("no lengths", "[64, 1292, 4092]", "[]", 12, "verify.fidelity.lengths: is an empty list"),
    ("length outside the profile", "4092]", "5000]", 12, "verify.fidelity.lengths[2]: 5000 is outside every profile of x (1..4096)"),
    ("t above one", "0.02]", "1.02]", 12, "verify.fidelity.t[2]: must be less than or equal to 1, not 1.02"),
    ("empty sweep", "  fidelity: {lengths: [64, 1292, 4092], t: [1.0, 0.5, 0.02], min_cosine: 0.9999}", "  fidelity:", 12, "verify.fidelity: is empty"),
    ("bad bound", "verify:", 'verify:\n  expect: {runtime_trig: "~2"}', 12, "runtime_trig: must be a count such as 96"),
    ("unknown GEMM type", "verify:", "verify:\n  expect: {gemms: {fp9: 2}}", 12, "did you mean fp8?"),
]  # fmt: skip


@pytest.mark.parametrize(
    ("old", "new", "line", "message"), [f[1:] for f in FAULTS], ids=[f[0] for f in FAULTS]
)
def test_a_fault_names_file_line_and_key(tmp_path: Path, old: str, new: str, line: int, message: str) -> None:
    assert old in GOOD
    text = GOOD.replace(old, new, 1)
    if "sm 86" in message:
        text = text.replace("sm: 89", "sm: [89, 86]")
    told = fault(write(tmp_path, text))
    assert told.startswith(f"{tmp_path / 'r.yaml'}:{line}: ")
    assert message in told


def test_several_faults_are_counted_with_their_lines(tmp_path: Path) -> None:
    text = (
        GOOD.replace("fp16", "fp61")
        .replace("workspace_gb", "workspace")
        .replace("[1, 256, 1]", "[1, 256, 0]")
    )
    told = fault(write(tmp_path, text))
    assert "r.yaml:5: precision: must be" in told
    assert "; and 2 more: line 7 profiles[0].x, line 10 build.workspace" in told


HOSTILE: list[tuple[str, bytes, str]] = [
    ("empty", b"", ":1: the file is empty"),
    ("only comments", b"# nothing\n", ":1: the file is empty"),
    ("a list", b"- a\n- b\n", ":1: a recipe is a mapping, not a list"),
    ("a number", b"3", ":1: a recipe is a mapping, not 3"),
    ("NUL", b"schema: x\nmodel: \0", ":2: character U+0000 is not allowed"),
    ("NUL escape", b'schema: "a\\0b"', ":1: schema: character U+0000 is not allowed"),
    ("surrogate escape", b'schema: "\\ud800"', ":1: schema: character U+D800 is not allowed"),
    ("escape out of range", b'schema: "\\UFFFFFFFF"', ": not valid YAML: a number is out of range"),
    ("Latin-1", b"schema: x\n\nmodel: caf\xe9\n", ":3: not UTF-8: byte 0xe9"),
    ("UTF-16", "schema: x".encode("utf-16"), ":1: not UTF-8"),
    ("unclosed list", b"schema: [1, 2\n", ":2: not valid YAML: while parsing a flow sequence"),
    ("tab", b"schema:\n\t- a", ":2: not valid YAML"),
    ("two documents", b"a: 1\n---\nb: 2\n", ":2: not valid YAML: expected a single document"),
    ("alias", b"a: &x [1]\nb: *x\n", ":1: anchors and aliases are not allowed"),
    ("alias of nothing", b"a: *x\n", ":1: anchors and aliases are not allowed"),
    ("billion laughs", b"a: &a [1,1]\nb: &b [*a,*a]\nc: &c [*b,*b]\n", ":1: anchors and aliases"),
    ("merge key", b"schema: x\n<<: {a: 1}\n", ":1: schema: must be 'sa3-builder/1', not \"x\"; and 5 more: line 2 <<,"),
    ("python tag", b"schema: !!python/object/apply:os.system [id]\n", ":1: schema: YAML tag tag:yaml.org,2002:python"),
    ("own tag", b"schema: !env HOME\n", ":1: schema: YAML tag !env is not allowed"),
    ("binary tag", b"schema: !!binary aGk=\n", ":1: schema: YAML tag tag:yaml.org,2002:binary is not allowed"),
    ("wrong tag", b"schema: !!int abc\n", ":1: schema: 'abc' is not a YAML int"),
    ("list as a key", b"? [a]\n: 1\n", ":1: a list or mapping cannot be a key"),
    ("number as a key", b"schema: x\n1: 2\n", ':2: key 1 is not text (write "1")'),
    ("deep list", b"[" * 100_000, ":1: nested deeper than 16 levels"),
    ("deep mapping", b"{a: " * 100_000, ":1: nested deeper than 16 levels"),
    ("deep block", b"\n".join(b" " * i + b"a:" for i in range(400)), ":16: nested deeper than 16 levels"),
    ("dashes", b"- " * 400_000, ":1: nested deeper than 16 levels"),
    ("many values", b"a: [" + b"1," * 400_000 + b"]", ":1: more than 10000 values"),
    ("many keys", b"\n".join(b"k%d: 1" % i for i in range(90_000)), ":5000: more than 10000 values"),
    ("10 MB", b"#" * 10_000_000, ": larger than 1000000 bytes"),
    ("long text", b"schema: " + b"x" * 900_000, ":1: schema: longer than 4096 characters"),
    ("long number", b"schema: " + b"9" * 900_000, ":1: schema: longer than 4096 characters"),
    ("4000 digits", b"build: {workspace_gb: " + b"9" * 4000 + b"}", ":1: build.workspace_gb: must be"),
    ("slow float", b"schema: " + b"1" * 400_000 + b"." + b"1" * 400_000 + b"x", ":1: schema: longer than 4096 characters"),
    ("sexagesimal", b"schema: " + b"1:" * 400_000 + b"1", ":1: schema: longer than 4096 characters"),
    ("long line fold", b"schema: >\n" + b"\n" * 500_000, ":1: schema: must be 'sa3-builder/1'"),
]  # fmt: skip


@pytest.mark.parametrize(("data", "message"), [h[1:] for h in HOSTILE], ids=[h[0] for h in HOSTILE])
def test_hostile_yaml_ends_soon_in_one_line(tmp_path: Path, data: bytes, message: str) -> None:
    started = time.process_time()
    told = fault(write(tmp_path, data))
    # The slowest takes 1.2 s on a slow machine; unbounded work on these sizes takes minutes.
    assert time.process_time() - started < 20
    assert told.removeprefix(str(tmp_path / "r.yaml")).startswith(message)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda p: None, "no such recipe"),
        (lambda p: p.mkdir(), "is a folder"),
        (lambda p: os.mkfifo(p), "is not a regular file"),
        (lambda p: p.symlink_to(p), "cannot be read"),
    ],
    ids=["missing", "folder", "pipe", "link to itself"],
)
def test_a_recipe_that_is_no_file(tmp_path: Path, make: Callable[[Path], None], message: str) -> None:
    make(tmp_path / "r.yaml")
    assert message in fault(tmp_path / "r.yaml")


def test_a_missing_recipe_suggests_its_neighbour(tmp_path: Path) -> None:
    (tmp_path / "smoke.yaml").touch()
    assert f"did you mean {tmp_path / 'smoke.yaml'}?" in fault(tmp_path / "smok.yaml")
    assert "its folder does not exist" in fault(tmp_path / "a/b.yaml")
    assert "cannot be read" in fault(Path("a\0b"))
    assert "cannot be read" in fault(tmp_path / ("x" * 300))


_YAML = st.text(alphabet="ab1:-[]{},&*!|>'\"%#@?\\ \n\t.<=~0xUu\u2028\x85é", max_size=60)
_VALUE = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=5), inner, max_size=4),
    max_leaves=8,
)


@settings(max_examples=200, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.binary(max_size=80) | _YAML.map(str.encode))
def test_any_bytes_load_or_give_a_recipe_error(tmp_path: Path, data: bytes) -> None:
    fault(write(tmp_path, data))


@settings(max_examples=200, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.sampled_from(sorted(yaml.safe_load(GOOD))), st.data())
def test_any_value_of_a_section_loads_or_gives_a_recipe_error(
    tmp_path: Path, name: str, data: st.DataObject
) -> None:
    content = yaml.safe_load(GOOD)
    section = content[name]
    if isinstance(section, dict) and data.draw(st.booleans()):
        section[data.draw(st.sampled_from(sorted(section)))] = data.draw(_VALUE)
    else:
        content[name] = data.draw(_VALUE)
    path = write(tmp_path, yaml.safe_dump(content, allow_unicode=True))
    result = outcome(path)
    if isinstance(result, Recipe):
        assert json.loads(result.canonical())["target"]["sm"] == list(result.target.sm)
    else:
        assert str(result).isprintable()


@settings(max_examples=200, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.integers(0, len(GOOD)), st.integers(0, 12), _YAML)
def test_a_damaged_recipe_loads_or_gives_a_recipe_error(
    tmp_path: Path, at: int, cut: int, insert: str
) -> None:
    path = write(tmp_path, GOOD[:at] + insert + GOOD[at + cut :])
    result = outcome(path)
    if isinstance(result, RecipeError):
        assert re.match(rf"{re.escape(str(path))}(:\d+)?: ", str(result))
        assert str(result).isprintable()


def test_content_keys(tmp_path: Path) -> None:
    base = load(tmp_path)
    # Spelling, comments, names and places change nothing that is built.
    same = load(
        tmp_path,
        ("precision: fp16", "precision: {recipe: fp16}  # as before"),
        ("sm: 89", "sm: [sm_89]"),
        ("sa3-sm-music", "other"),
        ("models/dit.onnx", "elsewhere.onnx"),
        ("dir: out", "dir: out2, name: e.trt"),
    )
    assert same.canonical() == base.canonical()
    assert same.digest() == base.digest()
    assert same.file_sha256 != base.file_sha256
    assert str(tmp_path) not in base.canonical()
    other = load(tmp_path, ("4096]", "4095]"))
    assert other.digest() != base.digest()
    assert other.digest("precision", "target") == base.digest("precision", "target")
    off = load(tmp_path, ("{lengths: [64, 1292, 4092], t: [1.0, 0.5, 0.02], min_cosine: 0.9999}", "off"))
    assert off.digest("verify") != base.digest("verify")
    generic = load(tmp_path, ("  name:", "  kind: generic\n  name:"))
    assert generic.digest() != base.digest()


def test_later_errors_name_the_line(tmp_path: Path) -> None:
    recipe = load(tmp_path)
    error = recipe.error("profiles[0].local_add_cond", "too long", hint="shorten it")
    told = "profiles[0].local_add_cond: too long (shorten it)"
    assert str(error) == f"{tmp_path / 'r.yaml'}:8: {told}"
    assert recipe.error(("profiles", 0, "x"), "m").where == f"{tmp_path / 'r.yaml'}:7"
    # A key that the file leaves out is told at the section that would hold it.
    assert recipe.error("build.aux_streams", "m").where == f"{tmp_path / 'r.yaml'}:10"


def test_the_schema_agrees_with_the_loader(tmp_path: Path) -> None:
    validator = jsonschema.Draft202012Validator(recipe_schema())
    validator.check_schema(recipe_schema())
    validator.validate(yaml.safe_load(GOOD))
    for precision in ("fp16", {"recipe": "fp8", "include": ["a*"]}):
        for sm in (89, "sm_89", [89, "120"]):
            content = yaml.safe_load(GOOD) | {
                "precision": precision,
                "target": {"backend": "tensorrt", "sm": sm},
            }
            validator.validate(content)
            load_recipe(write(tmp_path, yaml.safe_dump(content)))
    faulty: tuple[dict[str, object], ...] = (
        {"precision": "fp61"},
        {"output": {}},
        {"extra": 1},
        {"profiles": [{"x": [[1], [1]]}]},
    )
    for bad in faulty:
        assert not validator.is_valid(yaml.safe_load(GOOD) | bad)


def test_profiles_against_the_model(tmp_path: Path) -> None:
    recipe = load(tmp_path)
    x = ShapeRange((1, 256, 1), (1, 256, 1292), (1, 256, 4096))
    cond = ShapeRange((1, 257, 1), (1, 257, 1292), (1, 257, 4096))
    assert resolve_profiles(recipe, INPUTS) == (Profile({"x": x, "local_add_cond": cond}),)


def test_static_inputs_may_be_listed_and_are_left_out(tmp_path: Path) -> None:
    recipe = load(tmp_path, ("    local_add_cond:", "    t: [[1], [1], [1]]\n    local_add_cond:"))
    assert set(resolve_profiles(recipe, INPUTS)[0].shapes) == {"x", "local_add_cond"}


def test_a_static_model_needs_no_profile(tmp_path: Path) -> None:
    text = GOOD.replace(GOOD[GOOD.index("profiles:") : GOOD.index("target:")], "")
    recipe = load_recipe(write(tmp_path, text))
    assert resolve_profiles(recipe, [TensorSpec("x", "float32", (1, 256, 64))]) == ()
    with pytest.raises(
        RecipeError, match=r"r\.yaml:1: profiles: missing, .* x \(1, 256, L\), local_add_cond"
    ):
        resolve_profiles(recipe, INPUTS)


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        ("local_add_cond:", "local_add_cnd:", r":8: profiles\[0\]\.local_add_cnd: the model has no such input \(did you mean local_add_cond\?\)"),
        ("    local_add_cond: [[1, 257, 1], [1, 257, 1292], [1, 257, 4096]]\n", "", r":7: profiles\[0\]: input local_add_cond \(1, 257, L\) is dynamic"),
        ("[[1, 256, 1], [1, 256, 1292], [1, 256, 4096]]", "[[1, 1], [1, 2], [1, 4096]]", r":7: profiles\[0\]\.x: 2 dimensions, but the model's x is \(1, 256, L\)"),
        ("[1, 256, 4096]", "[2, 256, 4096]", r":7: profiles\[0\]\.x: dimension 0 is fixed at 1 in the model, not 2"),
        ("[1, 257, 4096]", "[1, 257, 4095]", r":8: profiles\[0\]\.local_add_cond: L is 1/1292/4095 here but 1/1292/4096 in x"),
    ],
    ids=["unknown input", "dynamic input left out", "wrong rank", "fixed dimension", "inconsistent L"],
)  # fmt: skip
def test_profiles_that_do_not_fit_the_model(tmp_path: Path, old: str, new: str, message: str) -> None:
    with pytest.raises(RecipeError, match=r"r\.yaml" + message) as caught:
        resolve_profiles(load(tmp_path, (old, new)), INPUTS)
    assert caught.value.exit_code == 2


def test_unnamed_dimensions_are_independent(tmp_path: Path) -> None:
    recipe = load(tmp_path, ("[1, 257, 4096]", "[1, 257, 4095]"))
    inputs = (
        TensorSpec("x", "float32", (1, 256, None)),
        TensorSpec("local_add_cond", "float32", (1, 257, None)),
    )
    assert resolve_profiles(recipe, inputs)[0].shapes["local_add_cond"].max == (1, 257, 4095)


def test_a_model_in_place_of_a_recipe_leads_to_init(tmp_path: Path) -> None:
    model = tmp_path / "dit.onnx"
    model.write_bytes(b"\x08\x08")
    with pytest.raises(RecipeError) as caught:
        load_recipe(model)
    hint = f"write a recipe for it with: entrypoint.py init {model}"
    assert str(caught.value) == f"{model}: is a model, not a recipe ({hint})"
