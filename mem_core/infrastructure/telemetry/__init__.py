"""What people see of a run: metrics files, TensorBoard, progress, report.

Called by the session and the commands. Telemetry never stops training and never decides how a run ends.
"""
