"""Looking at the machine: memory and its limits, devices, control groups, stores, builds, processes. Reads only.

Called by the doctor's way through `bootstrap`, by memory readers and by chaos. No judgement here, and no torch in this process.
"""
