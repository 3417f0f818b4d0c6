"""Where a run that was forked from another came from."""

from pydantic import Field

from mem_core.domain.units import Value


class ForkOrigin(Value):
    """The checkpoint that a run began with, in the words of the run that made it."""

    run_id: str
    step: int = Field(ge=0)
    weights_digest: str = ""
    trajectory_digest: str = ""
    manifest_sha256: str = Field(default="", description="Of the manifest's bytes, as the origin's journal names it.")
    store: str = Field(default="", description="Where the origin lay, without credentials.")
    changed: tuple[str, ...] = Field(
        default=(), description="What was changed, a field each in words; empty: it goes on as the origin did."
    )

    def words(self) -> str:
        """`forked from RUN at step N`."""
        return f"forked from {self.run_id} at step {self.step:,}"

    def changes(self) -> str:
        """What was changed, in words."""
        return "; ".join(self.changed) or "nothing changed"
