"""`mem audit`: parts of a run, drawn by seed, trained again by whoever has its folder and its data; a certificate says what came of it."""

import contextlib
import secrets
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from flows.commands.checkpoints import signature_key
from flows.commands.inspection.located import located
from mem_core.core.audit.words import certificate_text, verdict_words
from mem_core.core.run.record import record_of
from mem_core.domain.errors import EnvironmentUnfit, RequestError
from mem_core.domain.printable import printable
from mem_core.domain.results.audit import AuditCertificate
from mem_core.infrastructure.settings import Settings
from mem_core.infrastructure.storage.opening import open_store
from mem_core.infrastructure.storage.whole_file import write_atomically
from mem_core.runtime.proof.audit.audit_service import AuditOrder, audit_run
from mem_core.runtime.proof.audit.kept import Kept, LocalKept, RemoteKept

SEGMENTS = 3
MOST_SEGMENTS = 1_000
NOT_EQUAL = 1


@dataclass(frozen=True)
class AuditWish:
    """What was typed. Without a seed one is drawn, which the certificate names; without `output` it is written here as audit-RUN.json."""

    run: str
    store: str
    num_segments: int = SEGMENTS
    seed: int | None = None
    output: Path | None = None


def audit(wish: AuditWish, as_json: bool, settings: Settings | None = None) -> int:
    """Issue the certificate; the exit code is `exit_code` of it.

    Raises:
        RequestError, DataError, NoValidCheckpoint, StoreUnavailable: as `audit_run`, or the certificate cannot be written.
    """
    settings = settings or Settings.from_environment()
    if not 1 <= wish.num_segments <= MOST_SEGMENTS:
        raise RequestError("so many segments cannot be drawn", field="--segments", value=wish.num_segments, bound=f"1 to {MOST_SEGMENTS}",
                           remedy="Give another number.")  # fmt: skip
    seed = secrets.randbelow(2**31) if wish.seed is None else wish.seed
    with opened(wish, settings) as (folder, place, kept):
        output = _output(wish, folder)
        certificate = audit_run(AuditOrder(folder, kept, place, wish.num_segments, seed), settings, _say)
    text = certificate_text(certificate)
    write_atomically(output, certificate.model_dump_json(indent=1) + "\n")
    write_atomically(output.with_suffix(".txt"), text)
    print(printable(text), end="", file=sys.stderr)
    print(f"certificate: {output} and {output.with_suffix('.txt').name}", file=sys.stderr)
    if as_json:
        print(certificate.model_dump_json())
    code = exit_code(certificate)
    if code == EnvironmentUnfit.exit_code:
        _said_unfit(certificate)
    return code


def exit_code(certificate: AuditCertificate) -> int:
    """0: all is equal. 1: something speaks against the run. That of `EnvironmentUnfit`: nothing does, and this machine could not train
    everything that was drawn."""
    if certificate.equal:
        return 0
    if certificate.findings or any(segment.status in ("different", "unproven") for segment in certificate.segments):
        return NOT_EQUAL
    return EnvironmentUnfit.exit_code


def _said_unfit(certificate: AuditCertificate) -> None:
    """The certificate stands on standard output and in its file, so that the error is said and not raised: one object for machines."""
    why = next(segment.reasons[0] for segment in certificate.segments if segment.status == "not_redone")
    remedy = "Audit on a machine like the one that trained; the same --seed draws the same segments."
    print(f"mem: {EnvironmentUnfit(f'{verdict_words(certificate)}: {why}', remedy=remedy)}", file=sys.stderr)


@contextlib.contextmanager
def opened(wish: AuditWish, settings: Settings) -> Iterator[tuple[Path, str, Kept]]:
    """(folder of record and journal, where the run lies, its checkpoints); of a remote run record and journal are brought here."""
    with located(wish.run, wish.store, settings) as (folder, place):
        run_id = record_of(folder).run_id
        if place == str(folder):
            yield folder, place, LocalKept.of(folder, run_id, signature_key(settings))
            return
        url = place.rpartition("/")[0]
        yield folder, place, RemoteKept(open_store(url, settings.storage_options(url)), run_id)


def _output(wish: AuditWish, folder: Path) -> Path:
    output = (wish.output or Path(f"audit-{folder.name}.json")).absolute()
    if output.resolve().is_relative_to(folder.resolve()):
        raise RequestError(
            "an audit writes nothing into the run that it looks at", field="--output", value=output, remedy="Name a file elsewhere."
        )
    if output.suffix != ".json":
        raise RequestError("the certificate is a JSON file", field="--output", value=output, remedy="Give a name that ends in .json.")
    return output


def _say(text: str) -> None:
    print(f"audit: {printable(text)}", file=sys.stderr, flush=True)
