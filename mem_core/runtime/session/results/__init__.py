"""What a run comes to beside its steps: figures of held-out rows, and the model folder at its end.

Called by the session. Nothing here changes what is trained, and nothing that fails here ends a run.
"""
