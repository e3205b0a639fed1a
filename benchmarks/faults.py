"""Seeded faults: ways to break a build, and what catches each of them and names what is at fault.

    python benchmarks/faults.py                  # all of them, into benchmarks/results/faults.{md,json}
    python benchmarks/faults.py --fast           # those that need no engine: the subset that tests run
    python benchmarks/faults.py table_too_short  # some by name

Every fault is real: a converted graph, an engine, a file of scales, layers or a report is damaged, and
goes the way that a build or ``verify`` takes it.  The exit code is what the command line ends with.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

REPOSITORY = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(REPOSITORY))

from benchmarks.fault_kinds import Fault  # noqa: E402
from benchmarks.fault_list import FAULTS  # noqa: E402
from benchmarks.workshop import Workshop  # noqa: E402

RESULTS = REPOSITORY / "benchmarks" / "results"


# --- the table -----------------------------------------------------------------------------------


@dataclass(frozen=True)
class Row:
    """One fault of the table; ``caught`` is whether it was stopped as it must be."""

    fault: str
    group: str
    caught: bool
    by: str
    named: str
    exit_code: int
    seconds: float
    text: str


def run(fault: Fault, shop: Workshop) -> Row:
    """Commits one fault and looks at what stops it."""
    started = time.monotonic()
    found = fault.make(shop)
    named = any(fault.names in name for name in (*found.named, found.text))
    caught = fault.by in found.by and named and found.exit_code == fault.exit_code and not found.innocent
    return Row(
        fault=fault.name,
        group=fault.group,
        caught=caught,
        by=fault.by if fault.by in found.by else ", ".join(found.by) or "nothing",
        named=fault.names if named else "not named",
        exit_code=found.exit_code,
        seconds=round(time.monotonic() - started, 2),
        text=(
            f"also named: {', '.join(found.innocent)}"
            if found.innocent
            else found.text.replace(f"{shop.folder}/", "")
        ),
    )


def as_markdown(rows: Sequence[Row]) -> str:
    """The table for people."""
    lines = ["| fault | caught by | named | exit code |", "|---|---|---|---|"]
    for row in rows:
        by = row.by if row.caught else f"**not as it must be**: {row.by}"
        lines.append(
            f"| {row.group}: {row.fault.replace('_', ' ')} | {by} | `{row.named}` | {row.exit_code} |"
        )
    caught = sum(row.caught for row in rows)
    lines.append("")
    lines.append(f"{caught} of {len(rows)} caught, each by the check and with the name that it must be.")
    return "\n".join(lines) + "\n"


def main() -> int:
    """Runs the faults that were asked for; 0 when every one was caught."""
    parser = argparse.ArgumentParser(description="Seeded faults: what catches each, and what it names.")
    parser.add_argument("names", nargs="*", help="only these faults")
    parser.add_argument("--fast", action="store_true", help="only those that need no engine")
    parser.add_argument("--keep", type=Path, help="keep the good builds here for the next run")
    parser.add_argument("--out", type=Path, default=RESULTS, help="folder of the results")
    options = parser.parse_args()
    unknown = set(options.names) - {fault.name for fault in FAULTS}
    if unknown:
        parser.error(f"no such fault: {', '.join(sorted(unknown))}")
    chosen = [
        fault
        for fault in FAULTS
        if (not options.names or fault.name in options.names) and (fault.fast or not options.fast)
    ]
    rows: list[Row] = []
    with tempfile.TemporaryDirectory(prefix="sa3-faults-") as temporary:
        shop = Workshop(options.keep or Path(temporary))
        for fault in chosen:
            row = run(fault, shop)
            rows.append(row)
            state = "caught" if row.caught else "NOT CAUGHT"
            print(f"{state:<10} {row.seconds:6.1f} s  {row.fault}: {row.by}", file=sys.stderr, flush=True)
            if not row.caught:
                print(f"           {row.text}", file=sys.stderr, flush=True)
    print(as_markdown(rows), end="")
    if not options.names and not options.fast:
        options.out.mkdir(parents=True, exist_ok=True)
        (options.out / "faults.md").write_text(as_markdown(rows))
        listed = [{k: v for k, v in asdict(row).items() if k != "seconds"} for row in rows]
        (options.out / "faults.json").write_text(json.dumps(listed, indent=1) + "\n")
    return 0 if all(row.caught for row in rows) else 1


if __name__ == "__main__":
    sys.exit(main())
