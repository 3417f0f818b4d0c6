"""torch.compile tried in a process of its own, before any rank is started: a small function, made with the real compiler, in the real
folder, and loaded from there. A compiler that is broken, or a folder that takes no compiled code, has its name here; inside a rank it
would end each process at its first batch."""

from multiprocessing.connection import Connection

ENTRY = "mem_core.runtime.models.compile_trial:compile_trial_main"
_SHOWN_CHARS = 600


def compile_trial_main(connection: Connection) -> None:
    """Entry of the process: takes "cpu" or "cuda", answers with what is wrong in words; empty where nothing is."""
    device = connection.recv()
    try:
        _compile(device)
    except Exception as exc:  # noqa: BLE001 - whatever dynamo, inductor and the compiler raise means: not usable
        connection.send(f"{type(exc).__name__}: {_words(str(exc))}")
    else:
        connection.send("")


def _words(text: str) -> str:
    """The first line and, instead of a command of many lines, what the compiler put out."""
    first, _, rest = text.strip().partition("\n")
    output = rest.partition("Output:")[2] or rest
    lines = [line.strip() for line in (first, *output.splitlines()) if line.strip()]
    return " | ".join(lines)[:_SHOWN_CHARS]


def _compile(device: str) -> None:
    import torch
    import torch._inductor.config as inductor

    inductor.compile_threads = 1  # no pool of processes for one function

    def function(values: torch.Tensor) -> torch.Tensor:
        return torch.relu(values * 2 + 1).sum()

    torch.compile(function, fullgraph=True)(torch.ones(64, device=device))
