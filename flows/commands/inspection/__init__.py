"""Verbs that tell what is in a run folder or a store and change nothing in it: `mem logs`, `mem runs`; and `mem data`, what a request trains on. Called by `flows/cli.py` alone."""
