"""Keep secrets out of whatever leaves the process: logs, journal, artifacts, reports, errors."""

import json
import re
from collections.abc import Iterable
from urllib.parse import quote

HIDDEN = "***"
_URL_CREDENTIALS = re.compile(r"(?<=://)[^/\s?#\"'<>]{1,1000}@")
_AUTHORIZATION = re.compile(r"(?i)\b(bearer|basic)\s+[a-z0-9._~+/=-]{6,}")
_QUERY_SECRET = re.compile(r"(?i)([?&][a-z0-9_.-]{0,40}(?:key|token|secret|password|signature|credential)=)[^&\s\"'<>]+")


def scrub(text: str, secrets: Iterable[str] = ()) -> str:
    """`text` without the given secrets (also as JSON or a URL would write them), URL credentials and authorization headers.

    Empty secrets are ignored. Longer secrets go first, so that one inside another leaves no rest.
    """
    forms = {form for secret in secrets if secret for form in (secret, json.dumps(secret)[1:-1], quote(secret, safe=""))}
    for form in sorted(forms, key=len, reverse=True):
        text = text.replace(form, HIDDEN)
    text = _URL_CREDENTIALS.sub(f"{HIDDEN}@", text)
    text = _AUTHORIZATION.sub(rf"\1 {HIDDEN}", text)
    return _QUERY_SECRET.sub(rf"\1{HIDDEN}", text)
