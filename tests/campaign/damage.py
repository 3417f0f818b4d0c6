"""Damages every file that a run and its caches consist of. What follows is the same weights, or a documented refusal; never anything else.

    python tests/campaign/damage.py --seed 7 --cases 400             looked at: verify, list, status, report, policy replay
    python tests/campaign/damage.py --seed 7 --cases 20 --train      trained on to the end, on one fork server

Each case is drawn from its own number, so that one replays with its number as the seed and `--cases 1`.
"""

import argparse
import contextlib
import io
import json
import os
import random
import shutil
import sys
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

from law import DOCUMENTED, Broken, Case, try_cases
from mutations import PLACES, bent_bytes, bent_document, copy_tree, put_in_place, swap

from flows.commands import policy as policy_commands
from flows.commands import report as report_commands
from flows.commands.checkpoints import list_checkpoints, verify_checkpoints
from flows.commands.inspection.logs import run_logs, told
from flows.commands.inspection.runs import local_row
from mem_core.core.run.run_report import load_report_data
from mem_core.core.run.story import story_line
from mem_core.domain.errors import MemError
from mem_core.domain.request import RuntimeRequest
from mem_core.infrastructure.settings import Settings, child_environment
from mem_core.runtime.ranks.local.processes import ForkServer
from mem_core.testing.driver import drive

STEPS, MORE_STEPS = 12, 20
TRAIN_LIMIT_S = 300.0
OWN_NAMES = ("verdict.json", "signature.json")
GROUPS: tuple[tuple[str, Callable[[str], bool]], ...] = (
    ("journal", lambda name: name.startswith("store/run/journal/")),
    ("record", lambda name: name == "store/run/run.json"),
    ("sealed record", lambda name: name == "store/run/run.sealed.json"),
    ("lease", lambda name: name == "store/run/lease.json" or name.startswith("store/run/leases/")),
    ("manifest", lambda name: name.endswith("/manifest.json")),
    ("verdict", lambda name: name.endswith("/verdict.json")),
    ("model states", lambda name: name.endswith("model_states.pt")),
    ("optimizer states", lambda name: name.endswith("optim_states.pt")),
    ("metrics", lambda name: name.startswith("store/run/metrics/")),
    ("tensorboard", lambda name: name.startswith("store/run/tensorboard/")),
    ("logs", lambda name: name.startswith("store/run/logs/")),
    ("report", lambda name: name.endswith(("report.html", "result.json"))),
    ("cached hashes", lambda name: name.endswith("file-hashes.json")),
    ("cached result", lambda name: name.startswith("home/data/") and name.endswith("data.json")),
    ("cached index", lambda name: name.startswith("home/data/") and name.endswith(("index.json", ".i32", ".i64"))),
    ("cached tokens", lambda name: name.startswith("home/data/") and name.endswith(".bin")),
)
"""What a file is to the run, by its path below the site."""


@dataclass(frozen=True)
class Site:
    """A run of 12 steps with its caches, and the weights that it has after 20 when nobody disturbs it."""

    folder: Path
    server: ForkServer
    weights_digest: str = ""

    @property
    def base(self) -> Path:
        """What cases are copies of."""
        return self.folder / "base"

    def request(self, place: Path, max_steps: int) -> RuntimeRequest:
        """The run, whose store lies in `place`."""
        return RuntimeRequest.model_validate(
            {
                "run_id": "run", "store": str(place / "store"), "device": "cpu", "model": {"source": "preset:llama-nano"},
                "data": {"train": [str(self.folder / "rows.txt")], "validation": None, "sequence_length": 32},
                "training": {
                    "max_steps": max_steps, "segment_steps": 4, "global_batch_size": 4, "warmup_steps": 2, "schedule_steps": MORE_STEPS,
                },
                "checkpoint": {"keep_last": 3},
            }
        )  # fmt: skip

    def train(self, place: Path, max_steps: int) -> str:
        """Go on in `place` with its own caches; returns the weights digest."""
        settings = replace(Settings.from_environment(), mem_home=place / "home")
        result = drive(self.request(place, max_steps), settings=settings, server=self.server)
        if (result.status, result.applied_steps) != ("completed", max_steps):
            raise Broken(f"it ended as {result.status} after {result.applied_steps} steps")
        return result.weights_digest

    def files(self) -> dict[str, list[str]]:
        """Files of the base by what they are, sorted."""
        found: dict[str, list[str]] = {}
        for path in sorted(path for path in self.base.rglob("*") if path.is_file()):
            name = path.relative_to(self.base).as_posix()
            group = next((label for label, fits in GROUPS if fits(name)), None)
            if group is not None:
                found.setdefault(group, []).append(name)
        return found


def make_site(folder: Path, server: ForkServer) -> Site:
    """Train the base, and a copy of it to the end."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "rows.txt").write_text("".join(f"Row {number} says {number * number} in words of its own.\n" for number in range(800)))
    site = Site(folder, server)
    site.train(site.base, STEPS)
    run = site.base / "store" / "run"
    report_commands.run_report(run)
    (run / "logs").mkdir(exist_ok=True)
    (run / "logs" / "rank-0.log").write_text("a word of a worker\n" * 100)  # ranks that have nothing to say leave none
    copy_tree(site.base, folder / "twin")
    weights_digest = site.train(folder / "twin", MORE_STEPS)
    shutil.rmtree(folder / "twin")
    return replace(site, weights_digest=weights_digest)


# -- damages ----------------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Target:
    """A file of a copy that is about to be damaged, and its kin: files that are the same to the run."""

    place: Path
    path: Path
    kin: tuple[Path, ...]

    def rewrite(self, content: bytes) -> None:
        """A file of its own: copies may share their bytes with the base."""
        self.path.unlink()
        self.path.write_bytes(content)


Damage = Callable[[random.Random, Target], None]


def _bend(draw: random.Random, target: Target) -> None:
    target.rewrite(bent_bytes(draw, target.path.read_bytes()))


def _edit(draw: random.Random, target: Target) -> None:
    """One JSON value, or one of a journal's lines."""
    content = target.path.read_bytes()
    if target.path.suffix != ".jsonl":
        return target.rewrite(bent_document(draw, content))
    lines = content.splitlines(keepends=True)
    number = draw.randrange(len(lines))
    return target.rewrite(b"".join((*lines[:number], bent_document(draw, lines[number]), b"\n", *lines[number + 1 :])))


def _truncate(draw: random.Random, target: Target) -> None:
    content = target.path.read_bytes()
    target.rewrite(content[: draw.choice((0, 1, len(content) // 2, max(0, len(content) - 1), draw.randrange(len(content) + 1)))])


def _swap(draw: random.Random, target: Target) -> None:
    """With a file of its kin; a checkpoint's files also with the whole folder of another."""
    others = [path for path in target.kin if path != target.path]
    if not others:
        return _bend(draw, target)
    other = draw.choice(others)
    if target.path.parent.name.startswith("step-") and draw.random() < 0.4:
        return swap(target.path.parent, other.parent)
    return swap(target.path, other)


def _take_over(draw: random.Random, target: Target) -> None:
    """The content of another file of its kin."""
    others = [path for path in target.kin if path != target.path]
    target.rewrite(draw.choice(others).read_bytes() if others else b"")


def _hide(draw: random.Random, target: Target) -> None:
    """The file, or the folder that it lies in, away or under another name."""
    inside = target.path.parent != target.place / "store" / "run"
    hidden = target.path.parent if inside and draw.random() < 0.4 else target.path
    if draw.random() < 0.5:
        hidden.rename(hidden.with_name(f".{hidden.name}.away"))
    elif hidden.is_dir():
        shutil.rmtree(hidden)
    else:
        hidden.unlink()


def _double(draw: random.Random, target: Target) -> None:
    """A copy beside it, as file managers and sync programs make them."""
    path = target.path
    names = (f"{path.stem} (copy){path.suffix}", f"{path.name}.bak", f"{path.stem}.sync-conflict-1{path.suffix}", f".{path.name}.swp")
    shutil.copyfile(path, path.with_name(draw.choice(names)))


def _replace(draw: random.Random, target: Target) -> None:
    put_in_place(draw, target.path, draw.choice(PLACES), list(target.kin))


DAMAGES: dict[str, Damage] = {
    "bend": _bend, "edit": _edit, "truncate": _truncate, "swap": _swap, "take over": _take_over, "hide": _hide, "double": _double,
    "replace": _replace,
}  # fmt: skip


def damaged_copy(site: Site, files: dict[str, list[str]], seed: int, place: Path, *, linked: bool) -> None:
    """A copy of the base in `place` with one damage. `linked`: it shares its bytes with the base, for whoever only looks."""
    group, damage, draw = drawn(files, seed)
    shutil.rmtree(place, ignore_errors=True)
    shutil.copytree(site.base, place, copy_function=os.link if linked else shutil.copy2)
    kin = tuple(place / name for name in files[group])
    DAMAGES[damage](draw, Target(place, draw.choice(kin), kin))


def drawn(files: dict[str, list[str]], seed: int) -> tuple[str, str, random.Random]:
    """(what is damaged, how, the random numbers for the rest) of a case: every pair of them comes up before one comes twice."""
    pairs = [(group, damage) for group in sorted(files) for damage in DAMAGES]
    random.Random("pairs").shuffle(pairs)
    return (*pairs[seed % len(pairs)], random.Random(f"damage-{seed}"))


# -- what is done with it ---------------------------------------------------------------------------------------------------------


def look(site: Site, files: dict[str, list[str]], seed: int) -> str:
    """Every verb that reads, one after the other; none keeps the next from being tried. Only sound bytes are called good."""
    place = site.folder / "case"
    damaged_copy(site, files, seed, place, linked=True)
    folder = place / "store" / "run"
    said = io.StringIO()
    codes = [_code(verb, folder, said) for verb in LOOKS]
    verdicts = said.getvalue().splitlines()
    only_sound_ones_are_good(site, folder, json.loads(verdicts[0]) if verdicts else [])
    refused = sorted({code for code in codes if code})
    return f"refused {refused[0]}" if refused else "told"


def _verify(folder: Path, said: io.StringIO) -> int:
    with contextlib.redirect_stdout(said):
        return verify_checkpoints(folder, as_json=True, settings=Settings.from_environment({"MEM_HOME": "/nonexistent"}))


def _replay(folder: Path, said: io.StringIO) -> int:
    answer = policy_commands.replay_decisions(policy_commands.read_journal_files(folder))
    json.dumps(answer.report)
    return 0 if answer.exit_code == 70 else answer.exit_code  # its documented code for "not as recorded"


def _rest(folder: Path, said: io.StringIO) -> int:
    load_report_data(folder)
    report_commands.run_status(folder).model_dump_json()
    list(run_logs(folder))
    [story_line(line) for line in told(folder)[0]]
    local_row(folder)
    policy_commands.explain_run(policy_commands.read_journal_files(folder))
    return list_checkpoints(folder, as_json=True, settings=Settings.from_environment({"MEM_HOME": "/nonexistent"}))


def _status(folder: Path, said: io.StringIO) -> int:
    report_commands.run_status_text(folder)
    return 0


LOOKS: tuple[Callable[[Path, io.StringIO], int], ...] = (_verify, _status, _replay, _rest)


def _code(verb: Callable[[Path, io.StringIO], int], folder: Path, said: io.StringIO) -> int:
    try:
        return verb(folder, said)
    except MemError as exc:
        if exc.exit_code not in DOCUMENTED or not exc.remedy:
            raise
        return exc.exit_code


def only_sound_ones_are_good(site: Site, folder: Path, verdicts: list[dict[str, Any]]) -> None:
    """Raises Broken where verify calls a checkpoint good of which a file is not the one that was written."""
    for verdict in verdicts:
        if not verdict["valid"]:
            continue
        name = f"checkpoints/step-{verdict['step']:09d}"
        for path in sorted((site.base / "store" / "run" / name).iterdir()):
            here = folder / name / path.name
            if path.name not in OWN_NAMES and (here.is_symlink() or not here.is_file() or here.read_bytes() != path.read_bytes()):
                raise Broken(f"verify calls step {verdict['step']} good, and its {path.name} is another")


def train_on(site: Site, files: dict[str, list[str]], seed: int) -> str:
    """Go on to the end: with the very weights of a run that was left in peace, and nothing else."""
    place = site.folder / "case"
    damaged_copy(site, files, seed, place, linked=False)
    weights_digest = site.train(place, MORE_STEPS)
    if weights_digest != site.weights_digest:
        raise Broken("it ends with other weights")
    return "same weights"


def cases(site: Site, seeds: range, *, train: bool = False) -> Iterator[Case]:
    """One for each seed: looked at, or trained on."""
    files = site.files()
    for seed in seeds:
        group, damage, _ = drawn(files, seed)
        again = f"python tests/campaign/damage.py --seed {seed} --cases 1{' --train' if train else ''}"
        run = partial(train_on if train else look, site, files, seed)
        yield Case(f"{damage} {group} {seed}", f"{group}: {damage}", again, run, TRAIN_LIMIT_S if train else None)


@contextlib.contextmanager
def running_server(folder: Path) -> Iterator[ForkServer]:
    """torch, deepspeed and transformers imported once for all cases."""
    server = ForkServer.start(child_environment(Settings.from_environment(), device="cpu"), folder)
    try:
        yield server
    finally:
        server.close()


def main() -> int:
    """Run, print the table; 1 where any case broke the law."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seed", type=int, default=0, help="number of the first case")
    parser.add_argument("--cases", type=int, default=200)
    parser.add_argument("--train", action="store_true", help="train each to its end instead of looking at it")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder, running_server(Path(folder) / "server") as server:
        site = make_site(Path(folder) / "site", server)
        tally = try_cases(cases(site, range(arguments.seed, arguments.seed + arguments.cases), train=arguments.train))
    print(tally.table())
    return 1 if tally.broken else 0


if __name__ == "__main__":
    sys.exit(main())
