"""Copies of proven checkpoints in a remote store: file by file, each checked, manifest last; never on the training path.

Called by the session's remote service and by restore. No rename exists there: names and create-only objects do the fencing.
"""
