"""What a run comes to: how long it is, what held-out rows say of it, how its model describes itself. Pure."""
