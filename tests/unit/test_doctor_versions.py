"""Which versions are allowed, which are tested, and what the doctor says of those it finds; the ends of a range are found on an index."""

import tomllib
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.specifiers import SpecifierSet

from mem_core.core.doctor.software import TESTED_VERSIONS, version_findings
from mem_core.domain.environment import AcceleratorObservation, BuildObservation, MachineObservations, StoreObservation

ROOT = Path(__file__).parents[2]
ENGINE = {"torch": "2.13.0", "deepspeed": "0.19.8", "mem": "0.1.0"}


def machine(**versions: str) -> MachineObservations:
    return MachineObservations(
        num_cores=2, versions={**ENGINE, **versions}, accelerator=AcceleratorObservation(available=False),
        store=StoreObservation(location="/runs"), build=BuildObservation(folder="/cache"),
    )  # fmt: skip


@pytest.mark.parametrize(
    ("versions", "severity", "words"),
    [
        ({}, "ok", "deepspeed 0.19.8 (tested), mem 0.1.0, torch 2.13.0 (tested)"),
        (
            {"transformers": "5.24.0", "prefect": "3.9.1"},
            "ok",
            "prefect 3.9.1 (tested), torch 2.13.0 (tested), transformers 5.24.0 (tested)",
        ),
        ({"transformers": "5.10.2"}, "notice", "transformers 5.10.2 (not tested)"),
        ({"torch": "2.14.1+cu130"}, "warning", "torch 2.14.1+cu130 (not tested)"),
    ],
)
def test_every_version_is_said_to_be_tested_or_not(versions: dict[str, str], severity: str, words: str) -> None:
    (finding,) = version_findings(machine(**versions))
    assert (finding.severity, words in finding.observed) == (severity, True)


def pinned() -> dict[str, str]:
    return dict(line.split("==") for line in (ROOT / "constraints.txt").read_text().splitlines() if "==" in line)


def allowed() -> dict[str, SpecifierSet]:
    listed = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["dependencies"]
    return {requirement.name: requirement.specifier for requirement in map(Requirement, listed)}


def test_what_is_called_tested_is_what_the_constraints_pin() -> None:
    assert [name for name, release in TESTED_VERSIONS.items() if not pinned()[name].startswith(release)] == []


def test_what_is_pinned_lies_in_a_range_that_leaves_room_for_others() -> None:
    """A pin in the package's own metadata shuts it out of every environment that has another release."""
    ranges = allowed()
    assert [name for name in TESTED_VERSIONS if pinned()[name] not in ranges[name]] == []
    assert [name for name, specifier in ranges.items() if any(item.operator == "==" for item in specifier)] == []
