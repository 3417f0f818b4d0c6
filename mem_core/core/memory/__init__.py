"""How much memory a pass needs, when a plan shrinks or grows, what is left to try. Pure.

Called by the ranks (`runtime/memory`) and the supervisor (`session/memory_service`). Reads no counter, frees nothing.
"""
