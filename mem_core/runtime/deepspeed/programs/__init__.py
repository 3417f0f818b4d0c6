"""Programs that need DeepSpeed and run in processes of their own: building ops, exporting, resharding.

Started by the prepare step, the commands and `proof`. Never imported by the training path for what they do.
"""
