"""Which files a data list means."""

from mem_core.runtime.data.reading.sources import STDLIB_CAP_BYTES, resolve_files


def test_the_standard_library_is_a_bounded_stable_source() -> None:
    files = resolve_files(["stdlib:"], "auto", "data.train")
    assert len(files) > 100
    assert 1_000_000 < sum(file.size_bytes for file in files) <= STDLIB_CAP_BYTES
    assert not any(part in file.path for file in files for part in ("/site-packages/", "/test/", "/tests/"))
    assert files == resolve_files(["stdlib:"], "auto", "data.train")
