"""Who takes a run's figures: one port, an adapter a file. Nothing of training waits for any of them, and none of them ends a run.

Called by `runtime/session/results`, which knows when a segment was committed, rows were looked at, and work went back to an earlier step.
"""
