"""Decisions, and the run folder's own record. Pure but for `run/`, which reads and writes the journal and the lease.

Called by runtime and the layers above. Starts no process, imports no torch, talks to no network.
"""
