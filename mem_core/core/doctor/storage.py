"""Where the run keeps things: store, disk, inodes, shared memory, data, and whoever is already there."""

import time

from mem_core.core.doctor.keeping import BESIDE_THE_LAST, kept_words, num_held
from mem_core.domain.capabilities import convertible_stages, is_convertible
from mem_core.domain.environment import DataNumbers, Finding, MachineObservations
from mem_core.domain.request import MAX_SEGMENTS, RuntimeRequest
from mem_core.domain.units import format_bytes

# What DeepSpeed's shared-memory collectives map for each rank: 2 x 1 MiB + 2 x 32 MiB (its shm.cpp), rounded up.
SHARED_MEMORY_PER_RANK_BYTES = 67 * 2**20
# A save is allowed to be this much larger than the last one before the disk counts as too full.
CHECKPOINT_GROWTH = 1.2
_FILES_PER_CHECKPOINT = 8
# Prefect's database of a run, and the log of a long one.
SMALLEST_FILE_LIMIT_BYTES = 64 * 2**20


def store_findings(request: RuntimeRequest, seen: MachineObservations) -> tuple[Finding, ...]:
    """Can the store be written, read and cleaned; where is it really."""
    store = seen.store
    where = store.location + (f" at {store.endpoint}" if store.endpoint else "")
    if store.problem:
        return (
            Finding(
                check="store",
                severity="failure",
                observed=f"{where}: {store.problem}",
                needed="a store that can be written, read and deleted from",
                remedy=_store_remedy(store.local),
                exit_code=73,
            ),
        )
    relative = Finding(
        check="store.location",
        severity="notice",
        observed=f"{request.store} is relative and means {store.location} here",
        remedy="Use an absolute path or a URL where a run may be continued from another folder.",
    )
    written = Finding(check="store", severity="ok", observed=f"{where}: written, read and deleted a probe")
    return (written, relative) if store.relative else (written,)


def _store_remedy(local: bool) -> str:
    if local:
        return "Free space or fix permissions there, or set store to another folder."
    return "Check the URL, the endpoint and the keys, which come from the environment or a Prefect block."


def mirror_findings(seen: MachineObservations) -> tuple[Finding, ...]:
    """The second copy. A run asks it first whether it holds that run already, and cannot begin without an answer; one that has
    checkpoints of its own goes on without it."""
    mirror = seen.mirror
    if mirror is None or not mirror.problem:
        return ()
    begun = seen.saved is not None
    return (
        Finding(
            check="checkpoint.mirror",
            severity="warning" if begun else "failure",
            observed=f"{mirror.location}: {mirror.problem}",
            needed="a place that can be written, read and deleted from",
            remedy=_store_remedy(mirror.local).replace("set store to another folder", "set checkpoint.mirror to another place"),
            exit_code=0 if begun else 73,
        ),
    )


def home_findings(seen: MachineObservations) -> tuple[Finding, ...]:
    """Every start writes there: token shards, compiled ops, logs, the server's database."""
    if not seen.home_problem:
        return ()
    return (
        Finding(
            check="home",
            severity="failure",
            observed=f"MEM's caches in {seen.home} cannot be used: {seen.home_problem}",
            needed="a folder that can be written, read and deleted from",
            remedy="Set MEM_HOME to such a folder.",
            exit_code=69,
        ),
    )


def file_size_findings(seen: MachineObservations, checkpoint_bytes: int | None) -> tuple[Finding, ...]:
    """A limit on the length of files ends a run at its first save, or Prefect's database before that."""
    limit, needed = seen.file_size_limit_bytes, max(SMALLEST_FILE_LIMIT_BYTES, checkpoint_bytes or 0)
    if limit is None or limit >= needed:
        return ()
    return (
        Finding(
            check="file_size",
            severity="failure",
            observed=f"files of at most {format_bytes(limit)} may be written (ulimit -f)",
            needed=f"{format_bytes(needed)} for a checkpoint, logs and Prefect's database",
            remedy="Raise the limit: ulimit -f unlimited.",
            exit_code=73,
        ),
    )


def disk_findings(request: RuntimeRequest, seen: MachineObservations, checkpoint_bytes: int | None) -> tuple[Finding, ...]:
    """Bytes and inodes for the checkpoints that will exist at the same time: those kept, one staged, one not yet judged.

    A run that goes on needs room at once for the latter two alone. What `keep_every_steps` adds up until its end is a warning then:
    somebody may take older ones elsewhere meanwhile.
    """
    folder = seen.store_folder
    if folder is None:
        return ()
    saved_step = seen.saved.step if seen.saved else None
    copies = num_held(request, saved_step)
    at_once = BESIDE_THE_LAST if seen.saved else copies
    one = max(checkpoint_bytes or 0, int((seen.saved.checkpoint_bytes if seen.saved else 0) * CHECKPOINT_GROWTH))
    findings: list[Finding] = []
    if one:
        needed = copies * one
        fails = folder.free_bytes < at_once * one
        findings.append(
            Finding(
                check="disk",
                severity="failure" if fails else "ok" if folder.free_bytes >= needed else "warning",
                observed=f"{format_bytes(folder.free_bytes)} free at {folder.path}",
                needed=f"{format_bytes(needed)}: {copies} checkpoints of {format_bytes(one)}{kept_words(request, saved_step, one)}",
                remedy="" if folder.free_bytes >= needed else _disk_remedy(request),
                exit_code=73 if fails else 0,
            )
        )
    if folder.free_inodes is not None:
        segments = min(MAX_SEGMENTS, -(-request.training.max_steps // request.effective_segment_steps))
        needed = at_once * (_FILES_PER_CHECKPOINT + 2 * request.parallel.num_ranks) + segments + 100
        enough = folder.free_inodes >= needed
        findings.append(
            Finding(
                check="inodes",
                severity="ok" if enough else "failure",
                observed=f"{folder.free_inodes} free inodes at {folder.path}",
                needed=f"about {needed} files",
                remedy="" if enough else "Delete small files there, or set store to another filesystem.",
                exit_code=0 if enough else 73,
            )
        )
    return tuple(findings)


def _disk_remedy(request: RuntimeRequest) -> str:
    rarer = "raise checkpoint.keep_every_steps, " if request.checkpoint.keep_every_steps is not None else ""
    return f"Free space, lower checkpoint.keep_last, {rarer}or set store to a larger disk."


def shared_memory_findings(request: RuntimeRequest, seen: MachineObservations, device: str) -> tuple[Finding, ...]:
    """Room in /dev/shm for ranks that exchange through it; a container's default of 64 MiB would end in SIGBUS.

    A warning only: MEM's CPU ranks use gloo, and NCCL falls back to other ways, at a price.
    """
    ranks = request.parallel.num_ranks
    if ranks < 2:
        return ()
    needed, folder = ranks * SHARED_MEMORY_PER_RANK_BYTES, seen.shared_memory
    enough = folder is not None and folder.free_bytes >= needed
    return (
        Finding(
            check="shared_memory",
            severity="ok" if enough else "warning",
            observed=f"{format_bytes(folder.free_bytes)} free at {folder.path}" if folder else "no /dev/shm",
            needed=f"{format_bytes(needed)} for {ranks} {device} ranks, should they exchange through it",
            remedy="" if enough else "Give the container more (docker run --shm-size), or clear old files there.",
        ),
    )


def data_findings(data: DataNumbers) -> tuple[Finding, ...]:
    """A first look at the inputs. None usable is a failure, one empty among several a warning."""
    bad = [f"{file.path}: {file.problem}" for file in data.files if file.problem]
    problems = [*data.problems, *bad]
    full = [file for file in data.files if file.size_bytes > 0 and not file.problem]
    empty = [file.path for file in data.files if file.size_bytes == 0 and not file.problem]
    if problems or not (full or data.refusal is not None):
        observed = _some(problems) if problems else f"no data: {_some(empty) or 'no file'} {'is' if len(empty) == 1 else 'are'} empty"
        return (
            Finding(
                check="data",
                severity="failure",
                observed=observed,
                needed="files that exist, can be read and hold text",
                remedy="Correct data.train and data.validation, or the files that they name.",
                exit_code=66,
            ),
        )
    if data.refusal is not None:
        refused = data.refusal
        return (
            Finding(
                check="data.rows", severity="failure", observed=refused.problem, needed=refused.bound, remedy=refused.remedy,
                exit_code=refused.exit_code,
            ),
            *_remarks(data),
        )  # fmt: skip
    if not full:
        return ()  # only what the table of capabilities refuses
    total = sum(file.size_bytes for file in full)
    findings = [Finding(check="data", severity="ok", observed=f"{len(full)} file{'s' if len(full) > 1 else ''}, {format_bytes(total)}")]
    if empty:
        findings.append(
            Finding(
                check="data.empty",
                severity="warning",
                observed=f"empty: {_some(empty)}",
                remedy="Remove the empty files from data.train if they should hold rows.",
            )
        )
    return (*findings, *_remarks(data))


def _remarks(data: DataNumbers) -> tuple[Finding, ...]:
    return tuple(
        Finding(check=remark.check, severity=remark.severity, observed=remark.text, remedy=remark.remedy) for remark in data.remarks
    )


def occupant_findings(request: RuntimeRequest, seen: MachineObservations) -> tuple[Finding, ...]:
    """Another holder of the run, what it saved, and what it left running."""
    findings: list[Finding] = []
    holder = seen.holder
    if holder is not None and holder.alive:
        expiry = f", its lease ends in {holder.expires_in_s:.0f} s" if holder.expires_in_s is not None else ""
        moment = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(holder.since_unix_s)) if holder.since_unix_s is not None else ""
        since = f" since {moment}" if moment else ""
        store = "" if request.store == "./runs" else f" --store {request.store}"
        findings.append(
            Finding(
                check="holder",
                severity="failure",
                observed=f"{holder.owner} holds run {request.run_id}{since} (attempt {holder.attempt}){expiry}",
                needed="one writer per run",
                remedy=f"Wait for it, stop it with mem stop {request.run_id}{store}, or choose another run_id.",
                exit_code=76,
            )
        )
    elif holder is not None:
        findings.append(
            Finding(check="holder", severity="notice", observed=f"{holder.owner} held the run (attempt {holder.attempt}) and is gone")
        )
    if seen.leftovers and not (holder is not None and holder.alive):
        findings.append(
            Finding(
                check="leftovers",
                severity="warning",
                observed=f"still alive from an earlier attempt: {_some(list(seen.leftovers))}",
                remedy="They hold memory and cores; end them if they are not yours to keep. MEM does not end what it did not start.",
            )
        )
    saved = seen.saved
    if saved is not None and (saved.num_ranks, saved.zero_stage) != (request.parallel.num_ranks, request.parallel.zero_stage):
        findings.append(_saved_finding(request, saved.num_ranks, saved.zero_stage, saved.step))
    return tuple(findings)


def _saved_finding(request: RuntimeRequest, num_ranks: int, zero_stage: int, step: int) -> Finding:
    """Optimizer shards fit the rank count and stage that they were written by; DeepSpeed says so only deep inside a load."""
    asked = request.parallel
    convertible = is_convertible(zero_stage, asked.zero_stage)
    convert = " or let the checkpoint be converted and proven: mem train REQUEST --allow-reshard;" if convertible else ""
    only = "" if convertible else f"; it can be converted to stage {convertible_stages(zero_stage)}"
    return Finding(
        check="saved_layout" if convertible else "saved_stage",
        severity="failure",
        observed=f"asked for {asked.num_ranks} ranks at ZeRO stage {asked.zero_stage}",
        needed=f"{num_ranks} ranks at ZeRO stage {zero_stage}, as the checkpoint of step {step} was saved{only}",
        remedy=(
            f"Set parallel.num_ranks: {num_ranks} and parallel.zero_stage: {zero_stage} to go on;{convert} "
            "or start another run_id from the exported weights, with a new optimizer state."
        ),
        exit_code=64,
    )


def _some(values: list[str], most: int = 3) -> str:
    more = f" and {len(values) - most} more" if len(values) > most else ""
    return "; ".join(values[:most]) + more
