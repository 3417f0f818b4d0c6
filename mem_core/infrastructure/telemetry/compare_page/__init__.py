"""The page of `mem compare`: runs side by side, with inline pictures and style, and nothing that runs or is fetched.

Called by `flows/commands/inspection/compare.py` with values that `mem_core.core.results.comparison` gathered. Nothing here reads a file.
"""
