"""Verbs that tell what is in a run folder, a store or a request's data and train nothing: `mem logs`, `mem runs`, `mem data`.

Called by `flows/cli.py` alone. What they look at is never changed by them.
"""
