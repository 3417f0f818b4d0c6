"""`mem doctor` and `mem policy evaluate`: looks at this machine, changes nothing."""

import sys

from flows.commands.policy import PolicyAnswer, evaluate_directive
from mem_core.bootstrap import examine_deeply, examine_only
from mem_core.core.doctor.environment_doctor import error_of
from mem_core.core.doctor.render import render_report
from mem_core.domain.errors import RequestError
from mem_core.domain.request import RuntimeRequest
from mem_core.infrastructure.request.file import apply_overrides, load_mapping, parse_request
from mem_core.infrastructure.request.policy_file import load_policy_file
from mem_core.infrastructure.settings import Settings
from mem_core.infrastructure.storage.reading import RECORD_LIMIT_BYTES, read_handed


def doctor(path: str, overrides: list[str], as_json: bool) -> int:
    """Print the report; exit 0 when nothing fails, else the exit code of the first failing kind."""
    report = examine_deeply(_asked(path, overrides), Settings.from_environment())
    print(render_report(report), file=sys.stderr)
    if as_json:
        print(report.model_dump_json())
    error = error_of(report)
    return 0 if error is None else error.exit_code


def evaluate_policy(path: str, overrides: list[str], directive: str | None) -> PolicyAnswer:
    """What the policy engine would do with a directive on this machine."""
    request = _asked(path, overrides)
    report = examine_only(request, Settings.from_environment())
    bounds = load_policy_file(request.policy.file) if request.policy.file else None
    reply = None if directive is None else _read(directive)
    return evaluate_directive(request, report, reply, bounds) if bounds else evaluate_directive(request, report, reply)


def _asked(path: str, overrides: list[str]) -> RuntimeRequest:
    """The request as it stands: what is not supported is a finding here, not an error."""
    return parse_request(apply_overrides(load_mapping(path), overrides))


def _read(source: str) -> bytes:
    try:
        return read_handed(source, RECORD_LIMIT_BYTES)
    except OSError as exc:
        raise RequestError(
            f"cannot read it: {exc.strerror}", field="--directive", value=source, remedy="Give a readable file or -."
        ) from exc
