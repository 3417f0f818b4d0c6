"""What there is to say of rows once they are made."""

from collections.abc import Sequence

from mem_core.domain.environment import DataRemark
from mem_core.runtime.data.encoding.cache import encoding_for
from mem_core.runtime.data.encoding.encoder import Encoder
from mem_core.runtime.data.encoding.marks.tallies import Tallies
from mem_core.runtime.data.encoding.notices import CHAT_LOSS, NONE_HELD_OUT, notices
from mem_core.runtime.data.reading.sources import SourceFile
from mem_core.runtime.data.serving.shards import TokenIndex
from mem_core.runtime.data.values import PreparedData, PrepareJob


def result_of(
    job: PrepareJob,
    name: str,
    seen: Tallies,
    indexes: Sequence[TokenIndex],
    encoder: Encoder,
    told: Sequence[DataRemark],
    sources: Sequence[SourceFile],
) -> PreparedData:
    """The prepared data of a job, still without its folders."""
    train, validation = indexes
    remarks = [*encoder.notes, *notices(seen.dropped, seen.remarks, seen.bad_rows, seen.num_bad_rows), *told]
    if job.rules < 3 and job.data.messages_field is not None and not encoder.chat_has_assistant_mask:
        remarks.append(CHAT_LOSS)
    if job.data.validation is not None and not validation.num_rows:
        remarks.append(NONE_HELD_OUT)
    notes = [*seen.notes, *(remark.text for remark in remarks)]
    return PreparedData(
        fingerprint=name,
        train_dir="",
        validation_dir=None,
        num_samples=train.num_rows,
        num_tokens=train.num_tokens,
        trained_tokens=train.trained_tokens,
        num_documents=seen.num_documents,
        longest_tokens=train.longest_tokens,
        bad_rows=tuple(seen.bad_rows),
        num_bad_rows=seen.num_bad_rows,
        hint=seen.hint,
        dropped_rows=dict(seen.dropped),
        document_tokens=seen.counts.percentiles(),
        num_copies=seen.counts.num_copies,
        pad_token_id=encoder.pad_token_id,
        eos_token_id=encoder.eos_token_id,
        vocab_size=encoder.vocab_size,
        num_validation_samples=validation.num_rows,
        max_token_id=max(train.max_token_id, validation.max_token_id),
        num_files=len(sources),
        size_bytes=sum(file.size_bytes for file in sources),
        encoding=_encoding(job, encoder),
        remarks=tuple(remarks),
        notes=tuple(notes[:20]) + ((f"and {len(notes) - 20} notes more",) if len(notes) > 20 else ()),
    )


def _encoding(job: PrepareJob, encoder: Encoder) -> dict[str, str]:
    """What the record of a run keeps, to know a changed encoding from changed data; the first rules kept nothing."""
    if job.rules == 1:
        return {}
    return {**encoding_for(job.data, job.tokenizer_source, job.rules), **encoder.identity}
