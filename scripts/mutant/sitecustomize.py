"""Python runs this at its start, with this folder on PYTHONPATH, in the processes that tests start, too.

It replaces a module by the file that JAXCGX_MUTANT names. With JAXCGX_ENTERED, entered.py follows the process.
"""

import os
import sys

if given := os.environ.get("JAXCGX_MUTANT"):  # MODULE=PATH
    import subprocess

    module, _, path = given.partition("=")
    script, popen = module.replace(".", "/") + ".py", subprocess.Popen.__init__
    for finder in sys.meta_path:  # that of the editable install
        if module in getattr(finder, "known_source_files", ()):
            finder.known_source_files = {**finder.known_source_files, module: path}

    def start(self, args, *more, **options):
        """Starts a process. A module that is run as a script may run isolated from this file (jaxcgx/lab/relay.py)."""
        words = [path if str(word).endswith(script) else word for word in args] if isinstance(args, list) else args
        popen(self, words, *more, **options)

    subprocess.Popen.__init__ = start

if "JAXCGX_ENTERED" in os.environ and (test := os.environ.get("PYTEST_CURRENT_TEST")):
    import entered

    entered.follow(test.rpartition(" ")[0])
