"""Keep secrets out of whatever leaves the process: logs, journal, artifacts, reports, errors.

Two kinds of secret travel inside URLs. A user and password before the host are refused wherever a request is parsed, since requests are
stored and shown. The query string of a signed URL (`?X-Amz-Signature=...`) is taken: it opens one file for a while. It is hidden in every
text, and left out of a run's record, where only what identifies the file is kept.
"""

import json
import re
from collections.abc import Callable, Iterable
from typing import Any, cast
from urllib.parse import quote

HIDDEN = "***"
_URL_CREDENTIALS = re.compile(r"(?<=://)[^/\s?#\"'<>]{1,1000}@")
_AUTHORIZATION = re.compile(r"(?i)\b(bearer|basic)\s+[a-z0-9._~+/=-]{6,}")
_BEARER = re.compile(r"(?i)\bbearer\s+[a-z0-9._~+/=-]{20,}")
_HEADER = re.compile(r"(?i)\b(authorization[\"']?\s*[:=]\s*[\"']?(?:(?:bearer|basic)\s+)?)[a-z0-9._~+/=-]{6,}")
_SECRET_NAMES = "key|token|secret|password|passwd|signature|credential|sig|auth|accesskeyid|accessid"
_QUERY_SECRET = re.compile(rf"(?i)([?&;#][a-z0-9_.-]{{0,40}}(?:{_SECRET_NAMES})=)[^&\s\"'<>]+")
# What else a signed URL carries: it says until when and for what the signature holds, and changes with every new one.
_SIGNED_PREFIXES = ("x-amz-", "x-goog-", "x-oss-", "x-cos-")
_SIGNED_NAMES = frozenset(
    {"expires", "policy", "key-pair-id", "se", "st", "sp", "sv", "sr", "spr", "ss", "srt", "sip", "sdd", "skoid", "sktid", "skt", "ske",
     "sks", "skv", "saoid", "suoid", "scid", "rscc", "rscd", "rsce", "rscl", "rsct"}
)  # fmt: skip
_NAME_IS_SECRET = re.compile(rf"(?i)^[a-z0-9_.-]*(?:{_SECRET_NAMES})$")


def scrub(text: str, secrets: Iterable[str] = ()) -> str:
    """`text` without the given secrets (also as JSON or a URL would write them), URL credentials and authorization headers.

    Empty secrets are ignored. Longer secrets go first, so that one inside another leaves no rest.
    """
    forms = {form for secret in secrets if secret for form in (secret, json.dumps(secret)[1:-1], quote(secret, safe=""))}
    for form in sorted(forms, key=len, reverse=True):
        text = text.replace(form, HIDDEN)
    return _AUTHORIZATION.sub(rf"\1 {HIDDEN}", hide_in_urls(text))


def hide_in_urls(text: str) -> str:
    """`text` without credentials and secret query values of URLs, and without values of authorization headers."""
    text = _URL_CREDENTIALS.sub(f"{HIDDEN}@", text)
    text = _HEADER.sub(rf"\1{HIDDEN}", text)
    return _QUERY_SECRET.sub(rf"\1{HIDDEN}", text)


def clean_text(text: str) -> str:
    """`text` as it may be printed and stored: without secrets, and without half characters, which file names and JSON may hold."""
    return hide_in_urls(text).encode("utf-8", "backslashreplace").decode()


def holds_credentials(text: str) -> bool:
    """Whether a text carries a user or password before the host of a URL, or an authorization header."""
    return any(pattern.search(text) for pattern in (_URL_CREDENTIALS, _HEADER, _BEARER))


def in_texts(value: Any, change: Callable[[str], str]) -> Any:
    """Plain JSON with `change` applied to every text that is no key."""
    if isinstance(value, str):
        return change(value)
    if isinstance(value, dict):
        return {name: in_texts(inner, change) for name, inner in cast("dict[str, Any]", value).items()}
    return [in_texts(inner, change) for inner in cast("list[Any]", value)] if isinstance(value, list) else value


def unsigned(url: str) -> str:
    """What identifies the file behind a URL: the same without its signature. Other texts stay what they are.

    `https://h/x?versionId=3&X-Amz-Signature=...&X-Amz-Date=...` -> `https://h/x?versionId=3`.
    """
    place, mark, query = url.partition("?")
    if not mark or "://" not in place:
        return url
    query, fragment_mark, fragment = query.partition("#")
    parts = query.split("&")
    if not any(_NAME_IS_SECRET.match(part.partition("=")[0]) for part in parts):
        return url
    kept = "&".join(part for part in parts if not _belongs_to_signature(part.partition("=")[0].lower()))
    return place + (f"?{kept}" if kept else "") + fragment_mark + fragment


def _belongs_to_signature(name: str) -> bool:
    return name in _SIGNED_NAMES or name.startswith(_SIGNED_PREFIXES) or bool(_NAME_IS_SECRET.match(name))
