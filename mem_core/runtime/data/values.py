"""What data preparation tells: progress while it works, and the prepared data at the end."""

from collections.abc import Callable
from pathlib import Path
from typing import Literal

from pydantic import Field

from mem_core.domain.environment import DataRemark
from mem_core.domain.request import DataSection
from mem_core.domain.results.samples import SampleOrder
from mem_core.domain.run import DataSummary, SourceShare
from mem_core.domain.units import Value
from mem_core.runtime.models.encoding import CURRENT_RULES

MAX_BAD_ROWS_KEPT = 100
_BAD_ROWS_TOLD = 10


class PrepareProgress(Value):
    """How far preparation is. `bytes_total` is known from the start and counts the bytes of the files."""

    phase: Literal["hashing", "tokenizing", "writing"]
    bytes_done: int = 0
    bytes_total: int = 0
    rows: int = Field(default=0, description="Documents read so far.")
    tokens: int = 0
    bad_rows: int = 0
    note: str = Field(default="", description="Worth a line of its own; the numbers say nothing new then.")


OnProgress = Callable[[PrepareProgress], None]


class SourceRows(Value):
    """What a weighted source came to. Its documents count those that are held out."""

    num_rows: int
    num_tokens: int
    num_documents: int = 0


class PreparedData(Value):
    """Token shards on local disk, ready for `TokenDataset.open`. Equal fingerprints mean equal samples under equal ids."""

    fingerprint: str
    train_dir: str
    validation_dir: str | None
    num_samples: int = Field(description="Training rows: sequences of at most sequence_length tokens.")
    num_tokens: int = Field(description="Tokens in the training rows.")
    trained_tokens: int = Field(description="Label positions that count in the training rows, after the shift.")
    num_documents: int = Field(description="Documents read, training and validation.")
    longest_tokens: int = Field(description="Tokens of the longest training row.")
    bad_rows: tuple[str, ...] = Field(default=(), description="file:line: reason, the first hundred.")
    num_bad_rows: int = 0
    hint: str = Field(default="", description="The setting that would fit the bad rows, where they are of a known kind.")
    dropped_rows: dict[str, int] = Field(default={}, description="Rows that are fine but not trained on, by kind.")
    document_tokens: dict[str, int] = Field(default={}, description="Tokens of a document before it is cut: p5, p50, p95, p99, longest.")
    num_copies: int = Field(default=0, description="Documents whose content was there before, among the first two million.")
    pad_token_id: int
    eos_token_id: int | None
    vocab_size: int = Field(description="Size of the tokenizer's vocabulary.")
    from_cache: bool = False
    num_validation_samples: int = 0
    max_token_id: int = 0
    num_files: int = 0
    size_bytes: int = Field(default=0, description="Bytes of the source files.")
    notes: tuple[str, ...] = Field(default=(), description="What a person should know: empty files, missing masks, no validation rows.")
    remarks: tuple[DataRemark, ...] = Field(default=(), description="The same, without what goes by names, as the doctor shows it.")
    index_sha256: dict[str, str] = Field(
        default={}, description="Digest of the index of each folder of rows; empty before version 2 of the cache."
    )
    sources: tuple[SourceRows, ...] = Field(
        default=(), description="Of each source of data.train, where any has a weight; its rows follow each other."
    )
    encoding: dict[str, str] = Field(default={}, description="All that decides token ids, part by part; empty under the first rules.")

    shares: tuple[SourceShare, ...] = Field(
        default=(), description="The same with the names and weights of a request; no part of what is cached."
    )

    @property
    def epoch_rows(self) -> int:
        """Rows that an epoch shows: each once, or as often as the weights of their sources say."""
        return sum(share.epoch_rows for share in self.shares) if self.shares else self.num_samples

    def summary(self) -> DataSummary:
        """For the journal, and by it for report and result."""
        return DataSummary(
            num_files=self.num_files,
            num_documents=self.num_documents,
            num_sequences=self.num_samples,
            num_tokens=self.num_tokens,
            trained_tokens=self.trained_tokens,
            num_validation_sequences=self.num_validation_samples,
            num_bad_rows=self.num_bad_rows,
            bad_rows=self.bad_rows[:_BAD_ROWS_TOLD],
            dropped_rows=self.dropped_rows,
            document_tokens=self.document_tokens,
            num_copies=self.num_copies,
            sources=self.shares,
            notes=self.notes,
        )


class PreparedRows(Value):
    """All rows of a run: what it trains on, with what is held out of that, the sets that it is evaluated on besides, by name, and its
    prompts."""

    train: PreparedData
    evaluation: dict[str, PreparedData] = {}
    samples: SampleOrder | None = Field(default=None, description="Prompts that are answered meanwhile.")


class PrepareJob(Value):
    """What the tokenising process is asked to do. It ends when `parent_pid` is not its parent any more."""

    data: DataSection
    tokenizer_source: str
    vocab_size: int | None
    cache_dir: Path
    parent_pid: int
    mark_every_s: float = Field(default=10.0, description="How much work a kill may cost; see `encoding.marks`.")
    rules: int = Field(default=CURRENT_RULES, description="How rows become tokens; a run goes on under the rules that it was born with.")
