"""Sample models: the same graphs as the real exports node by node, and the same numerical habits."""

from __future__ import annotations

import resource
import tracemalloc
from collections import Counter
from collections.abc import Mapping
from pathlib import Path

import numpy as np
import onnx
import onnxruntime as ort
import pytest
from numpy.typing import NDArray
from onnx import ModelProto, NodeProto, TensorProto, helper, numpy_helper

from engine_builder.errors import ResourceError
from engine_builder.sample import SampleSpec, Size, Spelling, write_sample
from engine_builder.sample import write as writing
from engine_builder.sample.draft import GraphDraft
from engine_builder.sample.spec import Dimensions
from engine_builder.sample.weights import Parameter, fourier_frequencies, rotary_frequencies

Floats = NDArray[np.float32]
VARIANTS = [(spelling, differential) for spelling in Spelling for differential in (False, True)]
REAL_EXPORTS = {
    "sm_torchscript17": (Spelling.TORCHSCRIPT17, False),
    "md_torchscript17": (Spelling.TORCHSCRIPT17, True),
    "sm_dynamo20": (Spelling.DYNAMO20, False),
    "sm_dynamo23": (Spelling.DYNAMO23, False),
}
ANGLES = "/transformer/Concat_2_output_0"  # of the rotary embedding, in the TorchScript spelling


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Mapping[tuple[Spelling, bool], Path]:
    folder = tmp_path_factory.mktemp("samples")
    return {
        (spelling, differential): write_sample(
            SampleSpec(Size.TINY, spelling, differential), folder / f"{spelling}_{differential}.onnx"
        )
        for spelling, differential in VARIANTS
    }


# -- topology ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("export", REAL_EXPORTS)
def test_every_node_is_the_real_export_s(
    export: str, tiny: Mapping[tuple[Spelling, bool], Path], tiny_models: Mapping[str, Path]
) -> None:
    """Same operators in the same order with the same attributes, literals, wiring and known shapes."""
    spelling, differential = REAL_EXPORTS[export]
    ours, real = onnx.load(tiny[spelling, differential]), onnx.load(tiny_models[export])

    assert Counter(n.op_type for n in ours.graph.node) == Counter(n.op_type for n in real.graph.node)
    assert described_nodes(ours) == described_nodes(real)
    assert list(described_shapes(ours)) == list(described_shapes(real))
    assert ours.opset_import[0].version == real.opset_import[0].version
    assert ours.ir_version == real.ir_version
    assert signature(ours) == signature(real)


@pytest.mark.parametrize("export", ["sm_torchscript17", "md_torchscript17"])
def test_node_names_are_the_torchscript_exporter_s(
    export: str, tiny: Mapping[tuple[Spelling, bool], Path], tiny_models: Mapping[str, Path]
) -> None:
    ours, real = onnx.load(tiny[REAL_EXPORTS[export]]), onnx.load(tiny_models[export])

    assert [n.name for n in ours.graph.node] == [n.name for n in real.graph.node]
    kept = {i.name for i in real.graph.initializer if not i.name.startswith("onnx::")}
    assert {i.name for i in ours.graph.initializer if not i.name.startswith("onnx::")} == kept


@pytest.mark.parametrize("export", ["sm_dynamo20", "sm_dynamo23"])
def test_node_names_follow_the_dynamo_exporter(
    export: str, tiny: Mapping[tuple[Spelling, bool], Path], tiny_models: Mapping[str, Path]
) -> None:
    """The exporter's running numbers depend on its traces; what stands before the number does not."""

    def bases(path: Path) -> list[str]:
        return [n.name.rstrip("_0123456789") for n in onnx.load(path).graph.node]

    assert bases(tiny[REAL_EXPORTS[export]]) == bases(tiny_models[export])


def test_differential_dynamo_has_the_exporter_s_constructs(
    tiny: Mapping[tuple[Spelling, bool], Path],
) -> None:
    """What torch 2.13's dynamo exporter adds for differential attention, per layer, measured on a module
    of its two attentions: two more head splits each, stacks as Unsqueeze and Concat, unbinds as Slice and
    Squeeze, a second core and the difference; one Split more for the cross-attention's queries."""
    added = Counter(Reshape=4, Transpose=4, Unsqueeze=8, Concat=4, Slice=8, Squeeze=8, Split=1, Sub=2)
    core = Counter(MatMul=4, Softmax=2, Mul=4, Transpose=2, Reshape=4)
    core.update(Shape=1, Slice=3, Concat=2)  # only the self-attention's length is unknown

    for spelling, cores in ((Spelling.DYNAMO20, core), (Spelling.DYNAMO23, Counter(Attention=2))):
        expected = histogram(tiny[spelling, False])
        for _layer in range(2):
            expected.update(added)
            expected.update(cores)
        assert histogram(tiny[spelling, True]) == expected


@pytest.mark.parametrize(
    ("size", "nodes", "norms", "cores", "trig", "linears", "parameters"),
    [(Size.SMALL, 11_479, 140, 40, 80, 186, 459e6), (Size.MEDIUM, 18_195, 168, 96, 96, 222, 1.45e9)],
)
def test_full_sizes_have_the_released_models_structure_counts(
    size: Size, nodes: int, norms: int, cores: int, trig: int, linears: int, parameters: float
) -> None:
    """Counts of the real exports; their node totals lie 6 a layer higher than this exporter version's."""
    spec = SampleSpec(size, Spelling.TORCHSCRIPT17)
    draft = writing.draft_graph(spec.dimensions, spec.spelling)
    counts = Counter(node.op_type for node in draft.nodes)

    assert counts["ReduceMean"] == norms
    assert counts["Softmax"] == cores
    assert counts["Cos"] + counts["Sin"] == trig + 4  # two Fourier features besides
    assert linear_matmuls(draft) == linears
    assert nodes - len(draft.nodes) == 6 * spec.dimensions.depth - 2
    drawn = sum(int(np.prod(i.shape)) for i in draft.initializers if isinstance(i.source, Parameter))
    assert drawn == pytest.approx(parameters, rel=0.005)


@pytest.mark.parametrize(("spelling", "differential"), VARIANTS)
def test_full_check_passes(
    spelling: Spelling, differential: bool, tiny: Mapping[tuple[Spelling, bool], Path]
) -> None:
    path = tiny[spelling, differential]
    onnx.checker.check_model(path, full_check=True)
    assert path.stat().st_size < 10e6
    assert list(path.parent.glob("*.data")) == []


@pytest.mark.parametrize(("spelling", "differential"), VARIANTS)
def test_tensorrt_rtx_parses(
    spelling: Spelling, differential: bool, tiny: Mapping[tuple[Spelling, bool], Path]
) -> None:
    trt = pytest.importorskip("tensorrt_rtx", exc_type=ImportError)
    logger = trt.Logger(trt.Logger.ERROR)
    network = trt.Builder(logger).create_network(1 << int(trt.NetworkDefinitionCreationFlag.STRONGLY_TYPED))
    parser = trt.OnnxParser(network, logger)
    assert parser.parse_from_file(str(tiny[spelling, differential]))
    assert network.num_inputs == 6


# -- values --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("differential", [False, True])
@pytest.mark.parametrize("length", [1, 64, 1292])
def test_the_three_spellings_compute_one_function(
    length: int, differential: bool, tiny: Mapping[tuple[Spelling, bool], Path]
) -> None:
    """Velocity finite and of order one; fp32 rounding apart, equal in all spellings."""
    velocities = [run(session(tiny[spelling, differential]), inputs(length)) for spelling in Spelling]

    assert velocities[0].shape == (1, 256, length)
    assert np.isfinite(velocities[0]).all()
    assert 0.5 < velocities[0].std() < 3
    for other in velocities[1:]:
        np.testing.assert_allclose(other, velocities[0], atol=2e-5)


def test_constants_are_the_real_export_s(tiny_models: Mapping[str, Path]) -> None:
    graph = onnx.load(tiny_models["sm_dynamo20"]).graph
    real = {i.name: numpy_helper.to_array(i) for i in graph.initializer}
    np.testing.assert_allclose(
        rotary_frequencies(), real["dit.transformer.rotary_pos_emb.inv_freq"], rtol=2e-7
    )
    np.testing.assert_allclose(fourier_frequencies(), real["exp"], rtol=2e-6)


@pytest.mark.parametrize("export", ["sm_torchscript17", "md_torchscript17"])
def test_weight_scales_are_the_real_export_s(
    export: str, tiny: Mapping[tuple[Spelling, bool], Path], tiny_models: Mapping[str, Path]
) -> None:
    """Standard deviation of each weight of 16384 values or more within 3%.

    Left out is the second linear of ``to_local_embed``, which is larger here so that it matters.
    """
    paths = tiny[REAL_EXPORTS[export]], tiny_models[export]
    ours, real = (weights(path) for path in paths)
    compared = 0
    for mine, theirs in zip(*(onnx.load(path).graph.node for path in paths), strict=True):
        for name, other in zip(mine.input, theirs.input, strict=True):
            if name in ours and ours[name].size >= 128 * 128 and "to_local_embed.2" not in mine.name:
                assert ours[name].std() == pytest.approx(real[other].std(), rel=0.03), mine.name
                compared += 1
    assert compared == 29  # 8 a layer, 13 around them


@pytest.mark.parametrize("depth", [2, 24])
def test_norms_overflow_fp16_while_the_stream_stays_inside(depth: int, tmp_path: Path) -> None:
    """In every row of every block norm x^2 > 65504, at both depths; the stream itself stays below 3e4."""
    dims = Dimensions(embed=128, depth=depth, heads=2, differential=False)
    path = tmp_path / "deep.onnx"
    writing.write_draft(writing.draft_graph(dims, Spelling.TORCHSCRIPT17), 0, path)
    model = onnx.load(path)
    streams = [
        node.input[0]
        for node in model.graph.node
        if node.op_type == "Pow"
        and node.name.rsplit("/", 2)[1] in ("pre_norm", "cross_attend_norm", "ff_norm")
    ]
    assert len(streams) == 3 * depth
    model.graph.output.extend(helper.make_tensor_value_info(s, TensorProto.FLOAT, None) for s in streams)

    velocity, *values = session(model.SerializeToString()).run(None, inputs(64))
    assert np.isfinite(velocity).all()
    assert 0.5 < velocity.std() < 3
    for value in values:
        assert (np.square(value).max(axis=-1) > 65504).all()
        assert np.abs(value).max() < 3e4


@pytest.mark.parametrize(
    ("export", "differential"), [("sm_torchscript17", False), ("md_torchscript17", True)]
)
def test_low_precision_costs_what_it_costs_the_real_export(
    export: str,
    differential: bool,
    tiny: Mapping[tuple[Spelling, bool], Path],
    tiny_models: Mapping[str, Path],
) -> None:
    """The loss of cosine, within a factor of three of the real export's, when the seconds' clip and
    divide are fp16 at 380 s (4092 latents), and when the rotary angles are bf16 at L=1292."""
    losses: dict[str, list[float]] = {"seconds": [], "angles": []}
    for path in (tiny[Spelling.TORCHSCRIPT17, differential], tiny_models[export]):
        feed = {**inputs(64), "seconds_total": np.array([380], np.float32)}
        half = np.float32(np.float16(380) / np.float16(384)) * 384
        rounded = {**feed, "seconds_total": np.array([half], np.float32)}
        fp32 = session(path)
        losses["seconds"].append(1 - cosine(run(fp32, feed), run(fp32, rounded)))
        feed = inputs(1292)
        bf16 = session(rounded_to_bf16(onnx.load(path), ANGLES).SerializeToString())
        losses["angles"].append(1 - cosine(run(fp32, feed), run(bf16, feed)))

    assert losses["seconds"][1] > 0.02
    assert losses["angles"][1] > 5e-5
    for ours, real in losses.values():
        assert real / 3 < ours < real * 3


@pytest.mark.parametrize("differential", [False, True])
def test_every_input_matters(differential: bool, tiny: Mapping[tuple[Spelling, bool], Path]) -> None:
    """Each input changed alone takes the velocity's cosine below 0.9999."""
    fp32 = session(tiny[Spelling.TORCHSCRIPT17, differential])
    feed = inputs(64)
    before = run(fp32, feed)
    changes = {
        "x": feed["x"][:, :, ::-1],
        "t": np.array([0.5], np.float32),
        "t5_hidden": -5 * feed["t5_hidden"],
        "t5_mask": 1 - feed["t5_mask"],
        "seconds_total": feed["seconds_total"] + 1,
        "local_add_cond": 0 * feed["local_add_cond"],
    }
    for name, value in changes.items():
        assert cosine(before, run(fp32, {**feed, name: np.ascontiguousarray(value)})) < 0.9999, name


# -- files ---------------------------------------------------------------------------------------------


def test_same_arguments_same_bytes(tmp_path: Path) -> None:
    spec = SampleSpec(Size.TINY, Spelling.TORCHSCRIPT17)
    first, again = (write_sample(spec, tmp_path / name).read_bytes() for name in ("a.onnx", "b.onnx"))
    other = write_sample(SampleSpec(Size.TINY, Spelling.TORCHSCRIPT17, seed=1), tmp_path / "c.onnx")
    assert first == again
    assert other.read_bytes() != first
    assert len(other.read_bytes()) == len(first)


def test_sidecar_holds_the_same_weights(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    spec = SampleSpec(Size.TINY, Spelling.DYNAMO20, differential=True)
    inline = weights(write_sample(spec, tmp_path / "inline.onnx"))
    monkeypatch.setattr(writing, "_INLINE_LIMIT", 0)
    path = write_sample(spec, tmp_path / "dit.onnx")

    assert sorted(p.name for p in tmp_path.iterdir()) == ["dit.onnx", "dit.onnx.data", "inline.onnx"]
    assert path.stat().st_size < 0.2e6
    onnx.checker.check_model(path, full_check=True)
    outside = weights(path)
    assert outside.keys() == inline.keys()
    assert all(np.array_equal(outside[name], inline[name]) for name in inline)
    stored = [i for i in onnx.load(path, load_external_data=False).graph.initializer if i.external_data]
    assert {entry.value for i in stored for entry in i.external_data if entry.key == "location"} == {
        "dit.onnx.data"
    }


def test_a_full_disk_is_a_resource_error_and_leaves_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(writing, "_INLINE_LIMIT", 0)
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (2**20, hard))  # the write past it fails as on a full disk
    try:
        with pytest.raises(ResourceError) as caught:
            write_sample(SampleSpec(Size.TINY, Spelling.DYNAMO23), tmp_path / "dit.onnx")
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert caught.value.exit_code == 8
    assert caught.value.where == str(tmp_path / "dit.onnx")
    assert list(tmp_path.iterdir()) == []


def test_a_folder_that_cannot_be_made_is_a_resource_error(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(ResourceError, match="file is in the way of a folder"):
        write_sample(SampleSpec(Size.TINY, Spelling.DYNAMO23), tmp_path / "file" / "dit.onnx")


def test_weights_are_drawn_a_few_at_a_time() -> None:
    """Of medium's first gigabyte no more than four tensors are ever in memory, 300 MB."""
    spec = SampleSpec(Size.MEDIUM, Spelling.DYNAMO23)
    initializers = writing.draft_graph(spec.dimensions, spec.spelling).initializers
    chosen = sorted(initializers, key=lambda i: i.size_bytes, reverse=True)[:14]
    assert sum(i.size_bytes for i in chosen) > 1e9
    tracemalloc.start()
    try:
        for values in writing._drawn(chosen, 0):
            del values
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert peak <= 4 * chosen[0].size_bytes + 2**20


# -- reading graphs ------------------------------------------------------------------------------------


def described_nodes(model: ModelProto) -> list[tuple[object, ...]]:
    """Each node without names: operator, where each input comes from, attributes; weights by shape only."""
    sources: dict[str, tuple[object, ...]] = {i.name: ("input", i.name) for i in model.graph.input}
    for initializer in model.graph.initializer:
        array = numpy_helper.to_array(initializer)
        literal = array.tolist() if array.dtype == np.int64 or array.size == 1 else None
        sources[initializer.name] = ("constant", array.dtype.str, array.shape, literal)
    described: list[tuple[object, ...]] = []
    for index, node in enumerate(model.graph.node):
        for position, output in enumerate(node.output):
            sources[output] = ("node", index, position)
        described.append(
            (node.op_type, tuple(sources.get(name) for name in node.input), described_attributes(node))
        )
    return described


def described_attributes(node: NodeProto) -> dict[str, object]:
    described: dict[str, object] = {}
    for attribute in node.attribute:
        value = helper.get_attribute_value(attribute)
        if isinstance(value, TensorProto):
            array = numpy_helper.to_array(value)
            # The Fourier frequencies differ in the last bit; another test compares them.
            value = (array.dtype.str, array.shape, array.tolist() if array.size < 100 else None)
        described[attribute.name] = value
    return described


def described_shapes(model: ModelProto) -> list[object]:
    """The declared type of each node's outputs, in the nodes' order."""
    declared = {v.name: v.type.tensor_type for v in model.graph.value_info}
    return [
        (kind.elem_type, [d.dim_param or d.dim_value for d in kind.shape.dim])
        for node in model.graph.node
        for output in node.output
        if (kind := declared.get(output))
    ]


def signature(model: ModelProto) -> list[tuple[str, int, list[object]]]:
    values = [*model.graph.input, *model.graph.output]
    return [
        (
            v.name,
            v.type.tensor_type.elem_type,
            [d.dim_param or d.dim_value for d in v.type.tensor_type.shape.dim],
        )
        for v in values
    ]


def histogram(path: Path) -> Counter[str]:
    return Counter(node.op_type for node in onnx.load(path).graph.node)


def linear_matmuls(draft: GraphDraft) -> int:
    """MatMuls by a weight whose sides are both at least 128."""
    shapes = {i.name: i.shape for i in draft.initializers}
    return sum(
        node.op_type == "MatMul" and min(shapes.get(node.input[1], (0,))) >= 128 for node in draft.nodes
    )


def weights(path: Path) -> dict[str, Floats]:
    return {i.name: numpy_helper.to_array(i) for i in onnx.load(path).graph.initializer}


# -- running graphs ------------------------------------------------------------------------------------


def session(model: Path | bytes) -> ort.InferenceSession:
    options = ort.SessionOptions()
    options.intra_op_num_threads = 2
    options.log_severity_level = 3
    return ort.InferenceSession(model if isinstance(model, bytes) else str(model), options)


def run(fp32: ort.InferenceSession, feed: Mapping[str, Floats]) -> Floats:
    velocity: Floats = fp32.run(["velocity"], dict(feed))[0]
    return velocity


def inputs(length: int) -> dict[str, Floats]:
    """Latents and conditioning of order one, 40 text tokens, t = 1, the seconds of ``length`` latents."""
    random = np.random.default_rng(length)
    mask = np.zeros((1, 256), np.float32)
    mask[:, :40] = 1
    return {
        "x": random.standard_normal((1, 256, length), np.float32),
        "t": np.array([1], np.float32),
        "t5_hidden": random.standard_normal((1, 256, 768), np.float32) * np.float32(0.2),
        "t5_mask": mask,
        "seconds_total": np.array([length * 4096 / 44100], np.float32),
        "local_add_cond": random.standard_normal((1, 257, length), np.float32),
    }


def cosine(first: Floats, second: Floats) -> float:
    a, b = first.ravel().astype(np.float64), second.ravel().astype(np.float64)
    return float(a @ b / np.sqrt((a @ a) * (b @ b)))


def rounded_to_bf16(model: ModelProto, name: str) -> ModelProto:
    """The model with the value ``name`` rounded to bf16 and back for all its readers."""
    for node in model.graph.node:
        for position, value in enumerate(node.input):
            if value == name:
                node.input[position] = f"{name}_rounded"
    casts = [
        helper.make_node("Cast", [name], [f"{name}_bf16"], to=TensorProto.BFLOAT16),
        helper.make_node("Cast", [f"{name}_bf16"], [f"{name}_rounded"], to=TensorProto.FLOAT),
    ]
    at = next(i for i, node in enumerate(model.graph.node) if name in node.output) + 1
    nodes = [*model.graph.node[:at], *casts, *model.graph.node[at:]]
    del model.graph.node[:]
    model.graph.node.extend(nodes)
    return model
