"""The public address of `submit`: `from flows.submit import submit`."""

from flows.server.submit import RunHandle, submit

__all__ = ["RunHandle", "submit"]
