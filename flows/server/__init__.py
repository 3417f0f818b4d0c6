"""Prefect's server side: an embedded server, `mem serve`, automations, submitting, a person's approval.

Called by commands and flows. Training never depends on any of it.
"""
