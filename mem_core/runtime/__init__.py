"""What does the work: sessions, ranks, DeepSpeed, checkpoints, data, models, proofs, chaos.

Called by bootstrap, tasks and flows. Decisions are asked of core; Prefect is never imported.
"""
