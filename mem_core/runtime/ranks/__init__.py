"""The rank processes of a run: ports in front, adapters behind.

Here stand the values and ports that everybody else is written against: `place` (where one rank stands), `port` (`Ranks` starts and
watches the ranks of a try, `Helpers` gives single processes, `Pulse` is a rank's sign of life) and `agreement` (how ranks agree on
one step's orders). `local/` is the adapter for one machine, `worker/` is what runs inside a rank. Another way to host ranks is a
folder beside `local/` that passes `mem_core.testing.contracts.ranks_contract` and, where it has an `Agreement` of its own,
`mem_core.testing.contracts.agreement_contract`.

May be called by session, proof and chaos, and by the composition root; the ports also by the training loop and adaptive memory.

Never here: a decision about the run (that is `core.recovery`), a tensor, an import of DeepSpeed or Prefect. Never in a port: an
address, or a path below `live`.
"""
