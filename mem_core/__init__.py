"""MEM's engine room: everything but Prefect. Start with README.md beside this file; what must never break stands in INVARIANTS.md.

Called by tasks and flows. Never imports Prefect, flows or tasks. Importing any module here acts on nothing.
"""
