"""Inside a rank process: from the first message to the last reply.

`protocol` holds what driver and rank say to each other, plain frozen values; `main` obeys commands one after the other and is where a
rank's parts are put together; `device` is the one device that the rank computes on; `classify` turns exceptions and deaths into
outcomes; `preload` is what a fork server imports so that every rank has it at birth.

`main` is called by name by whoever forks a rank, `protocol` and `classify` by both sides, `device` by the training loop and adaptive
memory.

Never here: a decision about the run, a retry of a failed command (the process is thrown away instead), a look at another rank except
through its `Agreement`, anything but its own log, its heartbeat and the folder that it was told to save into. `protocol`, `main` and
`classify` import neither torch nor DeepSpeed at their top: the driver imports them too.
"""
