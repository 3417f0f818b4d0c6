"""Secrets leave no trace in text that leaves the process."""

import pytest

from mem_core.domain.secrets import scrub


@pytest.mark.parametrize(
    ("text", "clean"),
    [
        ("key sk-canary-1 and again sk-canary-1", "key *** and again ***"),
        ("https://user:pass@host:8/v1", "https://***@host:8/v1"),
        ("https://token@host/v1 and s3://a:b@bucket", "https://***@host/v1 and s3://***@bucket"),
        ("Authorization: Bearer abcdef.123-x", "Authorization: Bearer ***"),
        ("GET /v1?api_key=abc&x=1", "GET /v1?api_key=***&x=1"),
        ("?X-Amz-Signature=abc", "?X-Amz-Signature=***"),
        ("mail me at a@b.c, loss 2.5", "mail me at a@b.c, loss 2.5"),
        ('quoted "with\\"quote"', 'quoted "***"'),
        ("in a URL: a%2Fb%2Bc", "in a URL: ***"),
        ("longer-secret", "***"),
    ],
)
def test_scrub(text: str, clean: str) -> None:
    assert scrub(text, ["sk-canary-1", "", 'with"quote', "a/b+c", "longer", "longer-secret"]) == clean
