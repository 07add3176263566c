"""The values of a pass that the stand-in's tensor replacement puts in place of modules' outputs."""

from __future__ import annotations


class RuntimeRegister:
    """The modules that are replaced, and the tensors and masks of the pass that runs."""

    module_superset = ()
    tensors, masks = (), ()
