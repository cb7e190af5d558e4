"""Model families, one module each: FAMILY has its marks, readers, grammars and template signs.

`node/dialect/format_selection.py` finds the modules. A new family is a new module here, and its
names in `fabric/settings.py`, where the command line checks settings.
"""
