"""verl_bpo: tree rollouts (BPO) and actor and critic in one network (SAPO) for verl."""

__version__ = "0.1.0"
