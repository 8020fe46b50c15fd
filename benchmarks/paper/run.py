"""The papers' comparisons by one command: starts, resumes and skips runs, and reports on them.

    python benchmarks/paper/run.py                        # all studies of small policies: overnight on two cores
    python benchmarks/paper/run.py --quick                # methods, and one ablation, in under 20 minutes
    python benchmarks/paper/run.py benchmarks/paper/studies/alfworld.yaml        # recipes, on a cluster

Each run has a folder ENVIRONMENT/MODEL/METHOD/seed-N under --out: ``run.json`` (what was run: arguments, commit, versions,
machine, attempts), ``config.yaml`` (resolved), ``metrics-K.jsonl`` (all logged numbers of attempt K), ``train.log``,
``checkpoints/`` and ``eval/``. A run that is done is skipped, one that was interrupted goes on from its last checkpoint.
``verl-bpo report OUT`` reads these folders, and report.py adds the papers' claims.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import platform
import signal
import subprocess
import sys
import time
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from filelock import FileLock, Timeout
from omegaconf import OmegaConf
from tqdm import tqdm

REPOSITORY = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(REPOSITORY))
from benchmarks.paper.study import Run, Study, read_study, slug  # noqa: E402

STUDIES = Path(__file__).parent / "studies"
QUICK = ("methods", "ablations")
ALL = (*QUICK, "long", "alfworld_small")
SPLITS = {"alfworld": ("train", "valid_seen"), "webshop": ("train", "test")}
"""Of the environments whose tasks to train on and to hold out aren't called train and valid."""
COMMAND = [sys.executable, "-m", "verl_bpo.commands.main"]
IMITATION = [sys.executable, str(REPOSITORY / "recipes/imitation/train.py")]
PACKAGES = ("verl_bpo", "verl", "torch", "transformers", "ray", "vllm", "TransferQueue", "textworld", "alfworld")


def environment() -> dict[str, str]:
    """Of every process that is started. Trainer and rollout take turns, so both may use all cores."""
    quiet = {"OMP_WAIT_POLICY": "PASSIVE", "TOKENIZERS_PARALLELISM": "false", "PYTHONWARNINGS": "ignore"}
    path = os.pathsep.join([str(REPOSITORY), *filter(None, [os.environ.get("PYTHONPATH")])])
    return {"OMP_NUM_THREADS": str(min(4, os.cpu_count() or 1)), **quiet, **os.environ, "PYTHONPATH": path}


def provenance() -> dict[str, Any]:
    """What the numbers were made with."""

    def git(*words: str) -> str:
        return subprocess.run(["git", *words], cwd=REPOSITORY, capture_output=True, text=True).stdout.strip()

    versions = {"python": platform.python_version()}
    for name in PACKAGES:
        with contextlib.suppress(PackageNotFoundError):
            versions[name] = version(name)
    pages = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    return {
        "commit": git("rev-parse", "HEAD"),
        "changed_files": len(git("status", "--porcelain", "--untracked-files=no").splitlines()),
        "versions": versions,
        "machine": {"processor": platform.machine(), "cores": os.cpu_count(), "memory_gib": round(pages / 2**30)},
    }


# --- what a run starts from -------------------------------------------------------------------------------------------


def prepare(run: Run, games: dict[str, Any], policy: dict[str, Any], out: Path) -> tuple[Path, Path]:
    """Games, prompt files and warm start of a ``quickstart`` run, where they aren't there yet: (their folder, the policy)."""
    root = out / "data" / slug(run.environment)
    policy = {"seed": run.seed} | policy  # a seed of the study's own means one warm start for all runs
    model = root / f"{slug(run.model)}-{policy['seed']}"
    made = "env" not in games
    name = games.get("kind", "textworld") if made else games["env"]
    if not (root / "valid.parquet").exists():
        if made:
            _must(COMMAND, "make-games", root / "games", *_options(games))
        for file, split in zip(("train", "valid"), SPLITS.get(name, ("train", "valid"))):
            words = ["--root", root / "games"] if made else ["--panel", games[file]]
            _must(COMMAND, "make-data", name, root / f"{file}.parquet", "--split", split, *words)
    if not model.exists():
        words = ["--data", root / "games"] if made else []
        _must(IMITATION, "--env", name, "--out", model, *words, *_options(policy))
    return root, model


def _options(values: dict[str, Any]) -> list[str]:
    words = []
    for key, value in values.items():
        option = key.replace("_", "-")
        if isinstance(value, bool):
            words.append(f"--{option}" if value else f"--no-{option}")
        else:
            words += [f"--{option}", str(value)]
    return words


def _must(command: list[str], *words: Any) -> None:
    done = subprocess.run([*command, *map(str, words)], env=environment(), cwd=REPOSITORY)
    if done.returncode:
        raise SystemExit(f"failed: {' '.join(map(str, done.args[1:]))}")


def training_arguments(run: Run, folder: Path, start: tuple[Path, Path] | None) -> list[str]:
    """Arguments of ``verl-bpo train``. ``start``: what :func:`prepare` returned, for ``quickstart`` runs."""
    from verl_bpo.commands.dry_run import recipe_arguments

    own = [f"trainer.default_local_dir={folder / 'checkpoints'}", "trainer.resume_mode=auto", f"bpo.seed={run.seed}"]
    if run.env_steps is not None:
        own.append(f"bpo.max_env_steps={run.env_steps}")
    if start is None:
        script = REPOSITORY / "recipes" / run.recipe / run.environment / f"run_{run.model}.sh"
        return recipe_arguments(str(script), [*own, *run.overrides])
    root, model = start
    own += [
        f"root={root}",
        f"name={slug(run.method)}-{run.seed}",
        f"actor_rollout_ref.model.path={model}",
        f"critic.model.path={model}",
        "trainer.save_freq=5",
        "trainer.max_actor_ckpt_to_keep=1",
        "trainer.max_critic_ckpt_to_keep=1",
    ]
    config = ["--config-dir", str(REPOSITORY / "recipes/quickstart"), "--config-name", "quickstart"]
    return [*config, *own, *run.overrides]


# --- one run ----------------------------------------------------------------------------------------------------------


def execute(run: Run, out: Path, arguments: list[str], data: Path | None) -> bool:
    """Train in the run's folder under ``out``, or go on training; then evaluate. Whether all of it came to its end.

    Raises:
        ValueError: the folder holds a run with other arguments, or verl would refuse these.
    """
    folder = out / run.folder
    record_file = folder / "run.json"
    record = json.loads(record_file.read_text()) if record_file.exists() else None
    recorded = portable(arguments, out)
    if record and portable(record["arguments"], out) != recorded:
        differ = sorted(set(record["arguments"]) ^ set(recorded))
        raise ValueError(
            f"{folder} was run with other arguments ({', '.join(differ[:4])}): remove it, or give another --out"
        )
    if record is None:
        folder.mkdir(parents=True, exist_ok=True)
        config = resolved_config(run, arguments)
        OmegaConf.save(config, folder / "config.yaml")
        record = {
            **{k: getattr(run, k) for k in ("environment", "model", "method", "seed", "env_steps")},
            "estimator": config.algorithm.adv_estimator,
            "arguments": recorded,
            "attempts": [],
            "done": False,
        }
    if not record["done"]:
        attempt = {"started": time.strftime("%Y-%m-%dT%H:%M:%S%z"), **provenance()}
        record["attempts"].append(attempt)
        number = len(record["attempts"])
        _save(record_file, record)
        begun = time.time()
        try:
            attempt["exit"] = train(run, folder, arguments, number)
        finally:
            attempt["seconds"] = round(time.time() - begun)
            record["done"] = attempt.get("exit") == 0
            _save(record_file, record)
        if not record["done"]:
            return False
    if data is not None and evaluated(folder) < run.eval_episodes:  # more of them are added to what is there
        words = ["--config", folder / "config.yaml", "--panel", data / "valid.parquet", "--episodes", run.eval_episodes]
        words += ["--out", folder / "eval", folder / "checkpoints"]
        done = subprocess.run([*COMMAND, "eval", *map(str, words)], env=environment(), cwd=REPOSITORY)
        return done.returncode == 0
    return True


def portable(arguments: list[str], out: Path) -> list[str]:
    """Arguments as they are recorded: without the places of runs and checkout, so that both may be moved."""
    places = ((str(out), "OUT"), (str(REPOSITORY), "REPOSITORY"))
    for place, name in places:
        arguments = [argument.replace(place, name) for argument in arguments]
    return arguments


def evaluated(folder: Path) -> int:
    """Episodes of each game that the evaluation in a run's folder has played."""
    result = folder / "eval/result.json"
    success = json.loads(result.read_text())["success"] if result.exists() else {"episodes": 0, "tasks": 1}
    return success["episodes"] // success["tasks"]


def resolved_config(run: Run, arguments: list[str]) -> Any:
    """The whole config that verl will see; a run that can't start ends here.

    Raises:
        ValueError: names the first problem.
    """
    from verl_bpo.commands.dry_run import dry_run

    found = dry_run(arguments, folder=REPOSITORY)
    if found.problems or found.config is None:
        raise ValueError(f"{run.title}: {found.problems[0]}")
    OmegaConf.resolve(found.config)
    return found.config


def train(run: Run, folder: Path, arguments: list[str], attempt: int) -> int:
    """Exit status of the trainer."""
    metrics = folder / f"metrics-{attempt}.jsonl"
    variables = {**environment(), "VERL_FILE_LOGGER_PATH": str(metrics)}
    with open(folder / "train.log", "a") as log:
        process = subprocess.Popen(
            [*COMMAND, "train", *arguments],
            env=variables,
            cwd=REPOSITORY,
            stdout=log,
            stderr=subprocess.STDOUT,
            start_new_session=True,  # a Ctrl-C is for this process, which then ends that one
        )
        try:
            watch(process, metrics, run)
            return process.wait()
        finally:
            if process.poll() is None:
                os.killpg(process.pid, signal.SIGINT)
                with contextlib.suppress(subprocess.TimeoutExpired):
                    process.wait(timeout=20)
                if process.poll() is None:
                    os.killpg(process.pid, signal.SIGKILL)


def watch(process: subprocess.Popen, metrics: Path, run: Run) -> None:
    """A bar over environment steps until the trainer ends."""
    with tqdm(total=run.env_steps, desc=run.title, unit="env step") as bar:
        running = True
        while running:
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(timeout=2)
            running = process.poll() is None
            lines = metrics.read_text().splitlines() if metrics.exists() else []
            for line in lines[-8:]:
                with contextlib.suppress(ValueError):
                    data = json.loads(line)["data"]
                    bar.n = int(data.get("compute/env_steps", bar.n))
                    valid = [v for k, v in data.items() if k.startswith("val-") and "/success/mean@" in k]
                    if valid:
                        bar.set_postfix(valid=f"{sum(valid) / len(valid):.0%}", refresh=False)
            bar.refresh()


def _save(file: Path, content: dict[str, Any]) -> None:
    partial = file.with_name(f".{file.name}.partial")
    partial.write_text(json.dumps(content, indent=1) + "\n")
    os.replace(partial, file)


# --- all of them ------------------------------------------------------------------------------------------------------


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "studies", nargs="*", type=Path, help=f"study files (default: {', '.join(ALL)}; with --quick the first two)"
    )
    parser.add_argument(
        "--quick", action="store_true", help="one seed, fewer methods and steps: under 20 minutes on two cores"
    )
    parser.add_argument("--out", type=Path, help="folder of the runs (default runs/paper, or runs/paper-quick)")
    parser.add_argument(
        "--only", default="", help="only runs whose title has this text, such as 'BPO paper' or 'seed 0'"
    )
    parser.add_argument("--list", action="store_true", help="name the runs and whether they are done, and stop")
    arguments = parser.parse_args()
    for stop in (
        signal.SIGINT,
        signal.SIGTERM,
    ):  # the first is ignored in a script's background, unless it is asked for
        signal.signal(stop, signal.default_int_handler)
    out = (arguments.out or REPOSITORY / "runs" / ("paper-quick" if arguments.quick else "paper")).resolve()
    try:
        default = [STUDIES / f"{name}.yaml" for name in (QUICK if arguments.quick else ALL)]
        studies = [read_study(f) for f in arguments.studies or default]
        studies = [s.quickly() for s in studies] if arguments.quick else studies
    except (ValueError, FileNotFoundError) as error:
        raise SystemExit(str(error)) from None
    found: dict[Path, tuple[Study, Run]] = {}
    for study in studies:
        for run in study.runs():
            _, known = found.setdefault(run.folder, (study, run))
            if (known.overrides, known.env_steps) != (run.overrides, run.env_steps):
                raise SystemExit(
                    f"{run.title} has other settings in study {study.name} than in {known.study}: rename it"
                )
    todo = [pair for pair in found.values() if arguments.only in pair[1].title]
    todo.sort(key=lambda pair: pair[1].seed)  # all methods of a seed before the next one
    lock = FileLock(out / ".lock")
    if not arguments.list:
        out.mkdir(parents=True, exist_ok=True)
        try:
            lock.acquire(blocking=False)
        except Timeout:
            raise SystemExit(f"another run.py is at work in {out}: wait for it, or give another --out") from None
    failed = []
    for number, (study, run) in enumerate(todo, 1):
        folder = out / run.folder
        if arguments.list:
            record = folder / "run.json"
            state = json.loads(record.read_text()) if record.exists() else None
            print(f"{run.title}: {'done' if state and state['done'] else 'interrupted' if state else 'not started'}")
            continue
        print(f"\n== {number}/{len(todo)} {run.title}", flush=True)
        try:
            start = None
            if run.launcher == "quickstart":
                start = prepare(run, study.environments[run.environment], study.models[run.model], out)
            done = execute(run, out, training_arguments(run, folder, start), start and start[0])
        except ValueError as error:
            raise SystemExit(str(error)) from None
        except KeyboardInterrupt:
            raise SystemExit("\ninterrupted: the same command goes on from here") from None
        if not done:
            failed.append(run.title)
            print(f"failed: see above, and {folder / 'train.log'}", file=sys.stderr)
    if arguments.list:
        return 0
    report = [sys.executable, str(Path(__file__).with_name("report.py")), str(out), "--out", str(out / "report")]
    status = subprocess.run(report, env=environment()).returncode  # it says itself what it lacks
    if failed:
        print(f"{len(failed)} of {len(todo)} runs failed: {'; '.join(failed)}", file=sys.stderr)
    return 1 if failed or status else 0


if __name__ == "__main__":
    sys.exit(main())
