"""A step's inputs from the device table, and its drafts."""
