"""The interface to C++: the primitives, their registration, and the same arithmetic in jnp."""

import pathlib
import sys

# Whether this process is the command line: `python -m jaxcgx`, whose import of the package comes while Python still
# looks for the module, or the script `jaxcgx`. Its help needs no JAX, and its doctor no native module.
COMMAND = pathlib.Path(*sys.argv[:1]).name == "jaxcgx" or (
    sys.argv[:1] == ["-m"] and ("-m", "jaxcgx") in zip(sys.orig_argv, sys.orig_argv[1:])
)
