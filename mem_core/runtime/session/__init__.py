"""One attempt of a run: opened in stages, driven segment by segment, ended whatever happens.

Called by bootstrap, tasks and the testing driver. `run_loop` is the only loop of segments; no part here touches a tensor.
"""
