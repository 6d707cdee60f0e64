"""Packed weights in the layouts of other programs: one file, one layout."""
