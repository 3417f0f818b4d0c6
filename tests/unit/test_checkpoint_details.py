"""Pure parts under checkpoints and storage: part sizes, ETags, redaction, shard names, who is believed in a remote store."""

import hashlib
import random
from pathlib import Path

import pytest

from mem_core.domain.errors import RequestError
from mem_core.infrastructure.storage import ObjectStat, RetryPolicy, open_store, redact, redact_url
from mem_core.infrastructure.storage.redact import secrets_in
from mem_core.infrastructure.storage.s3_details import MAX_PARTS, MIN_PART_BYTES, etag_of_file, is_etag, part_size_bytes
from mem_core.runtime.checkpoint_manager import missing_shards
from mem_core.runtime.checkpoint_manager.inspection.shards import surplus_shards
from mem_core.runtime.checkpoint_manager.mirror.remote_layout import Upload, believable, manifest_key, mark_key, sort_keys

GIB = 1 << 30


@pytest.mark.parametrize("size_bytes", [0, 1, 8 << 20, 70 * GIB, 71 * GIB, 500 * GIB, 5_000 * GIB])
def test_part_sizes_stay_within_what_s3_takes(size_bytes: int) -> None:
    part = part_size_bytes(size_bytes)
    assert part >= MIN_PART_BYTES
    assert part % (1 << 20) == 0
    assert part <= 5 * GIB
    assert -(-size_bytes // part) <= MAX_PARTS


def test_etag_of_a_single_put_and_of_parts(tmp_path: Path) -> None:
    path = tmp_path / "file"
    path.write_bytes(b"abcdefghij")
    assert etag_of_file(path, 100) == hashlib.md5(b"abcdefghij").hexdigest()
    parts = b"".join(hashlib.md5(part).digest() for part in (b"abcd", b"efgh", b"ij"))
    assert etag_of_file(path, 4) == f"{hashlib.md5(parts).hexdigest()}-3"
    assert is_etag(etag_of_file(path, 4))
    path.write_bytes(b"")
    assert etag_of_file(path, 4) == hashlib.md5(b"").hexdigest()


def test_retries_are_bounded_and_spread() -> None:
    delays = list(RetryPolicy(attempts=6, first_delay_s=1, longest_delay_s=4).delays_s(random.Random(0)))
    assert len(delays) == 5
    for delay, whole in zip(delays, (1, 2, 4, 4, 4), strict=True):
        assert whole / 2 <= delay <= whole
    assert len(set(delays)) == 5


@pytest.mark.parametrize(
    "text",
    [
        "GET https://user:SECRET@host/x failed", "url s3://SECRET:SECRET@bucket/key", "https://h/x?X-Amz-Signature=SECRET&a=1",
        "aws_secret_access_key=SECRET", "'secret': 'SECRET'", "token: SECRET", "x-amz-security-token: SECRET", "literally SECRET here",
    ],
)  # fmt: skip
def test_no_secret_survives_redaction(text: str) -> None:
    assert "SECRET" not in redact(text, ("SECRET",))


def test_redaction_keeps_what_people_need() -> None:
    assert redact_url("s3://key:secret@bucket/a/b?token=1") == "s3://bucket/a/b"
    assert redact("PUT s3://bucket/a failed: 503 SlowDown") == "PUT s3://bucket/a failed: 503 SlowDown"
    options = {"key": "K", "secret": "S", "endpoint_url": "http://e", "client_kwargs": {"aws_session_token": "T"}}
    assert sorted(secrets_in(options)) == ["K", "S", "T"]


def test_urls_with_credentials_are_refused_without_showing_them() -> None:
    with pytest.raises(RequestError) as caught:
        open_store("nosuch://me:SECRET@host/x")
    assert "SECRET" not in str(caught.value)


@pytest.mark.parametrize(
    ("zero_stage", "names"),
    [
        (0, ["mp_rank_00_model_states.pt"]),
        (2, ["mp_rank_00_model_states.pt", "zero_pp_rank_0_mp_rank_00_optim_states.pt", "bf16_zero_pp_rank_1_mp_rank_00_optim_states.pt"]),
        (3, [f"zero_pp_rank_{rank}_mp_rank_00_{kind}_states.pt" for rank in (0, 1) for kind in ("model", "optim")]),
    ],
)
def test_each_rank_file_is_asked_for(zero_stage: int, names: list[str]) -> None:
    assert missing_shards(names, 2, zero_stage) == ()
    assert surplus_shards(names, 2, zero_stage) == ()
    for name in names:
        assert missing_shards([other for other in names if other != name], 2, zero_stage) == (name.removeprefix("bf16_"),)
    assert surplus_shards([*names, "mp_rank_01_model_states.pt"], 2, zero_stage) == ("mp_rank_01_model_states.pt",)


OLD, LATE, NEW = Upload(5, 1, "0" * 8), Upload(9, 1, "1" * 8), Upload(6, 2, "2" * 8)


def listed(*keys: str) -> tuple[ObjectStat, ...]:
    return tuple(ObjectStat(key, 1) for key in keys)


def test_a_late_publication_of_an_older_attempt_is_not_believed() -> None:
    """However new its step is: the newer attempt did not see it when it began."""
    keys = [manifest_key("demo", upload) for upload in (OLD, LATE, NEW)]
    run = sort_keys("demo", listed(*keys, "demo/attempts/attempt-000002.json"))
    assert believable(run, frozenset({OLD.name})) == (OLD, NEW)
    assert believable(sort_keys("demo", listed(*keys)), frozenset()) == (OLD, NEW, LATE)


def test_keys_are_sorted_by_meaning_and_strangers_left_alone() -> None:
    half = f"demo/checkpoints/{NEW.name}/x.pt"
    run = sort_keys(
        "demo", listed(manifest_key("demo", OLD), half, mark_key("demo", OLD), "demo/else", "demo/checkpoints/odd/a/b", "demo/marks/x")
    )
    assert (run.complete, run.incomplete, run.marks, run.attempts) == ((OLD,), (NEW,), (OLD,), ())
    assert run.keys[NEW] == (half,)
