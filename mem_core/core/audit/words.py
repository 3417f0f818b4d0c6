"""A certificate in plain words: what was done again, what came of it, and what it does not say."""

from collections.abc import Iterator

from mem_core.core.run.reshard import describe_shape
from mem_core.domain.results.audit import AuditCertificate, AuditedSegment
from mem_core.domain.units import format_seconds

MOST_REASONS = 6
_STATUS = {"equal": "equal to the bit", "different": "DIFFERENT", "unproven": "NOT PROVEN", "not_redone": "not trained again"}


def certificate_text(certificate: AuditCertificate) -> str:
    """For people: a screenful."""
    return "\n".join(_lines(certificate)) + "\n"


def verdict_words(certificate: AuditCertificate) -> str:
    """One sentence."""
    if certificate.equal:
        return f"{len(certificate.segments)} of {len(certificate.segments)} segments came to the same bits"
    counts = {status: sum(segment.status == status for segment in certificate.segments) for status in _STATUS}
    told = [f"{count} {words}" for status, words in _STATUS.items() if (count := counts[status])]
    number = len(certificate.findings)
    against = [f"{number} finding{'' if number == 1 else 's'} against the record"] if number else []
    return f"NOT equal: {', '.join((*told, *against))}"


def _lines(certificate: AuditCertificate) -> Iterator[str]:
    covered, number = certificate.coverage, len(certificate.segments)
    yield f"Audit of run {certificate.run_id} in {certificate.place}: {verdict_words(certificate)}."
    yield (
        f"{number} of {covered.possible_segments} segments that can be trained again, drawn with seed {certificate.seed}: "
        f"{covered.redone_steps:,} of {covered.committed_steps:,} steps ({covered.redone_share:.2%}); with all of them "
        f"{covered.possible_steps:,}."
    )
    digests = f"weights {certificate.weights_digest}, trajectory {certificate.trajectory_digest}"
    yield f"The journal ends at step {certificate.last_step:,}: {digests}."
    how = f"on {certificate.device} in {certificate.dtype}, {_machine(certificate)}"
    yield f"Trained again {how}, in {format_seconds(certificate.duration_s)}."
    yield f"SHA-256 of the journal {certificate.journal_sha256}, of the record {certificate.record_sha256}."
    yield ""
    for segment in certificate.segments:
        yield from _segment(segment)
    parts = {
        "Against the record": certificate.findings,
        "Another machine": certificate.notes,
        "Cannot be audited": certificate.not_audited,
    }
    for title, texts in parts.items():
        if texts:
            yield ""
            yield f"{title}:"
            yield from (f"  {text}" for text in texts)


def _machine(certificate: AuditCertificate) -> str:
    versions = certificate.audited_on.versions
    named = [f"{name} {versions[name]}" for name in ("torch", "deepspeed", "mem") if name in versions]
    return f"{', '.join(named)}, {certificate.audited_on.cpu.split(' (')[0] or 'an unknown CPU'}"


def _segment(segment: AuditedSegment) -> Iterator[str]:
    shape = describe_shape(segment.num_ranks, segment.zero_stage)
    extra = [
        f"{segment.steps_compared} of {segment.num_steps} steps compared one by one" if segment.weights_digest.redone else "",
        f"{segment.num_plan_changes} recorded changes of the micro-batch followed" if segment.num_plan_changes else "",
        f"{len(segment.left_out_batches)} batches left out again" if segment.left_out_batches else "",
        f"{len(segment.hyperparams)} sets of values" if len(segment.hyperparams) > 1 else "",
    ]
    begins = "fresh weights" if segment.begins_with == "fresh weights" else f"the checkpoint of step {segment.from_step:,}"
    yield f"steps {segment.from_step + 1:,} to {segment.to_step:,}, {shape}, from {begins}: {_STATUS[segment.status]}" + (
        f" ({'; '.join(text for text in extra if text)})" if any(extra) else ""
    )
    yield from (f"    {reason}" for reason in segment.reasons[:MOST_REASONS])
    if segment.status == "different":
        yield f"    distance: {_distance(segment)}"


def _distance(segment: AuditedSegment) -> str:
    found = segment.distance
    parts = (("losses", found.loss), ("gradient norms", found.grad_norm), ("all weights, norm-wise", found.weights))
    return ", ".join(f"{name} {f'{value:.3g}' if value is not None else 'not known'}" for name, value in parts)
