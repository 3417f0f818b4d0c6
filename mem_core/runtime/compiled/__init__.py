"""One compiled function from tokens to the summed loss, made in the fork server and inherited by every rank that it forks.

`loss` is the function, `canonical` the passes that it is compiled for, `warm` what the fork server runs, `inherited` what a rank does
with it. Imports torch and nothing of DeepSpeed. Nothing here decides whether a run is compiled: `core.compilation` does.
"""
