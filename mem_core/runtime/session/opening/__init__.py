"""From a request to a session: the frozen stages, what is refused on the way, what must be ready, and the wiring of the parts.

Called by bootstrap. What fails half-way gives everything back; nothing here takes a step of training.
"""
