"""Real environments, each a module or a package found by its name: see :mod:`verl_bpo.sandbox.loading`."""
