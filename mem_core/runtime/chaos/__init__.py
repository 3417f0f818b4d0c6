"""Real faults on purpose: `plan` says which and when, `faults` strike, `drill` compares with an undisturbed twin.

Called by `mem drill` and its flow. Production code knows nothing of it: faults come by signals, files and ports.
"""
