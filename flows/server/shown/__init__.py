"""Pages that the server of `mem serve` shows itself: the list of all runs, and each run's report.

Called by `flows.server.embedded`. Nothing but reports of known runs is ever read for a browser.
"""
