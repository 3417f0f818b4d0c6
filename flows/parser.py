"""The command line of `mem` in words: every verb with its arguments. What a verb does stands in `flows/commands/`."""

import argparse
from pathlib import Path
from typing import TYPE_CHECKING

from mem_core.infrastructure.storage.reading import local_name

if TYPE_CHECKING:
    Verbs = argparse._SubParsersAction[argparse.ArgumentParser]  # pyright: ignore[reportPrivateUsage]
JSON_HELP = "print one JSON object on standard output"


def local_path(text: str) -> Path:
    """A path by the one rule that every path follows, in a request and on the command line. No shell expands `~` behind `=`."""
    return Path(local_name(text))


def build_parser() -> argparse.ArgumentParser:
    """All verbs and their arguments."""
    parser = argparse.ArgumentParser(prog="mem", description="LLM training runs that survive what happens to them.")
    verbs = parser.add_subparsers(dest="verb", required=True, metavar="VERB")
    train = _request_verb(verbs, "train", "run a request to its end; the same command again resumes it")
    reshard = "go on with other parallel.num_ranks or parallel.zero_stage: the newest checkpoint is converted and proven first"
    train.add_argument("--allow-reshard", action="store_true", help=reshard)
    _request_verb(verbs, "doctor", "examine this machine for a request; changes nothing")
    data = _request_verb(verbs, "data", "prepare a request's data, report on it and show its first rows as the model will see them")
    data.add_argument("--rows", type=int, default=3, metavar="N", help="how many rows to show (default 3)")
    drill = _request_verb(verbs, "drill", "train under real faults, then an undisturbed twin, and compare; exit 0 only if all was survived")
    drill.add_argument("--seed", type=int, default=None, help="seed of the fault plan; the same seed plans the same faults")
    _request_verb(verbs, "prove-resume", "N steps straight against N steps in three pieces with kills, to the bit")
    for verb, text in (("status", "where a run stands, and what it does right now"), ("report", "write report.html anew")):
        _run_verb(verbs, verb, text)
    _look_verbs(verbs)
    _fork_verb(verbs)
    _audit_verb(verbs)
    stop = _run_verb(verbs, "stop", "ask the process that holds a run to commit and stop")
    stop.add_argument("--wait", type=float, default=60.0, metavar="SECONDS", help="how long to wait for it")
    _checkpoint_verbs(verbs)
    _export_verb(verbs)
    _inference_verbs(verbs)
    _policy_verbs(verbs)
    _serve_verb(verbs)
    _start_verbs(verbs)
    return parser


def _request_verb(verbs: "Verbs", name: str, text: str) -> argparse.ArgumentParser:
    verb = verbs.add_parser(name, help=text, description=text)
    verb.add_argument("request", type=local_name, metavar="REQUEST.yaml", help="request file (YAML or JSON), - for standard input")
    verb.add_argument(
        "--set",
        action="append",
        default=[],
        metavar="KEY=VALUE",
        dest="overrides",
        help="override one value, such as training.max_steps=200",
    )
    verb.add_argument("--json", action="store_true", help=JSON_HELP)
    return verb


def _run_verb(verbs: "Verbs", name: str, text: str) -> argparse.ArgumentParser:
    verb = verbs.add_parser(name, help=text, description=text)
    verb.add_argument("run", metavar="RUN", help="run id (with --store) or path of a run folder")
    verb.add_argument("--store", default="./runs", help="folder that holds run folders")
    verb.add_argument("--json", action="store_true", help=JSON_HELP)
    return verb


def _look_verbs(verbs: "Verbs") -> None:
    logs = _run_verb(verbs, "logs", "what happened to a run, with times: segments, verdicts, faults")
    logs.add_argument("--follow", action="store_true", help="go on until the run ends")
    logs.add_argument("--workers", action="store_true", help="what the worker processes wrote themselves")
    logs.add_argument("--lines", type=int, default=None, metavar="N", help="the last N lines; default all, of workers 50 each")
    text = "every run of a store: state, step, loss, faults"
    runs = verbs.add_parser("runs", help=text, description=text)
    runs.add_argument("--store", default="./runs", help="folder or URL that holds run folders")
    runs.add_argument("--json", action="store_true", help=JSON_HELP)
    text = "runs side by side: settings that differ, figures, digests, overlaid curves"
    compare = verbs.add_parser("compare", help=text, description=text)
    compare.add_argument("runs", nargs="+", metavar="RUN", help="run id (with --store), path or URL of a run folder; two or more")
    compare.add_argument("--store", default="./runs", help="folder or URL that holds run folders")
    compare.add_argument("--output", type=local_path, default=None, metavar="PAGE.html", help="write one page with overlaid curves there")
    compare.add_argument("--json", action="store_true", help=JSON_HELP)


def _fork_verb(verbs: "Verbs") -> None:
    text = "begin a new run with the whole state of another one's checkpoint: weights, optimizer, position in the data"
    fork = verbs.add_parser("fork", help=text, description=text)
    fork.add_argument("run", metavar="RUN[@STEP|@best]", help="run id (with --store), path or URL of a run folder; default the newest")
    fork.add_argument("new_id", metavar="NEW_ID", help="run id of the fork")
    fork.add_argument("--store", default="./runs", help="folder or URL that holds run folders")
    words = "change one value from there on, such as training.learning_rate=1e-4"
    fork.add_argument("--set", action="append", default=[], metavar="KEY=VALUE", dest="overrides", help=words)
    fork.add_argument("--output", type=local_path, default=None, metavar="REQUEST.yaml", help="write the request there too")
    fork.add_argument("--json", action="store_true", help=JSON_HELP)


def _audit_verb(verbs: "Verbs") -> None:
    text = "train parts of a run again, drawn by seed, and hold them against its journal; exit 0 only if all is equal"
    audit = verbs.add_parser("audit", help=text, description=text)
    audit.add_argument("run", metavar="RUN", help="run id (with --store), path or URL of a run folder")
    audit.add_argument("--store", default="./runs", help="folder or URL that holds run folders")
    audit.add_argument("--json", action="store_true", help=JSON_HELP)
    audit.add_argument("--segments", type=int, default=3, metavar="N", help="how many to draw (default 3)")
    audit.add_argument("--seed", type=int, default=None, help="draws the same segments again; default one that nobody knew before")
    words = "default audit-RUN.json here, with a .txt beside"
    audit.add_argument("--output", type=local_path, default=None, metavar="FILE.json", help=words)


def _start_verbs(verbs: "Verbs") -> None:
    text = "write a commented request; asks five questions at a terminal unless flags answer them"
    init = verbs.add_parser("init", help=text, description=text)
    init.add_argument("--output", type=local_path, default=Path("request.yaml"), metavar="REQUEST.yaml", help="default request.yaml")
    for flag, words in (
        ("--run-id", "name of the run"), ("--model", "folder, URL or preset:NAME"), ("--data", "files or globs, separated by commas"),
        ("--steps", "optimizer updates"), ("--learning-rate", "peak learning rate"),
    ):  # fmt: skip
        init.add_argument(flag, default=None, help=words)
    init.add_argument("--json", action="store_true", help=JSON_HELP)
    text = 'completion for a shell: add eval "$(mem completion bash)" to ~/.bashrc'
    completion = verbs.add_parser("completion", help=text, description=text)
    completion.add_argument("shell", choices=("bash", "zsh", "tcsh"), help="which shell")
    completion.set_defaults(json=False)


def _checkpoint_verbs(verbs: "Verbs") -> None:
    group = verbs.add_parser("checkpoints", help="list or verify a run's checkpoints").add_subparsers(dest="action", required=True)
    _run_verb(group, "list", "every checkpoint and its verdict")
    verify = _run_verb(group, "verify", "read and hash everything; exit 74 if anything is bad")
    verify.add_argument("--deep", action="store_true", help="also restore each in fresh processes and take two steps")
    export = _run_verb(group, "export", "a proven checkpoint as a Hugging Face folder")
    export.add_argument("--step", type=int, default=None, help="which one; default the newest valid")
    export.add_argument("--output", type=local_path, default=None, metavar="FOLDER", help="default RUN/export/step-N")
    export.add_argument("--merge", action="store_true", help="adapters: the whole model with them in it, to RUN/export/step-N-merged")
    for name, text in (("pin", "keep a checkpoint for ever"), ("unpin", "let rotation decide again")):
        _run_verb(group, name, text).add_argument("--step", type=int, required=True, help="step of the checkpoint")


def _export_verb(verbs: "Verbs") -> None:
    export = _run_verb(verbs, "export", "a run's weights as a model folder that transformers loads")
    which = export.add_mutually_exclusive_group()
    which.add_argument("--best", action="store_true", help="the step with the lowest loss of held-out rows")
    which.add_argument("--step", type=int, default=None, help="which one; default the newest valid")
    formats = ("auto", "float32", "bfloat16", "float16")
    export.add_argument("--merge", action="store_true", help="adapters: the whole model with them in it, to RUN/export/step-N-merged")
    export.add_argument("--dtype", choices=formats, default="auto", help="number format; auto is that of the source")
    export.add_argument(
        "--output", type=local_path, default=None, metavar="FOLDER", help="default RUN/export, or RUN/export/step-N for one step"
    )


def _inference_verbs(verbs: "Verbs") -> None:
    generate = _model_verb(verbs, "generate", "answer a file of prompts, each row once; the same command again goes on")
    generate.add_argument("--prompts", required=True, metavar="FILE", help="JSONL: a prompt or messages a row")
    generate.add_argument("--output", required=True, metavar="FILE", help="JSONL: each row with its answer, in the same order")
    generate.add_argument("--max-new-tokens", type=int, metavar="N", help="tokens of an answer at most (default 128)")
    generate.add_argument("--temperature", type=float, metavar="T", help="0 takes the likeliest token (default), more draws")
    generate.add_argument("--top-p", type=float, metavar="P", help="draw among the likeliest tokens of this share (default 1)")
    generate.add_argument("--seed", type=int, metavar="N", help="what draws are made from, with row and position (default 0)")
    generate.add_argument("--batch-rows", type=int, metavar="N", help="rows that are answered together, at most (default 64)")
    generate.add_argument("--prompt-field", metavar="NAME", help="field with the prompt; recognised where it is left out")
    generate.add_argument("--prefix", metavar="TEXT", help="put before the names of the fields that are added")
    text = "loss, perplexity and token accuracy of a data file, as a run's own evaluations"
    evaluate = _model_verb(verbs, "evaluate", text)
    evaluate.add_argument("data", metavar="DATA", help="file, folder, glob or URL with text or rows")
    words = "how rows are read, such as data.text_field=body; a run's own settings otherwise"
    evaluate.add_argument("--set", action="append", default=[], metavar="data.KEY=VALUE", dest="overrides", help=words)


def _model_verb(verbs: "Verbs", name: str, text: str) -> argparse.ArgumentParser:
    verb = verbs.add_parser(name, help=text, description=text)
    words = "model or adapter folder, URL, preset:NAME; or RUN, RUN@best, RUN@STEP (run id with --store, or path)"
    verb.add_argument("model", metavar="MODEL_OR_RUN", help=words)
    verb.add_argument("--store", default="./runs", help="folder that holds run folders")
    verb.add_argument("--memory", metavar="SIZE", help="own memory budget, such as 6GiB; default what the machine allows")
    verb.add_argument("--dtype", choices=("auto", "float32", "bfloat16", "float16"), default="auto", help="number format; auto: as trained")
    verb.add_argument("--device", choices=("auto", "cpu", "cuda"), default="auto", help="default: a CUDA device where there is one")
    verb.add_argument("--json", action="store_true", help=JSON_HELP)
    return verb


def _policy_verbs(verbs: "Verbs") -> None:
    group = verbs.add_parser("policy", help="evaluate, replay or explain policy decisions").add_subparsers(dest="action", required=True)
    evaluate = _request_verb(group, "evaluate", "what would happen to a directive, without a run")
    evaluate.add_argument("--directive", type=local_name, metavar="FILE_OR_-", help="the planner's reply")
    _run_verb(group, "replay", "recompute every recorded decision and report differences")
    _run_verb(group, "explain", "decisions in words")


def _serve_verb(verbs: "Verbs") -> None:
    text = "a local Prefect server with its UI, the deployments, and a process that runs them"
    verb = verbs.add_parser("serve", help=text, description=text)
    verb.add_argument(
        "--file", type=local_name, metavar="PREFECT.yaml", help="deployments to serve; default deployments/prefect.yaml of MEM"
    )
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
    verb.add_argument("--json", action="store_true", help="print one JSON object on standard output once runs can be submitted")
