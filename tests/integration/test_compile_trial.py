"""torch.compile is tried before the first step, where the request asks for it: a compiler that is broken ends the run with its name."""

import os
from collections.abc import Callable
from pathlib import Path

import pytest

from mem_core.bootstrap import examine_deeply
from mem_core.core.doctor.environment_doctor import error_of
from mem_core.domain.errors import EnvironmentUnfit
from mem_core.domain.request import RuntimeRequest
from mem_core.infrastructure.settings import Settings
from mem_core.testing.driver import drive

pytestmark = pytest.mark.integration
Nano = Callable[..., RuntimeRequest]
TRAINING = {"max_steps": 2, "segment_steps": 2, "global_batch_size": 4, "warmup_steps": 1}


def broken_compiler(folder: Path) -> Settings:
    """One that says its version and compiles nothing, and a folder that nothing was compiled in before."""
    path = folder / "g++"
    path.write_text('#!/bin/sh\nif [ "$1" = --version ]; then echo "g++ 12"; exit 0; fi\necho "cannot find crtbegin.o" >&2\nexit 1\n')
    path.chmod(0o755)
    return Settings.from_environment(dict(os.environ) | {"CXX": str(path), "MEM_HOME": str(folder / "home")})


def test_a_compiler_that_compiles_nothing_is_found_by_the_doctor(nano: Nano, tmp_path: Path) -> None:
    """Its version is fine; what it makes is asked for as well, and only where the request wants compiled code."""
    settings = broken_compiler(tmp_path)
    error = error_of(examine_deeply(nano("compiled", model={"compile": "on"}), settings))
    assert isinstance(error, EnvironmentUnfit)
    assert "torch.compile does not work here" in str(error)
    assert "crtbegin.o" in str(error)
    assert error_of(examine_deeply(nano("eager"), settings)) is None


@pytest.mark.slow
def test_training_says_the_same_before_its_first_step(nano: Nano, tmp_path: Path) -> None:
    """Exit 69, no record of a run that never was; with a compiler that works it trains."""
    with pytest.raises(EnvironmentUnfit, match=r"torch.compile does not work here.*crtbegin.o"):
        drive(nano("compiled", model={"compile": "on"}, training=TRAINING), settings=broken_compiler(tmp_path))
    assert not (tmp_path / "compiled" / "run.json").exists()
    assert drive(nano("compiled", model={"compile": "on"}, training=TRAINING)).applied_steps == 2
