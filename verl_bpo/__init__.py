"""verl_bpo: tree rollouts (BPO) and a shared actor-critic backbone (SAPO) for verl."""

__version__ = "0.1.0"
