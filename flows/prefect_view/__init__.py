"""What an operator sees in Prefect's UI while a run goes on: artifacts, events, log lines; nothing of it on the training path."""
