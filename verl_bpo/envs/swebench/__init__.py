"""SWE-bench: real repositories, repaired by shell commands; get some ready with `verl-bpo prepare swebench`."""

ENVIRONMENT = "environment:SwebenchEnvironment"
INSTALL = "pip install verl_bpo[swe]"
