"""Made-up runs of known numbers."""

import json

import pandas as pd

from verl_bpo.report.logs import Log
from verl_bpo.report.runs import load_run

SUCCESS = "val-core/textworld/success/mean@1"


def make_run(method, seed, val, estimator="bpo", seconds=10.0, norms=(1.0, 2.0, 3.0), evaluated=None, reward=None):
    """Three logged steps of two updates each."""
    frame = pd.DataFrame(
        {
            SUCCESS: val,
            "compute/updates": [0, 2, 4],
            "compute/env_steps": [0, 100, 200],
            "timing_s/step": seconds,
            "actor/grad_norm": norms,
        },
        index=pd.Index([0, 1, 2], name="step"),
    )
    record = {"environment": "world", "model": "small", "method": method, "seed": seed, "estimator": estimator}
    if evaluated is not None:
        row = {"mean": evaluated, "wilson": [0, 1], "bootstrap": [0, 1], "episodes": 10, "tasks": 5}
        record["evaluation"] = {"success": row, "task_types": {"pick": row, "look": row}}
        record["evaluation"]["reward"] = evaluated if reward is None else reward
    return load_run(method, Log(path=method, frame=frame, record=record))


def write_study(folder):
    """What run.py leaves of two methods and two seeds."""
    for method, estimator, last in (("BPO", "bpo", 0.7), ("GRPO", "grpo", 0.5)):
        for seed in range(2):
            place = folder / method / f"seed-{seed}"
            place.mkdir(parents=True)
            run = make_run(method, seed, [0.1, 0.3, last], estimator, evaluated=last)
            attempt = {"commit": "a" * 40, "changed_files": 1, "versions": {"verl": "0.9.1"}, "seconds": 1800}
            record = {k: v for k, v in run.record.items() if k != "evaluation"} | {"attempts": [attempt], "done": True}
            (place / "run.json").write_text(json.dumps(record))
            (place / "eval").mkdir()
            (place / "eval/result.json").write_text(json.dumps(run.record["evaluation"]))
            lines = [
                {"step": s, "data": {SUCCESS: v, "compute/updates": 2 * s, "compute/env_steps": 100 * s}}
                for s, v in enumerate((0.1, 0.3, last))
            ]
            (place / "metrics-1.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
