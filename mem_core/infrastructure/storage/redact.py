"""Keeps credentials out of everything that people read."""

import re

_USER_INFO = re.compile(r"(?P<scheme>[a-zA-Z][a-zA-Z0-9+.-]*://)[^/@\s]*@")
_QUERY = re.compile(r"\?[^\s'\"<>]*")
_LABELLED = re.compile(
    r"(?i)((?:aws_)?(?:secret|access|session|security)[-_ ]?(?:access[-_ ]?)?(?:key(?:[-_ ]?id)?|token)"
    r"|password|passwd|authorization|signature"
    r"|x-amz-[a-z-]*(?:token|signature|credential))([\"']?\s*[:=]\s*[\"']?(?:(?:bearer|basic)\s+)?)([^\s\"',;&<>]+)"
)
_MIN_SECRET_LENGTH = 4


def redact_url(url: str) -> str:
    """`s3://key:secret@bucket/x?token=1` -> `s3://bucket/x`."""
    return _QUERY.sub("", _USER_INFO.sub(r"\g<scheme>", url))


def redact(text: str, secrets: tuple[str, ...] = ()) -> str:
    """Text without user info in URLs, without query strings of URLs, without labelled secrets, and without any of `secrets`."""
    for secret in sorted(secrets, key=len, reverse=True):
        if len(secret) >= _MIN_SECRET_LENGTH:
            text = text.replace(secret, "***")
    text = re.sub(r"[a-zA-Z][a-zA-Z0-9+.-]*://\S+", lambda found: redact_url(found.group(0)), text)
    return _LABELLED.sub(r"\1\2***", text)


def secrets_in(options: object) -> tuple[str, ...]:
    """Every string in storage options that could be a secret: all but endpoints and regions."""
    found: list[str] = []
    stack: list[tuple[str, object]] = [("", options)]
    while stack:
        name, value = stack.pop()
        if isinstance(value, dict):
            stack.extend((str(key), item) for key, item in value.items())
        elif isinstance(value, (list, tuple)):
            stack.extend((name, item) for item in value)
        elif isinstance(value, str) and any(word in name.lower() for word in ("key", "secret", "token", "pass", "cred")):
            found.append(value)
    return tuple(found)
