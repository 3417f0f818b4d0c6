"""Planners: who may propose hyper-parameters. None of them can apply anything (I7).

Called by the session's advice service through a thread with a time limit. A reply is bytes until the policy engine has read it.
"""
