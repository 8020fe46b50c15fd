"""What ``verl-bpo eval`` is made of: the panel, the options, the episodes, their summary."""
