"""`mem`: the application layer. People read standard error; `--json` puts one JSON object on standard output."""

import argparse
import json
import os
import signal
import sys
import traceback
from pathlib import Path
from types import FrameType

from flows.commands.output import report_error, run_folder
from flows.parser import build_parser
from mem_core.domain.errors import InternalError, Interrupted, MemError
from mem_core.infrastructure.machine.process_facts import refuse_lost_working_folder
from mem_core.infrastructure.telemetry.streams import secure_standard_streams, why_lost


def main(argv: list[str] | None = None) -> None:
    """Entry of the console script; ends the process with the documented exit code.

    From the first line on, SIGTERM is a wish to stop: whatever is being loaded is left, with a message and the code of a run that can
    be resumed. A run that trains has a handler of its own, which ends the step and commits.
    """
    signal.signal(signal.SIGTERM, _stop_at_once)
    code = _ended(argv)
    sys.stdout.flush()
    if lost := why_lost(sys.stdout):
        print(f"mem: standard output could not be written ({lost})", file=sys.stderr)
    sys.stderr.flush()
    # Prefect's exit handlers wait seconds per queued event when its server is gone; everything of ours is flushed by now.
    os._exit(code)


def _ended(argv: list[str] | None) -> int:
    """Carry out the command line; whatever comes of it is an exit code."""
    as_json = False
    try:
        secure_standard_streams()
        arguments = build_parser().parse_args(argv)
        as_json = arguments.json
        refuse_lost_working_folder()
        return run_verb(arguments)
    except MemError as exc:
        return report_error(exc, as_json)
    except KeyboardInterrupt as exc:
        by = f" by {exc}" if str(exc) else ""
        stopped = Interrupted(f"stopped at once{by}", remedy="The same command starts it again or goes on with it.")
        return report_error(stopped, as_json)
    except SystemExit as exc:  # the parser has said what is wrong, or printed what was asked for
        return exc.code if isinstance(exc.code, int) else 0 if exc.code is None else 1
    except Exception as exc:  # noqa: BLE001 - the last edge: whatever it is becomes exit 70 with its text
        traceback.print_exc()
        bug = InternalError(f"{type(exc).__name__}: {exc}", remedy="Report this as a bug with the lines above.")
        return report_error(bug, as_json)


def _stop_at_once(number: int, _: FrameType | None) -> None:
    raise KeyboardInterrupt(signal.Signals(number).name)


def run_verb(arguments: argparse.Namespace) -> int:
    """Dispatch; returns the exit code or raises MemError."""
    match arguments.verb:
        case "train":
            from flows.commands.train import train

            return train(arguments.request, arguments.overrides, arguments.json, arguments.allow_reshard)
        case "drill":
            from flows.commands.drill import drill

            return drill(arguments.request, arguments.overrides, arguments.seed, arguments.json)
        case "prove-resume":
            from flows.commands.prove_resume import prove_resume

            return prove_resume(arguments.request, arguments.overrides, arguments.json)
        case "doctor":
            from flows.commands.doctor import doctor

            return doctor(arguments.request, arguments.overrides, arguments.json)
        case "data":
            from flows.commands.inspection.data import show_data

            return show_data(arguments.request, arguments.overrides, arguments.rows, arguments.json)
        case "checkpoints":
            return _checkpoints(arguments)
        case "export":
            from flows.commands.export import Wanted, export_run

            folder, wanted = run_folder(arguments.run, arguments.store), Wanted(arguments.step, arguments.best, arguments.merge)
            return export_run(folder, wanted, arguments.dtype, arguments.output, arguments.json)
        case "generate":
            from flows.commands.inference.generate import generate

            return generate(arguments.model, arguments.store, vars(arguments), arguments.json)
        case "evaluate":
            from flows.commands.inference.evaluate import evaluate

            return evaluate(arguments.model, arguments.data, arguments.store, vars(arguments), arguments.json)
        case "policy":
            return _policy(arguments)
        case "fork":
            from flows.commands.branches.fork import ForkWish, fork_run

            wish = ForkWish(arguments.run, arguments.new_id, arguments.store, tuple(arguments.overrides), arguments.output)
            return fork_run(wish, arguments.json)
        case "audit":
            return _audit(arguments)
        case "runs":
            from flows.commands.inspection.runs import list_runs

            return list_runs(arguments.store, arguments.json)
        case "compare":
            from flows.commands.inspection.compare import compare_runs

            return compare_runs(arguments.runs, arguments.store, arguments.output, arguments.json)
        case "init":
            return _init(arguments)
        case "completion":
            import shtab

            print(shtab.complete(build_parser(), arguments.shell))
            return 0
        case "serve":
            from flows.server.serve import DEPLOYMENTS_FILE, serve

            file = Path(arguments.file) if arguments.file else DEPLOYMENTS_FILE
            return serve(file, arguments.port, arguments.limit, arguments.hosts, arguments.json)
        case _:
            return _inspect(arguments)


def _init(arguments: argparse.Namespace) -> int:
    from flows.commands.init import init

    given = {
        "run_id": arguments.run_id, "model": arguments.model, "data": arguments.data, "steps": arguments.steps,
        "rate": arguments.learning_rate,
    }  # fmt: skip
    return init(arguments.output, given, arguments.json)


def _audit(arguments: argparse.Namespace) -> int:
    from flows.commands.audit import AuditWish, audit

    wish = AuditWish(arguments.run, arguments.store, arguments.segments, arguments.seed, arguments.output)
    return audit(wish, arguments.json)


def _checkpoints(arguments: argparse.Namespace) -> int:
    folder = run_folder(arguments.run, arguments.store)
    match arguments.action:
        case "export":
            from flows.commands.export import export_checkpoint

            return export_checkpoint(folder, arguments.step, arguments.output, arguments.json, merge=arguments.merge)
        case "pin" | "unpin":
            from flows.commands.export import pin_checkpoint

            pinned = arguments.action == "pin"
            code = pin_checkpoint(folder, arguments.step, pinned)
            if arguments.json:
                print(json.dumps({"step": arguments.step, "pinned": pinned}))
            return code
        case "list":
            from flows.commands.checkpoints import list_checkpoints

            return list_checkpoints(folder, arguments.json)
        case _:
            from flows.commands.checkpoints import verify_checkpoints

            return verify_checkpoints(folder, arguments.json, arguments.deep)


def _policy(arguments: argparse.Namespace) -> int:
    from flows.commands import policy as policy_commands

    if arguments.action == "evaluate":
        from flows.commands.doctor import evaluate_policy

        answer = evaluate_policy(arguments.request, arguments.overrides, arguments.directive)
    else:
        folder = run_folder(arguments.run, arguments.store)
        if arguments.action == "replay":
            answer = policy_commands.replay_run(folder)
        else:
            answer = policy_commands.explain_run(policy_commands.read_journal_files(folder))
    print(answer.text, file=sys.stderr)
    if arguments.json:
        print(json.dumps(answer.report))
    return answer.exit_code


def _inspect(arguments: argparse.Namespace) -> int:
    from flows.commands import report as report_commands

    folder = run_folder(arguments.run, arguments.store)
    match arguments.verb:
        case "status":
            if arguments.json:
                print(report_commands.run_status(folder).model_dump_json())
            else:
                print(report_commands.run_status_text(folder), file=sys.stderr)
        case "report":
            url = report_commands.run_report(folder).absolute().as_uri()
            print(json.dumps({"report": url}) if arguments.json else url)
        case "logs":
            from flows.commands.inspection.logs import print_logs

            return print_logs(folder, workers=arguments.workers, follow=arguments.follow, as_json=arguments.json, num_lines=arguments.lines)
        case "stop":
            from flows.commands.stop import stop_run

            code = stop_run(folder, arguments.wait)
            if arguments.json:
                print(json.dumps({"run": folder.name, "stopped": code == 0}))
            return code
        case _:
            raise InternalError(f"unknown verb {arguments.verb}", remedy="Report this as a bug.")
    return 0


if __name__ == "__main__":
    main()
