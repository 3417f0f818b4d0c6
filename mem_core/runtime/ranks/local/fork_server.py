"""The fork server's program: imports the heavy libraries once, then forks ready workers in milliseconds.

Started as `python -m mem_core.runtime.ranks.local.fork_server FD OWNER_PID MODULE...`. `multiprocessing`'s own fork server
outlives a killed owner and runs the owner's main module again in each child; this one asks for the parent-death signal before
anything else, ends when its socket closes, and never touches the owner's main module. See decision record 0001.

Protocol on the sequenced-packet socket: the owner sends {"entry": "module:function", "log": path} with two descriptors
(control connection, exit pipe). The server writes `pid N` to the exit pipe after the fork and `exit CODE` when the child is
gone (negative: killed by that signal), so that each child has its own channel and nothing is shared. With "inside" in its order
the function runs in the server, before anything else that is asked for: what it leaves in memory, later children are born with.
"""

import contextlib
import os
import signal
import stat
import sys

from mem_core.infrastructure.machine.process_ties import die_with_parent


def main(argv: list[str]) -> int:
    """Serve until the owner closes the socket or dies."""
    socket_fd, owner_pid = int(argv[0]), int(argv[1])
    die_with_parent(owner_pid)
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    import gc
    import importlib
    import socket

    link = socket.socket(fileno=socket_fd)
    for module in argv[2:]:
        importlib.import_module(module)
    _refuse_initialised_cuda()
    gc.collect()
    gc.freeze()  # keeps the imported objects' pages shared between the children
    link.send(b"ready")
    serve(link)
    return 0


def _refuse_initialised_cuda() -> None:
    torch = sys.modules.get("torch")
    if torch is not None and torch.cuda.is_initialized():
        raise RuntimeError("the fork server's imports initialised CUDA; forked workers could not use the device")


def serve(link) -> None:  # type: ignore[no-untyped-def]
    """Fork on request, report exits, until end of file."""
    import json
    import select
    import socket

    wake_read, wake_write = os.pipe()
    os.set_blocking(wake_write, False)
    signal.set_wakeup_fd(wake_write)
    signal.signal(signal.SIGCHLD, lambda *_: None)
    exit_pipes: dict[int, int] = {}
    while True:
        readable, _, _ = select.select([link, wake_read], [], [])
        if wake_read in readable:
            os.read(wake_read, 4096)
            _report_exits(exit_pipes)
        if link in readable:
            message, descriptors, _, _ = socket.recv_fds(link, 65536, 2)
            if not message:
                return
            control_fd, exit_fd = descriptors
            order = json.loads(message)
            if order.get("inside"):
                os.close(exit_fd)
                _run_inside(control_fd, order["entry"])
                continue
            pid = os.fork()
            if pid == 0:
                for pipe in (wake_read, wake_write, *exit_pipes.values()):
                    os.close(pipe)
                _run_child(link, control_fd, exit_fd, order)
            os.close(control_fd)
            exit_pipes[pid] = exit_fd
            _write(exit_fd, f"pid {pid}\n")


def _run_inside(control_fd: int, entry: str) -> None:
    """Run a function in a thread and wait for its end. The thread that forks must never have computed anything: OpenMP keeps its team
    of threads with the thread that opened it, and a child of that one would wait for a team that it does not have."""
    import gc
    import threading
    import traceback

    def run() -> None:
        try:
            _called(entry, control_fd)
        except BaseException:  # noqa: BLE001 - the server outlives whatever it is asked to run
            traceback.print_exc()

    thread = threading.Thread(target=run, name="inside")
    thread.start()
    thread.join()
    gc.collect()
    gc.freeze()  # as after the imports


def _called(entry: str, control_fd: int) -> None:
    """Call `module:function` with the connection, and close that."""
    import importlib
    from multiprocessing.connection import Connection

    module, _, function = entry.partition(":")
    with Connection(control_fd) as connection:
        getattr(importlib.import_module(module), function)(connection)


def _report_exits(exit_pipes: dict[int, int]) -> None:
    while exit_pipes:
        pid, status = os.waitpid(-1, os.WNOHANG)
        if pid == 0:
            return
        descriptor = exit_pipes.pop(pid, None)
        if descriptor is not None:
            _write(descriptor, f"exit {os.waitstatus_to_exitcode(status)}\n")
            os.close(descriptor)


def _write(descriptor: int, text: str) -> None:
    with contextlib.suppress(BrokenPipeError):  # the owner has lost interest in this child
        os.write(descriptor, text.encode())


def _run_child(link, control_fd: int, exit_fd: int, order: dict[str, str]) -> None:  # type: ignore[no-untyped-def]
    """Become the worker: own session, own log, default signals. Never returns."""
    code = 1
    try:
        server_pid = os.getppid()
        die_with_parent(server_pid)
        signal.set_wakeup_fd(-1)
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
        link.close()
        os.close(exit_fd)
        os.setsid()
        log_fd = _open_log(order["log"])
        os.dup2(log_fd, 1)
        os.dup2(log_fd, 2)
        os.close(log_fd)
        import faulthandler

        faulthandler.enable()
        faulthandler.register(signal.SIGUSR1, all_threads=True)
        _called(order["entry"], control_fd)
        code = 0
    except BaseException:  # noqa: BLE001 - the last frame of a process: everything is reported, nothing may escape
        import traceback

        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)


def _open_log(path: str) -> int:
    """The child's log, for its owner alone. What is no plain file under that name is set aside: opening a pipe would wait for ever."""
    with contextlib.suppress(FileNotFoundError):
        if not stat.S_ISREG(os.stat(path).st_mode):
            os.rename(path, f"{path}.not-a-file-{os.getpid()}")
    return os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_NONBLOCK, 0o600)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
