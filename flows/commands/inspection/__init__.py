"""Verbs that tell what is in a run folder or a store and change nothing: `mem logs`, `mem runs`. Called by `flows/cli.py` alone."""
