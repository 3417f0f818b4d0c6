"""Whether a run's passes are compiled: decided once, from what it is, never by a stopwatch. Pure; called by doctor and opening."""
