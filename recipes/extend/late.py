"""A selector of your own: branch at random, but only late in an episode."""

from verl_bpo.tree.selectors import Choosing


class Late(Choosing):
    after: int = 3
    """Turns before which nothing branches. A field is a key of ``bpo.branch``."""
    share: float = 0.5
    """Share of the later decision points that branch."""

    def chooses(self, point):
        return point.depth >= self.after and point.chance < self.share

    def state_only(self, entropy_of_state):
        return True  # depth and chance tell nothing of the action, so the trunk may stand in its forks' baselines
