"""Answers to prompts and figures of rows, from a model that is not trained meanwhile: in a process of its own, watched by its owner.

Called by the verbs and the flow of inference. Rows are answered once; a batch is written down before it is answered; what a process
leaves when it is killed is gone on with. Nothing here knows Prefect, and nothing of a run is changed.
"""
