"""What a run comes to beside its steps: figures of held-out rows, answers to fixed prompts, and the model folder at its end.

Called by the session. Nothing here changes what is trained, and nothing that fails here ends a run.
"""
