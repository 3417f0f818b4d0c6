"""What people see of a run: metrics files, TensorBoard, progress, report."""
