"""Which model a request means: presets, folders, URLs; its sizes, its tokenizer, and the module itself.

Called by the doctor's look, the prepare step and ranks. No code from a model folder is run, no pickle is read.
"""
