"""TextWorld: small generated text games; make some with `verl-bpo make-games`."""

ENVIRONMENT = "environment:TextworldEnvironment"
INSTALL = "pip install textworld"
