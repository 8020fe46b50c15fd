"""small broken Python packages, repaired by shell commands; make some with `verl-bpo make-games --kind repair`."""

ENVIRONMENT = "environment:RepairEnvironment"
INSTALL = "apt-get install bubblewrap"
