"""The engine inside a rank: building it, one step, state in and out, evaluation. The only package that imports deepspeed.

Called by `ranks/worker` inside a rank process. It is told a step to reach and decides nothing about the run.
"""
