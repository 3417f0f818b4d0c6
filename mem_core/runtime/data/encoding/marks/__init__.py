"""What a preparation knows in its middle, and how that outlives a kill: marks, which the next one goes on from.

Used by the tokenising process alone. Nothing is believed that does not prove itself by its digest; nothing here decides a token.
"""
