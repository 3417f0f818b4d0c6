"""The zero-trust gate: what becomes of advice. Pure, and replayed from what was recorded.

Called by `session/advice_service` and `mem policy`. No value reaches the engine but through `LocalPolicyEngine`; nothing is repaired.
"""
