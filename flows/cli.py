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
from mem_core.domain.errors import InternalError, Interrupted, MemError
from mem_core.infrastructure.machine.process_facts import refuse_lost_working_folder
from mem_core.infrastructure.telemetry.streams import secure_standard_streams, why_lost


def build_parser() -> argparse.ArgumentParser:
    """All verbs and their arguments."""
    parser = argparse.ArgumentParser(prog="mem", description="LLM training runs that survive what happens to them.")
    verbs = parser.add_subparsers(dest="verb", required=True, metavar="VERB")
    train = _request_verb(verbs, "train", "run a request to its end; the same command again resumes it")
    reshard = "go on with other parallel.num_ranks or parallel.zero_stage: the newest checkpoint is converted and proven first"
    train.add_argument("--allow-reshard", action="store_true", help=reshard)
    _request_verb(verbs, "doctor", "examine this machine for a request; changes nothing")
    drill = _request_verb(verbs, "drill", "train under real faults, then an undisturbed twin, and compare; exit 0 only if all was survived")
    drill.add_argument("--seed", type=int, default=None, help="seed of the fault plan; the same seed plans the same faults")
    _request_verb(verbs, "prove-resume", "N steps straight against N steps in three pieces with kills, to the bit")
    for verb, text in (("status", "where a run stands"), ("report", "write report.html anew"), ("logs", "last lines of a run's workers")):
        _run_verb(verbs, verb, text)
    stop = _run_verb(verbs, "stop", "ask the process that holds a run to commit and stop")
    stop.add_argument("--wait", type=float, default=60.0, metavar="SECONDS", help="how long to wait for it")
    _checkpoint_verbs(verbs)
    _export_verb(verbs)
    _policy_verbs(verbs)
    _serve_verb(verbs)
    return parser


def _request_verb(verbs: "argparse._SubParsersAction[argparse.ArgumentParser]", name: str, text: str) -> argparse.ArgumentParser:
    verb = verbs.add_parser(name, help=text, description=text)
    verb.add_argument("request", metavar="REQUEST.yaml", help="request file (YAML or JSON), - for standard input")
    verb.add_argument(
        "--set",
        action="append",
        default=[],
        metavar="KEY=VALUE",
        dest="overrides",
        help="override one value, such as training.max_steps=200",
    )
    verb.add_argument("--json", action="store_true", help="print one JSON object on standard output")
    return verb


def _run_verb(verbs: "argparse._SubParsersAction[argparse.ArgumentParser]", name: str, text: str) -> argparse.ArgumentParser:
    verb = verbs.add_parser(name, help=text, description=text)
    verb.add_argument("run", metavar="RUN", help="run id (with --store) or path of a run folder")
    verb.add_argument("--store", default="./runs", help="folder that holds run folders")
    verb.add_argument("--json", action="store_true", help="print one JSON object on standard output")
    return verb


def _checkpoint_verbs(verbs: "argparse._SubParsersAction[argparse.ArgumentParser]") -> None:
    group = verbs.add_parser("checkpoints", help="list or verify a run's checkpoints").add_subparsers(dest="action", required=True)
    _run_verb(group, "list", "every checkpoint and its verdict")
    verify = _run_verb(group, "verify", "read and hash everything; exit 74 if anything is bad")
    verify.add_argument("--deep", action="store_true", help="also restore each in fresh processes and take two steps")
    export = _run_verb(group, "export", "a proven checkpoint as a Hugging Face folder")
    export.add_argument("--step", type=int, default=None, help="which one; default the newest valid")
    export.add_argument("--output", type=Path, default=None, metavar="FOLDER", help="default RUN/export/step-N")
    for name, text in (("pin", "keep a checkpoint for ever"), ("unpin", "let rotation decide again")):
        _run_verb(group, name, text).add_argument("--step", type=int, required=True, help="step of the checkpoint")


def _export_verb(verbs: "argparse._SubParsersAction[argparse.ArgumentParser]") -> None:
    export = _run_verb(verbs, "export", "a run's weights as a model folder that transformers loads")
    which = export.add_mutually_exclusive_group()
    which.add_argument("--best", action="store_true", help="the step with the lowest loss of held-out rows")
    which.add_argument("--step", type=int, default=None, help="which one; default the newest valid")
    formats = ("auto", "float32", "bfloat16", "float16")
    export.add_argument("--dtype", choices=formats, default="auto", help="number format; auto is that of the source")
    export.add_argument("--output", type=Path, default=None, metavar="FOLDER", help="default RUN/export, or RUN/export/step-N for one step")


def _policy_verbs(verbs: "argparse._SubParsersAction[argparse.ArgumentParser]") -> None:
    group = verbs.add_parser("policy", help="evaluate, replay or explain policy decisions").add_subparsers(dest="action", required=True)
    evaluate = _request_verb(group, "evaluate", "what would happen to a directive, without a run")
    evaluate.add_argument("--directive", metavar="FILE_OR_-", help="the planner's reply")
    _run_verb(group, "replay", "recompute every recorded decision and report differences")
    _run_verb(group, "explain", "decisions in words")


def _serve_verb(verbs: "argparse._SubParsersAction[argparse.ArgumentParser]") -> None:
    text = "a local Prefect server with its UI, the deployments, and a process that runs them"
    verb = verbs.add_parser("serve", help=text, description=text)
    verb.add_argument("--file", metavar="PREFECT.yaml", help="deployments to serve; default deployments/prefect.yaml of MEM")
    verb.add_argument("--port", type=int, default=4200, help="port of the local server (not used with PREFECT_API_URL)")
    verb.add_argument("--limit", type=int, default=4, help="flow runs at the same time")
    verb.add_argument(
        "--allow-host",
        action="append",
        default=[],
        metavar="NAME",
        dest="hosts",
        help="another name under which a tunnel or an ingress leads to the local server; may be given several times",
    )
    verb.set_defaults(json=False)


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
        case "checkpoints":
            return _checkpoints(arguments)
        case "export":
            from flows.commands.export import Wanted, export_run

            folder, wanted = run_folder(arguments.run, arguments.store), Wanted(arguments.step, arguments.best)
            return export_run(folder, wanted, arguments.dtype, arguments.output, arguments.json)
        case "policy":
            return _policy(arguments)
        case "serve":
            from flows.server.serve import DEPLOYMENTS_FILE, serve

            return serve(Path(arguments.file) if arguments.file else DEPLOYMENTS_FILE, arguments.port, arguments.limit, arguments.hosts)
        case _:
            return _inspect(arguments)


def _checkpoints(arguments: argparse.Namespace) -> int:
    folder = run_folder(arguments.run, arguments.store)
    match arguments.action:
        case "export":
            from flows.commands.export import export_checkpoint

            return export_checkpoint(folder, arguments.step, arguments.output, arguments.json)
        case "pin" | "unpin":
            from flows.commands.export import pin_checkpoint

            return pin_checkpoint(folder, arguments.step, arguments.action == "pin")
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
            path = report_commands.run_report(folder)
            print(path.absolute().as_uri())
        case "logs":
            return report_commands.print_logs(folder)
        case "stop":
            from flows.commands.stop import stop_run

            return stop_run(folder, arguments.wait)
        case _:
            raise InternalError(f"unknown verb {arguments.verb}", remedy="Report this as a bug.")
    return 0


if __name__ == "__main__":
    main()
