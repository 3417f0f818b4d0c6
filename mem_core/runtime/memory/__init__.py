"""The parts of adaptive memory in a rank: readings against every limit, and the measured line."""
