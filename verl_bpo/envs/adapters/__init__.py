"""Other people's environments as they are, each kind a module found by the prefix of a name: ``gymnasium:FrozenLake-v1``."""
