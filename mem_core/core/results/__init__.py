"""What a run comes to: how many steps it has, what held-out rows say of it, how its model describes itself.

Called by bootstrap, the session, the fold of the journal and the commands. Pure: nothing here reads a file or acts.
"""
