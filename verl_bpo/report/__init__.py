"""What people look at after a run: pictures of trees, comparisons of runs, and a check of every advantage."""
