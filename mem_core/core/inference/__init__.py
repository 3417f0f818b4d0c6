"""Which prompts are answered together, and what is remembered of it. Pure.

Called by `runtime/inference`. Nothing here reads a file, knows a model or looks at a clock.
"""
