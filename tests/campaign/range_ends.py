"""Whether MEM works at both ends of the version ranges that `pyproject.toml` allows, as far as the package index has them.

    python tests/campaign/range_ends.py --package transformers --end low

For each end a temporary environment is made that sees the libraries of the one this runs in; the package is installed into it in that
version, with whatever it needs otherwise, and a short selection of tests runs there. The environment is deleted afterwards. Torch brings
its CUDA libraries along: some 5 GB for as long as its tests run. Digests are promised per version, so that none is compared here.
"""

import argparse
import re
import subprocess
import sys
import sysconfig
import tempfile
import tomllib
import venv
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

from packaging.requirements import Requirement
from packaging.specifiers import SpecifierSet
from packaging.version import Version

ROOT = Path(__file__).parents[2]
_TRAINING = (
    "tests/integration/test_main_job_equality.py", "tests/integration/test_models_build.py", "tests/integration/test_evaluation.py",
    "tests/integration/test_checkpoint_export.py", "tests/unit/test_adapters.py", "tests/unit/test_chat_masks.py",
)  # fmt: skip
_FLOWS = (
    "tests/unit/test_prefect_request.py", "tests/unit/test_prefect_parameters.py", "tests/unit/test_prefect_serving.py",
    "tests/unit/test_prefect_view.py", "tests/integration/test_embedded_server.py", "tests/e2e/test_prefect_runs.py",
    "tests/e2e/test_main_job_command.py",
)  # fmt: skip
SELECTIONS: dict[str, Sequence[str]] = {"torch": _TRAINING, "transformers": _TRAINING, "prefect": _FLOWS}
"""Package -> the tests that lean on it most, in some minutes."""
_SCRIPTS = {"prefect": "from prefect.cli import app\napp()", "mem": "import sys\nfrom flows.cli import main\nsys.exit(main())"}
Ask = Callable[..., str]


@dataclass(frozen=True, slots=True)
class End:
    """One end of a range: the lowest or the highest version that the index has of it."""

    package: str
    name: str
    version: str


def allowed_versions(package: str) -> SpecifierSet:
    """The range of `pyproject.toml`. Raises KeyError: the package is not among its dependencies."""
    listed = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["dependencies"]
    return {requirement.name: requirement.specifier for requirement in map(Requirement, listed)}[package]


def versions_listed(answer: str) -> list[str]:
    """The versions in what `pip index versions` prints; builds with a label of their own, such as +cpu, count as the release."""
    found = re.search(r"^Available versions: (.+)$", answer, re.MULTILINE)
    return list(dict.fromkeys(version.split("+")[0] for version in found.group(1).split(", "))) if found else []


def ends_of(package: str, specifier: SpecifierSet, versions: Iterable[str]) -> list[End]:
    """Lowest and highest of the versions that the range allows; one of them where both are the same, none where there is none."""
    inside = sorted((version for version in versions if version in specifier and not Version(version).is_prerelease), key=Version)
    named = {"low": inside[0], "high": inside[-1]} if inside else {}
    return [End(package, name, version) for name, version in named.items() if name == "low" or version != inside[0]]


def run_pip(*arguments: str, python: str = sys.executable) -> str:
    """What pip prints. Raises CalledProcessError."""
    return subprocess.run([python, "-m", "pip", *arguments], check=True, capture_output=True, text=True).stdout


def tried(end: End, folder: Path) -> bool:
    """Install that version below `folder` and run its tests there; whether they pass. What they print is shown."""
    python = made_environment(folder)
    print(f"== {end.package} {end.version} ({end.name} end)", flush=True)
    try:
        run_pip("install", "-q", "--no-cache-dir", f"{end.package}=={end.version}", python=str(python))
    except subprocess.CalledProcessError as exc:
        print(f"cannot be installed: {exc.stderr[-1_000:]}", flush=True)
        return False
    asked = f"from importlib.metadata import version; print(version({end.package!r}))"
    seen = subprocess.run([python, "-c", asked], check=True, capture_output=True, text=True).stdout.strip()
    if seen.split("+")[0] != end.version:
        raise AssertionError(f"{end.package} {seen} is what would be tested, not {end.version}")
    command = [python, "-m", "pytest", "-q", "-m", "not slow and not gpu", "-W", "default", *SELECTIONS[end.package]]
    return subprocess.run(command, cwd=ROOT, check=False).returncode == 0


def made_environment(folder: Path) -> Path:
    """The interpreter of a new environment that looks for libraries in itself first, then where this process has them, then here."""
    venv.create(folder, with_pip=True)
    (packages,) = (folder / "lib").glob("python3.*/site-packages")
    (packages / "libraries.pth").write_text(f"{sysconfig.get_path('purelib')}\n{ROOT}\n")
    programs = folder / "bin"
    (programs / "ninja").symlink_to(Path(sys.executable).with_name("ninja"))
    for name, lines in _SCRIPTS.items():
        (programs / name).write_text(f"#!{programs}/python\n{lines}\n")
        (programs / name).chmod(0o755)
    return programs / "python"


def main(argv: Sequence[str] | None = None, ask: Ask = run_pip) -> int:
    """Try them, one after the other; 1 where any fails or the index has none."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--package", choices=[*SELECTIONS, "all"], default="all")
    parser.add_argument("--end", choices=["low", "high", "both"], default="both")
    parser.add_argument("--list", action="store_true", help="only say which versions would be tried")
    arguments = parser.parse_args(argv)
    failed: list[str] = []
    for package in SELECTIONS if arguments.package == "all" else (arguments.package,):
        ends = ends_of(package, allowed_versions(package), versions_listed(ask("index", "versions", package)))
        if not ends:
            failed.append(f"{package}: the index has none of {allowed_versions(package)}")
        for end in ends:
            words = f"{package} {end.version} ({end.name} end of {allowed_versions(package)})"
            if arguments.list:
                print(words)
            elif arguments.end in (end.name, "both"):
                with tempfile.TemporaryDirectory(prefix="mem-ends-") as folder:
                    passed = tried(end, Path(folder))
                print(f"{'passed' if passed else 'FAILED'}: {words}", flush=True)
                failed += [] if passed else [words]
    print("\n".join(f"not good: {line}" for line in failed))
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
