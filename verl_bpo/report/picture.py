"""One tree as a still picture, for pages that can't run a script."""

from __future__ import annotations

from functools import partial
from pathlib import Path

from verl_bpo.report.analysis import RootSibling, TreeView
from verl_bpo.tree.topology import ROOT

INK, FAINT, MASKED, HALO = "#1b1b1a", "#8b8a84", "#a9a7a1", "#7a5fb0"
RAMP = ("#d1600a", "#f1efea", "#1f63b5")
"""Negative, zero, positive: two hues that stay apart for colour-blind readers."""


def write_picture(view: TreeView, roots: list[RootSibling], out: str | Path) -> None:
    """Draw a tree with matplotlib: turns along x, branches along y, coloured by advantage.

    Args:
        view: the tree.
        roots: the prompt's group of first turns (the caption counts it).
        out: the picture; its suffix names the format (png, svg, pdf).
    """
    from matplotlib.colors import LinearSegmentedColormap, Normalize
    from matplotlib.figure import Figure
    from matplotlib.lines import Line2D

    tree, dumped = view.tree, view.advantages
    rows = view.rows()
    x, y = view.depth, [rows[n.trajectory] for n in tree.nodes]
    deepest, lowest = max(x, default=1), max(y, default=0)
    labels = lowest < 40 and deepest <= 24
    pitch = (0.92, 0.44) if labels else (0.4, 0.2)
    figure = Figure(figsize=(2.8 + pitch[0] * deepest, 1.9 + pitch[1] * lowest), layout="constrained")
    axes = figure.subplots()

    for i, node in enumerate(tree.nodes):
        px, py = (0, 0) if node.parent == ROOT else (x[node.parent], y[node.parent])
        axes.plot([px, px + 0.5, px + 0.5, x[i]], [py, py, y[i], y[i]], color="#b4b2ab", lw=1.1, zorder=1)
    for p in [ROOT, *view.branch_points()]:
        if len(view.siblings(p)) > 1:
            px, py = (0, 0) if p == ROOT else (x[p], y[p])
            axes.plot(px + 0.5, py, marker="D", ms=5, color=INK, zorder=2)
    axes.plot(0, 0, marker="s", ms=7, color=INK, zorder=3)

    most = max((s for s in view.score if s is not None), default=0) or 1
    scored = [i for i, s in enumerate(view.score) if s is not None]
    halo = [(9 + 11 * max(view.score[i], 0) / most) ** 2 for i in scored]
    axes.scatter([x[i] for i in scored], [y[i] for i in scored], s=halo, color=HALO, alpha=0.26, lw=0, zorder=3)

    valid = dumped.valid if dumped else [False] * len(tree.nodes)
    grey = [i for i, v in enumerate(valid) if not v]
    axes.scatter([x[i] for i in grey], [y[i] for i in grey], s=74, color=MASKED, lw=0, zorder=4)
    if any(valid):
        shown = [i for i, v in enumerate(valid) if v]
        values = [dumped.advantage[i] for i in shown]
        limit = max(map(abs, values)) or 1.0
        ramp = LinearSegmentedColormap.from_list("advantage", RAMP)
        dots = axes.scatter(
            [x[i] for i in shown], [y[i] for i in shown], s=84, c=values, cmap=ramp, norm=Normalize(-limit, limit),
            edgecolors="#4a4945", linewidths=0.8, zorder=5,
        )  # fmt: skip
        bar = figure.colorbar(dots, ax=axes, fraction=0.04, aspect=32, pad=0.01, shrink=0.8, ticks=[-limit, 0, limit])
        bar.set_label("advantage", color=FAINT, size=9)
        bar.ax.tick_params(colors=FAINT, labelsize=8, length=0)
        bar.outline.set_visible(False)
    note = partial(axes.annotate, textcoords="offset points")
    if labels:
        for i, node in enumerate(tree.nodes):
            text = node.action_text if len(node.action_text) <= 18 else node.action_text[:17] + "…"
            note(text, (x[i], y[i]), (0, -10), ha="center", va="top", size=6, color="#5c5b57")
    for t, r in zip(tree.trajectories, view.leaf_return):
        if t.leaf >= 0:
            end = "lost" if r is None else f"{r:.2f}" + (" cut off" if t.end == "truncated" else "")
            note(end, (x[t.leaf], y[t.leaf]), (13, 0), va="center", size=8, color=INK)

    axes.set(xlim=(-0.3, deepest + 1.1), ylim=(lowest + 0.8, -0.7))
    axes.set(yticks=[], xticks=range(1, deepest + 1, max(1, deepest // 20)))
    axes.set_xlabel("turn", color=FAINT, size=9)
    axes.tick_params(colors=FAINT, labelsize=8, length=0)
    for spine in axes.spines.values():
        spine.set_visible(False)
    record, name = view.record, Path(view.record.task).name
    group = f", {len(roots)} root samples of this task in all" if len(roots) > len(view.siblings(ROOT)) else ""
    axes.set_title(f"{name}, step {record.step}: {len(view.returns)} leaves{group}", loc="left", size=10, color=INK)
    handles = [
        Line2D([], [], marker="D", ls="", ms=5, color=INK, label="branch point"),
        Line2D([], [], marker="o", ls="", ms=14, color=HALO, alpha=0.26, mew=0, label="halo: entropy"),
        Line2D([], [], marker="o", ls="", ms=8, color=MASKED, label="masked: no siblings to compare with"),
    ]
    figure.legend(handles=handles, loc="outside lower left", ncols=3, frameon=False, fontsize=8, labelcolor="#5c5b57")
    Path(out).parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(out, dpi=150, facecolor="white")
