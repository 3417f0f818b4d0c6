"""The planner of runs that want no advice."""

from mem_core.domain.advice import TelemetrySummary


class NoPlanner:
    """Never has advice, so that the request's own values hold."""

    def advise(self, summary: TelemetrySummary) -> None:
        """No advice, whatever the summary says."""
        del summary
