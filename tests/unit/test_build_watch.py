"""A build of DeepSpeed's ops under watch: whom it waits for is said, a dead holder is not waited for, and nothing outlives its owner."""

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import psutil
import pytest

from mem_core.domain.errors import EnvironmentUnfit
from mem_core.infrastructure.machine.build import LOCAL_LOCK_MIN_AGE_S
from mem_core.runtime.deepspeed.programs.build_watch import BuildWatch, watch_build

HOLD = "import os, sys, time; os.open(sys.argv[1], os.O_CREAT | os.O_EXCL | os.O_RDWR); print('held', flush=True); time.sleep(600)"
WAIT_AND_BUILD = "import os, sys, time\nwhile os.path.exists(sys.argv[1]): time.sleep(0.05)\nprint('built')"
QUICK = BuildWatch(deadline_s=60, say_every_s=0.3, look_every_s=0.1)
BUILDER = """
import os, subprocess, time
from mem_core.runtime.deepspeed.programs.build_ops import end_with_owner
end_with_owner(os.getppid())
subprocess.Popen(["sh", "-c", "sleep 600 & wait"], process_group=0)
print(os.getpid(), flush=True)
time.sleep(600)
"""
OWNER = f"""
import os, subprocess, sys, time
builder = subprocess.Popen([sys.executable, "-c", {BUILDER!r}], stdin=subprocess.PIPE, start_new_session=True)
sys.stdin.readline()
builder.stdin.close()
builder.wait()
time.sleep(600)
"""


@pytest.fixture
def lock(tmp_path: Path) -> Path:
    (tmp_path / "ops" / "async_io").mkdir(parents=True)
    return tmp_path / "ops" / "async_io" / "lock"


@pytest.fixture
def holder(lock: Path) -> Iterator["subprocess.Popen[bytes]"]:
    """A process that builds and does not come to an end."""
    with subprocess.Popen([sys.executable, "-c", HOLD, str(lock)], stdout=subprocess.PIPE) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == b"held\n"
        yield process
        process.kill()


def watched(lock: Path, program: str, note: Callable[[str], None], watch: BuildWatch = QUICK) -> None:
    watch_build([sys.executable, "-c", program, str(lock)], os.environ, lock.parents[1], note, watch)


def test_who_is_waited_for_is_said_again_and_again_and_a_dead_one_is_not_waited_for(lock: Path, holder: "subprocess.Popen[bytes]") -> None:
    """Name, command and op of the holder, and how long is left; after its death its lock is removed and the build goes on."""
    notes: list[str] = []

    def note(text: str) -> None:
        notes.append(text)
        if len(notes) == 3:
            time.sleep(LOCAL_LOCK_MIN_AGE_S)
            holder.kill()
            holder.wait()

    watched(lock, WAIT_AND_BUILD, note)
    *waiting, removed = notes
    assert len(waiting) >= 3
    for text in waiting:
        assert f"waiting for process {holder.pid} ({sys.executable} -c import os" in text
        assert "building async_io for" in text
        assert "more at most" in text
    assert removed == f"removed a build lock whose holder has died: {lock}"


def test_a_holder_that_lives_too_long_is_named_and_left_alone(lock: Path, holder: "subprocess.Popen[bytes]") -> None:
    with pytest.raises(EnvironmentUnfit, match=f"took over 1.0 s .*process {holder.pid} "):
        watched(lock, WAIT_AND_BUILD, lambda text: None, BuildWatch(deadline_s=1, say_every_s=10, look_every_s=0.1))
    assert holder.poll() is None
    assert lock.exists()
    assert [process for process in psutil.Process().children() if process.pid != holder.pid] == []


def test_its_own_lock_is_nobody_else_s(lock: Path) -> None:
    """The builder has it open while it compiles: there is nothing to wait for and nothing to say."""
    notes: list[str] = []
    program = HOLD.replace("time.sleep(600)", "time.sleep(1.5)")
    watched(lock, program, notes.append)
    assert notes == []


def test_a_failed_build_says_the_compiler_s_last_words(lock: Path) -> None:
    program = "import sys; print('building'); print('fatal error: libaio.h', file=sys.stderr); sys.exit(2)"
    with pytest.raises(EnvironmentUnfit, match=r"building \| fatal error: libaio.h"):
        watched(lock, program, lambda text: None)


def test_a_compiler_that_is_left_behind_holds_nobody_up(lock: Path) -> None:
    """It has the builder's output open; the end of the builder is what counts."""
    program = "import subprocess; print(subprocess.Popen(['sleep', '600'], start_new_session=True).pid); raise SystemExit('over')"
    started_s = time.monotonic()
    with pytest.raises(EnvironmentUnfit, match="over") as caught:
        watched(lock, program, lambda text: None)
    os.kill(int(str(caught.value).split(": ")[1].split(" |")[0]), signal.SIGKILL)
    assert time.monotonic() - started_s < 30


@pytest.mark.parametrize("how", ["killed", "let go"])
def test_a_builder_and_its_compilers_end_with_their_owner(how: str) -> None:
    """Compilers stand in groups of their own, as ninja puts them. The owner is killed, or lets go of the builder's standard input."""
    with subprocess.Popen([sys.executable, "-c", OWNER], stdin=subprocess.PIPE, stdout=subprocess.PIPE) as owner:
        assert owner.stdout is not None
        assert owner.stdin is not None
        builder = psutil.Process(int(owner.stdout.readline()))
        family = [builder]
        while len(family) < 3:  # the shell and its sleep
            family = [builder, *builder.children(recursive=True)]
            time.sleep(0.05)
        if how == "killed":
            owner.kill()
        else:
            owner.stdin.write(b"\n")
            owner.stdin.flush()
        _, alive = psutil.wait_procs(family, timeout=20)
        owner.kill()
    assert [process for process in alive if process.status() != psutil.STATUS_ZOMBIE] == []
