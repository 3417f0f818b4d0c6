"""Where the machine that audits is another than the one that trained: bits are promised on one kind of CPU with one set of versions."""

from collections.abc import Sequence

from mem_core.domain.results.audit import AuditedOn

# What the bits of a step hang on; the others only carry the run.
DECIDING = ("python", "torch", "deepspeed", "transformers", "numpy", "mem")


def machine_notes(here: AuditedOn, there: Sequence[AuditedOn]) -> tuple[str, ...]:
    """In words, each once; empty where everything that was recorded is the same here."""
    notes: dict[str, None] = {}
    for trained_on in there:
        for name in DECIDING:
            before, now = trained_on.versions.get(name), here.versions.get(name)
            if before and before != now:
                notes[f"trained with {name} {before}, audited with {now or 'none'}"] = None
        if not trained_on.cpu:
            notes["the run did not record on which CPU it was trained"] = None
        elif trained_on.cpu != here.cpu:
            notes[f"trained on {trained_on.cpu}, audited on {here.cpu or 'an unknown CPU'}"] = None
    return tuple(notes)
