"""Seeded faults: each is stopped by what must stop it, and what is at fault is named.

The subset that needs no engine and no long sweep, and a few of each other kind; `make faults` runs all.
"""

from __future__ import annotations

from collections import Counter
from pathlib import Path

import onnx_ir as ir
import pytest

from benchmarks.damage import TYPES
from benchmarks.fault_kinds import Fault, in_graph
from benchmarks.fault_list import FAULTS
from benchmarks.faults import as_markdown, run
from benchmarks.workshop import Workshop

BY_NAME = {fault.name: fault for fault in FAULTS}
AT_GATE = ("heads_permuted", "block_dropped", "mask_ignored", "scale_too_small")
WITH_ENGINE = (
    "engine_of_one_core_fp32",
    "engine_of_gain_trunk",
    "engine_of_linear_unquantized",
    "linear_excluded",
    "fp16_engine_for_bf16",
    "product_rounded_to_tf32",
    "attention_reads_fp32_key",
    "output_renamed",
    "profile_of_another_recipe",
    "layers_cut_in_a_line",
    "layers_cut_between_lines",
    "layers_json_cut",
    "engine_not_detailed",
    "engine_cut_short",
    "engine_of_another_report",
    "report_of_another_version",
    "wrong_architecture",
    "too_few_fp8_products",
)
CHOSEN = [
    *(f.name for f in FAULTS if f.fast and f.group != "gate"),
    *AT_GATE,
]


@pytest.mark.parametrize("name", CHOSEN)
def test_a_fault_is_caught_and_named(workshop: Workshop, name: str) -> None:
    row = run(BY_NAME[name], workshop)
    assert row.caught, f"{row.by}, {row.named}, exit code {row.exit_code}: {row.text}"


@pytest.mark.parametrize("name", WITH_ENGINE)
def test_a_fault_of_an_engine_is_caught_and_named(workshop: Workshop, name: str) -> None:
    pytest.importorskip("tensorrt_rtx", reason="tensorrt-rtx-cu13 is not installed")
    row = run(BY_NAME[name], workshop)
    assert row.caught, f"{row.by}, {row.named}, exit code {row.exit_code}: {row.text}"


def test_there_are_more_than_a_hundred_of_every_kind() -> None:
    groups = Counter(fault.group for fault in FAULTS)
    assert len({fault.name for fault in FAULTS}) == len(FAULTS) > 100
    assert set(groups) == {"types", "tables", "fp8", "gate", "engine", "layers", "files", "inputs"}


def test_what_is_no_fault_is_not_caught(workshop: Workshop) -> None:
    """The table would say so if the checks failed whatever they are shown, or named anybody."""

    def untouched(converted: Path, out: Path) -> tuple[str, ...]:
        ir.save(ir.load(converted), out)
        return ()

    fault = Fault("nothing", "types", "fp32_norm", "norm", 7, in_graph("fp16", untouched))
    row = run(fault, workshop)
    assert not row.caught
    assert (row.by, row.exit_code) == ("nothing", 7)  # without an engine nothing is verifiable
    assert "**not as it must be**" in as_markdown([row])


def test_naming_an_innocent_node_is_not_catching(workshop: Workshop) -> None:
    """A damage that says another node than the one at fault: the check is right and the table is not."""
    damaged = BY_NAME["norm_trunk"]

    def elsewhere(converted: Path, out: Path) -> tuple[str, ...]:
        TYPES["norm_trunk"](converted, out)
        return ("/transformer/project_out/MatMul",)

    row = run(
        Fault("elsewhere", "types", damaged.by, damaged.names, 7, in_graph("fp16", elsewhere)), workshop
    )
    assert not row.caught
    assert row.text == "also named: fp32_norm: /transformer/layers.0/pre_norm/Mul_1"
