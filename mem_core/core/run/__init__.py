"""What a run is and what happened in it: record, lease, journal, and the folds that turn the journal into state and result.

Called by the session, the commands and the views. Only `StateManager` writes; a fold never guesses what a line does not say.
"""
