"""The name of a CPU as an audit compares it: the model, and the vector instructions that decide the bits of a sum."""

from pathlib import Path

import pytest

from mem_core.infrastructure.machine.observe import cpu_flags, cpu_kind

AMD = "processor\t: 0\nmodel name\t: AMD EPYC 7B13\nflags\t\t: fpu smep avx2 sse4_2 avx\n\nprocessor\t: 1\nmodel name\t: another\n"
ARM = "processor\t: 0\nFeatures\t: fp asimd sve\nCPU part\t: 0xd40\n"


@pytest.mark.parametrize(("text", "kind"), [(AMD, "AMD EPYC 7B13 (avx avx2)"), (ARM, "0xd40 (asimd sve)"), ("processor\t: 0\n", "")])
def test_the_first_cpu_is_named(text: str, kind: str, tmp_path: Path) -> None:
    (tmp_path / "proc").mkdir()
    (tmp_path / "proc" / "cpuinfo").write_text(text)
    assert cpu_kind(tmp_path) == kind


def test_a_machine_that_tells_nothing_has_no_name(tmp_path: Path) -> None:
    assert (cpu_kind(tmp_path), cpu_flags(tmp_path)) == ("", ())
