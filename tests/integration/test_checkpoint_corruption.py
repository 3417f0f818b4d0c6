"""Real DeepSpeed checkpoints, damaged in seeded ways: every damage is found, nothing hostile is run, nothing sound is refused."""

import os
import pickle
import random
import shutil
import zipfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from zero_checkpoint_maker import launch

from mem_core.domain.checkpoint import CheckpointDraft, CheckpointExpectation, TrainingPosition
from mem_core.domain.errors import NoValidCheckpoint
from mem_core.domain.request import CheckpointSection
from mem_core.runtime.checkpoint_manager import CheckpointManager, IntegrityValidator, scan_torch_file
from mem_core.runtime.checkpoint_manager.inspection.manifest_codec import encode_manifest, sha256_hex
from mem_core.runtime.checkpoint_manager.ports import CheckpointScope
from mem_core.testing.checkpoint_run import manager_of

pytestmark = [pytest.mark.integration, pytest.mark.timeout(600)]
KINDS = ("bit flip", "truncation", "zeroed page", "zero-filled", "missing", "swapped", "emptied", "longer", "older version")


@dataclass(frozen=True)
class Saved:
    """Engine files of two steps as DeepSpeed wrote them."""

    folder: Path
    num_ranks: int
    zero_stage: int
    parameters: dict[str, tuple[int, ...]]

    def manager(self, run_folder: Path, attempt: int = 1, **options: Any) -> CheckpointManager:
        expectation = CheckpointExpectation(num_ranks=self.num_ranks, zero_stage=self.zero_stage, parameters=self.parameters)
        scope = CheckpointScope(run_folder, "demo", attempt, CheckpointSection(), expectation)
        return manager_of(scope, options.pop("validator", IntegrityValidator()), **options)

    def commit(
        self, manager: CheckpointManager, step: int, change: Callable[[Path], None] = lambda staging: None, digest: str = ""
    ) -> None:
        staging = manager.new_staging(step)
        shutil.copytree(self.folder / f"step-{step}", staging, dirs_exist_ok=True)
        change(staging)
        position = TrainingPosition(applied_steps=step, batch_index=step)
        manager.commit(step, staging, CheckpointDraft(position=position, weights_digest=digest or f"digest-{step}"))


def make(folder: Path, zero_stage: int, num_ranks: int, dtype: str = "float32") -> Saved:
    shapes = launch(folder, zero_stage, num_ranks, dtype)
    return Saved(folder, num_ranks, zero_stage, {name: tuple(shape) for name, shape in shapes.items()})


@pytest.fixture(scope="module")
def zero2(tmp_path_factory: pytest.TempPathFactory) -> Saved:
    """Two ranks, ZeRO stage 2."""
    return make(tmp_path_factory.mktemp("zero2"), 2, 2)


@pytest.fixture(scope="module")
def committed(zero2: Saved, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run folder with step 2 committed and not yet judged."""
    run_folder = tmp_path_factory.mktemp("committed") / "demo"
    zero2.commit(zero2.manager(run_folder), 2)
    return run_folder


@pytest.fixture(scope="module")
def zero3(tmp_path_factory: pytest.TempPathFactory) -> Saved:
    """Two ranks, ZeRO stage 3."""
    return make(tmp_path_factory.mktemp("zero3"), 3, 2)


def damage(folder: Path, older: Path, seed: int) -> str:
    """Change one thing in a checkpoint folder. Every kind and every file come up; returns what was done."""
    rng = random.Random(seed)
    names = sorted(path.name for path in folder.iterdir() if path.name != "verdict.json")
    kind = KINDS[seed % len(KINDS)]
    name = names[(seed // len(KINDS)) % len(names)]
    path = folder / name
    before = path.read_bytes()
    data = bytearray(before)
    if kind == "bit flip":
        data[rng.randrange(len(data))] ^= 1 << rng.randrange(8)
    elif kind == "truncation":
        data = data[: rng.randrange(1, len(data))]
    elif kind == "zeroed page":
        start = rng.randrange(len(data))
        data[start : start + 512] = bytes(len(data[start : start + 512]))
        data[start] = before[start] ^ 0xFF if bytes(data) == before else data[start]
    elif kind == "zero-filled":
        data = bytearray(len(data))
    elif kind == "emptied":
        data = bytearray()
    elif kind == "longer":
        data += rng.randbytes(rng.randrange(1, 100))
    elif kind == "older version" and (older / name).exists():
        data = bytearray((older / name).read_bytes())
    elif kind == "missing":
        path.unlink()
        return f"{kind} {name}"
    else:
        other = folder / rng.choice([item for item in names if item != name])
        data = bytearray(other.read_bytes())
        other.write_bytes(before)
    assert bytes(data) != before, "the damage must be one"
    path.write_bytes(data)
    return f"{kind} {name}"


def is_found(saved: Saved, run_folder: Path) -> bool:
    """Whether a new attempt refuses to resume from the only checkpoint."""
    try:
        return saved.manager(run_folder, attempt=2).newest_valid() is None
    except NoValidCheckpoint:
        return True


def undetected(saved: Saved, committed: Path, scratch: Path, seeds: range) -> list[str]:
    """Damages that were not found; every other case is damaged after a valid verdict, the rest before any."""
    missed: list[str] = []
    for seed in seeds:
        run_folder = scratch / "demo"
        shutil.copytree(committed, run_folder)
        folder = run_folder / "checkpoints" / "step-000000002"
        if seed % 2:
            assert saved.manager(run_folder).validate(2).valid
        done = damage(folder, saved.folder / "step-1", seed)
        if not is_found(saved, run_folder):
            missed.append(f"seed {seed}: {done}")
        shutil.rmtree(run_folder)
    return missed


def test_200_seeded_damages_are_all_found(zero2: Saved, committed: Path, tmp_path: Path) -> None:
    assert undetected(zero2, committed, tmp_path, range(200)) == []


@pytest.mark.slow
def test_1000_seeded_damages_are_all_found(zero2: Saved, committed: Path, tmp_path: Path) -> None:
    assert undetected(zero2, committed, tmp_path, range(1_000)) == []


def test_every_bit_of_a_manifest_counts(committed: Path, zero2: Saved, tmp_path: Path) -> None:
    """One flip in each byte of the manifest: none is read as a manifest."""
    run_folder = tmp_path / "demo"
    shutil.copytree(committed, run_folder)
    path = run_folder / "checkpoints" / "step-000000002" / "manifest.json"
    whole = path.read_bytes()
    manager = zero2.manager(run_folder)
    accepted = []
    for position in range(len(whole)):
        path.write_bytes(whole[:position] + bytes([whole[position] ^ (1 << position % 8)]) + whole[position + 1 :])
        if manager.listing()[0].state != "invalid":
            accepted.append(position)
    assert accepted == []
    path.write_bytes(whole)
    assert manager.listing()[0].state == "unvalidated"


@pytest.mark.parametrize(
    ("zero_stage", "num_ranks", "dtype"),
    [(0, 1, "float32"), pytest.param(0, 2, "bfloat16", marks=pytest.mark.slow),
     pytest.param(1, 1, "float32", marks=pytest.mark.slow), pytest.param(1, 2, "bfloat16", marks=pytest.mark.slow),
     pytest.param(3, 1, "bfloat16", marks=pytest.mark.slow)],
)  # fmt: skip
def test_sound_checkpoints_of_every_stage_are_valid(zero_stage: int, num_ranks: int, dtype: str, tmp_path: Path) -> None:
    saved = make(tmp_path / "made", zero_stage, num_ranks, dtype)
    manager = saved.manager(tmp_path / "demo")
    for step in (1, 2):
        saved.commit(manager, step)
        assert manager.validate(step).reasons == ()


@pytest.mark.parametrize(("element", "valid"), [(-1, True), (-2, False)], ids=["padding", "weight"])
def test_stage3_padding_may_be_anything_and_weights_may_not(zero3: Saved, tmp_path: Path, element: int, valid: bool) -> None:
    """11 biases on 2 ranks are shares of 6: the last element of rank 1 is memory as it came."""

    def spoil(content: Any) -> None:
        state = content["optimizer_state_dict"]
        state["fp32_flat_groups"][0].data[element] = float("nan")
        state["optimizer_state_dict"]["state"][0]["exp_avg"].data[element] = float("nan")

    manager = zero3.manager(tmp_path / "demo")
    zero3.commit(manager, 2, lambda staging: rewrite(staging / SHARD, spoil))
    assert manager.validate(2).valid == valid


def rewrite(path: Path, change: Callable[[Any], None]) -> None:
    """Load, change and save an engine file the way torch does."""
    import torch

    content = torch.load(path, weights_only=False)
    change(content)
    torch.save(content, path)


def spoil_weights(content: Any) -> None:
    content["module"]["1.weight"][3, 3] = float("nan")


def spoil_moment(content: Any) -> None:
    content["optimizer_state_dict"]["base_optimizer_state"]["state"][0]["exp_avg_sq"][7] = float("inf")


def spoil_master(content: Any) -> None:
    content["optimizer_state_dict"]["single_partition_of_fp32_groups"][0].data[-1] = float("-inf")


def drop_parameter(content: Any) -> None:
    del content["module"]["3.bias"]


def reshape_parameter(content: Any) -> None:
    content["module"]["3.bias"] = content["module"]["3.bias"].reshape(1, -1)


def drop_optimizer(content: Any) -> None:
    content["optimizer_state_dict"]["base_optimizer_state"] = None


def other_rank_count(content: Any) -> None:
    content["optimizer_state_dict"]["partition_count"] = [4]


def test_sound_stage3_checkpoint_is_valid(zero3: Saved, tmp_path: Path) -> None:
    manager = zero3.manager(tmp_path / "demo")
    for step in (1, 2):
        zero3.commit(manager, step)
        assert manager.validate(step).reasons == ()


MODEL, SHARD = "mp_rank_00_model_states.pt", "zero_pp_rank_1_mp_rank_00_optim_states.pt"


@pytest.mark.parametrize(
    ("name", "change", "reason", "weights_bad"),
    [
        (MODEL, spoil_weights, "1.weight is not finite", True),
        (SHARD, spoil_moment, "exp_avg_sq is not finite", True),
        (SHARD, spoil_master, "weights of group 0 is not finite", True),
        (MODEL, drop_parameter, "parameter 3.bias is missing", False),
        (MODEL, reshape_parameter, r"parameter 3.bias has shape [1, 11], the model [11]", False),
        (SHARD, drop_optimizer, "weights only", False),
        (SHARD, other_rank_count, "on [4] ranks", False),
    ],
)
def test_bad_content_with_right_digests_is_found(
    zero2: Saved, tmp_path: Path, name: str, change: Callable[[Any], None], reason: str, weights_bad: bool
) -> None:
    """Digests prove that the bytes are those that were written, not that these were good."""
    manager = zero2.manager(tmp_path / "demo")
    zero2.commit(manager, 2, lambda staging: rewrite(staging / name, change))
    verdict = manager.validate(2)
    assert reason in "; ".join(verdict.reasons)
    assert verdict.weights_bad == weights_bad


def test_unchanged_weights_are_found(zero2: Saved, tmp_path: Path) -> None:
    manager = zero2.manager(tmp_path / "demo")
    zero2.commit(manager, 1, digest="same")
    assert manager.validate(1).valid
    zero2.commit(manager, 2, digest="same")
    verdict = manager.validate(2)
    assert (verdict.valid, verdict.weights_bad) == (False, True)


class Gadget:
    """Pickles to a call of any function."""

    def __init__(self, function: Any, *arguments: Any) -> None:
        self.call = (function, arguments)

    def __reduce__(self) -> Any:
        return self.call


def gadgets(witness: Path) -> dict[str, Any]:
    """Objects that leave `witness` behind when they are unpickled by pickle itself."""
    import runpy
    import subprocess

    import torch

    code = f"open({str(witness)!r}, 'w').close()"
    return {
        "os.system": Gadget(os.system, f"touch {witness}"),
        "exec": Gadget(exec, code),
        "eval": Gadget(eval, code),
        "subprocess": Gadget(subprocess.call, ["touch", str(witness)]),
        "getattr": Gadget(getattr, Gadget(__import__, "os"), "system"),
        "runpy": Gadget(runpy.run_path, str(witness)),
        "torch.load": Gadget(torch.load, str(witness)),
        "open": Gadget(open, str(witness), "w"),
        "pickle.loads": Gadget(pickle.loads, pickle.dumps(Gadget(os.system, f"touch {witness}"))),
    }


def plant(path: Path, gadget: Any) -> None:
    """Hide a gadget among the real content of an engine file."""
    import torch

    content = torch.load(path, weights_only=False)
    content["skipped"] = gadget
    torch.save(content, path)


@pytest.mark.parametrize("position", [MODEL, "zero_pp_rank_0_mp_rank_00_optim_states.pt", SHARD, "extra_state.pt"])
def test_malicious_pickles_in_every_file_are_refused_unrun(zero2: Saved, tmp_path: Path, position: str) -> None:
    """Signed off by a proper manifest, so that only the scan stands between the gadget and the loader."""
    witness = tmp_path / "executed"
    for number, (name, gadget) in enumerate(gadgets(witness).items(), 1):

        def put(staging: Path, gadget: Any = gadget) -> None:
            if not (staging / position).exists():
                shutil.copy(staging / MODEL, staging / position)
            plant(staging / position, gadget)

        manager = zero2.manager(tmp_path / f"run-{number}")
        zero2.commit(manager, 2, put)
        verdict = manager.validate(2)
        assert not verdict.valid, name
        assert position in "; ".join(verdict.reasons), name
        assert not witness.exists(), name


def test_forged_verdict_does_not_open_the_door(zero2: Saved, tmp_path: Path) -> None:
    """Someone who can write the folder writes a verdict too: the scan is repeated before anything is handed out."""
    witness = tmp_path / "executed"
    run_folder = tmp_path / "demo"

    def trusting(folder: Path, manifest: Any, previous: str, level: Any) -> Any:
        clean = tmp_path / "clean"
        good = zero2.manager(clean)
        zero2.commit(good, 2)
        verdict = IntegrityValidator()(good.path_of(2), good.newest_valid(), previous, level)  # type: ignore[arg-type]
        return verdict.model_copy(update={"manifest_sha256": sha256_hex(encode_manifest(manifest))})

    manager = zero2.manager(run_folder, validator=trusting)
    zero2.commit(manager, 2, lambda staging: plant(staging / SHARD, gadgets(witness)["os.system"]))
    assert manager.validate(2).valid
    with pytest.raises(NoValidCheckpoint, match=r"names (posix|os)\.system"):
        zero2.manager(run_folder, attempt=2).newest_valid()
    assert not witness.exists()


def rezip(path: Path, edit: Callable[[zipfile.ZipFile, str], None], compression: int = zipfile.ZIP_STORED) -> None:
    """Write the archive anew and let `edit` add members under its root folder."""
    with zipfile.ZipFile(path) as archive:
        members = [(info.filename, archive.read(info)) for info in archive.infolist()]
    root = members[0][0].split("/", 1)[0]
    with zipfile.ZipFile(path, "w", compression) as archive:
        for name, data in members:
            archive.writestr(name, data)
        edit(archive, root)


@pytest.mark.filterwarnings("ignore:Duplicate name:UserWarning")
@pytest.mark.parametrize(
    ("trick", "reason"),
    [
        (lambda path: rezip(path, lambda archive, root: archive.writestr(f"{root}/constants.pkl", b"x")), "members that torch.save"),
        (lambda path: rezip(path, lambda archive, root: archive.writestr(f"{root}/data.pkl", b"x")), "two members of one name"),
        (lambda path: rezip(path, lambda archive, root: archive.writestr("other/data.pkl", b"x")), "exactly one folder"),
        (lambda path: rezip(path, lambda archive, root: None, zipfile.ZIP_DEFLATED), "compressed"),
        (lambda path: path.write_bytes(b"#!/bin/sh\n" + path.read_bytes()), "bytes before or after"),
        (lambda path: path.write_bytes(pickle.dumps({"module": {}})), "not a readable torch archive"),
        (lambda path: path.write_bytes(b""), "not a readable torch archive"),
    ],
    ids=["torchscript", "twice", "second root", "compressed", "prefixed", "plain pickle", "empty"],
)
def test_archives_that_torch_does_not_write_are_refused(zero2: Saved, tmp_path: Path, trick: Callable[[Path], None], reason: str) -> None:
    """Tricks that make two readers see two things, or make torch run something else than a pickle."""
    path = tmp_path / SHARD
    shutil.copy(zero2.folder / "step-2" / SHARD, path)
    assert scan_torch_file(path) == ()
    trick(path)
    assert reason in "; ".join(scan_torch_file(path))


@pytest.mark.parametrize("kind", ["symlink", "folder", "pipe"])
def test_links_in_place_of_files_are_refused(zero2: Saved, committed: Path, tmp_path: Path, kind: str) -> None:
    """Same bytes behind a link: still no, a checkpoint does not reach out of its folder."""
    run_folder = tmp_path / "demo"
    shutil.copytree(committed, run_folder)
    path = run_folder / "checkpoints" / "step-000000002" / SHARD
    outside = tmp_path / "outside.pt"
    path.rename(outside)
    if kind == "symlink":
        path.symlink_to(outside)
    elif kind == "folder":
        path.mkdir()
    else:
        os.mkfifo(path)
    assert is_found(zero2, run_folder)
    assert outside.exists()
