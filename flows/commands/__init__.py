"""The verbs of `mem`, one file a verb, and the programs that they start.

Called by `flows.cli`. People's words go to standard error; one JSON object to standard output where it was asked for.
"""
