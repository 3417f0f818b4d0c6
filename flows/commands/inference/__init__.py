"""The verbs that use a model without training it: answers to prompts, figures of rows.

Called by `flows.cli` and the flow of the same name. A run is only read; an export that is missing is made beside its others.
"""
