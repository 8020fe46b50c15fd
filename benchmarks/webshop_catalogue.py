"""Load time and memory of WebShop with many products: catalogues scaled up from the small shop's thousand.

The full shop's 1.18 million products are a download of several gigabytes. Here a catalogue of any size is made from the
small one: each product takes a thousandth's options, prices and texts, with the words of its title and description mixed with
another's, an id of its own and one word of its own. So lengths, options and goals per product are the small shop's; the
vocabulary is poorer than the real one's. Results are about SYNTHETIC catalogues and say so.

Each size is loaded in two processes, one after the other: the first builds the search index and keeps it beside the products,
as for the full shop; the second takes it from there. Times are wall and CPU seconds; memory is resident, pages of mapped files
(products, kept index) that were read included, which the system takes back when it needs them.

    WEBSHOP_DATA=some/folder python benchmarks/webshop_catalogue.py --sizes 1000 10000 100000
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import random
import resource
import statistics
import tempfile
import time
from pathlib import Path

from episodes import memory_mib

from verl_bpo.envs.webshop.catalogue import INSTRUCTION_FILES, PRODUCT_FILES
from verl_bpo.envs.webshop.environment import WebshopEnvironment

RESULT = Path(__file__).with_name("results") / "webshop_catalogue.json"
FULL = 1_181_436
"""Products of the full shop, as WebShop's paper counts them."""


def make_shop(source: Path, folder: Path, count: int, seed: int = 0) -> None:
    """Write a catalogue of ``count`` products as the full shop of ``folder``."""
    rng = random.Random(seed)
    rows = json.loads((source / PRODUCT_FILES["small"]).read_bytes())
    known = json.loads((source / INSTRUCTION_FILES["small"]).read_bytes())
    texts = {key: [row[key].split() for row in rows] for key in ("name", "full_description")}
    with (
        open(folder / PRODUCT_FILES["all"], "w") as products,
        open(folder / INSTRUCTION_FILES["all"], "w") as instructions,
    ):
        products.write("[")
        instructions.write("{")
        for number in range(count):
            row, asin = dict(rows[number % len(rows)]), f"S{number:09d}"
            entry = known.get(row["asin"], {})
            row["asin"] = asin
            for key, words in texts.items():
                mixed = words[number % len(rows)] + rng.choice(words)
                row[key] = " ".join(rng.sample(mixed, len(mixed) // 2))
            row["full_description"] += f" model{number}"
            comma = "," if number else ""
            products.write(comma + json.dumps(row))
            instructions.write(f"{comma}{json.dumps(asin)}:{json.dumps(entry)}")
        products.write("]")
        instructions.write("}")


def measure(folder: str, queries: int, episodes: int) -> dict[str, float]:
    """Load the shop of ``folder`` in this process, then search, play and copy."""
    before, wall, cpu = memory_mib(), time.perf_counter(), time.process_time()
    environment = WebshopEnvironment(folder, products="all")
    catalogue = environment._catalogue
    result = {
        "load_s": time.perf_counter() - wall,
        "load_cpu_s": time.process_time() - cpu,
        "peak_mib": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024,
        "memory_mib": memory_mib() - before,
        "goals": len(catalogue.goals),
    }
    rng, times, steps = random.Random(1), [], []
    for _ in range(queries):
        words = rng.choice(catalogue.products).title.split()
        query = " ".join(rng.sample(words, min(4, len(words))))
        start = time.process_time()
        catalogue.search(query)
        times.append(1e3 * (time.process_time() - start))
    result["query_cpu_ms"] = statistics.median(times)
    for _ in range(episodes):
        observation = environment.reset(str(rng.randrange(len(catalogue.goals))))
        observation = environment.step(f"search[{' '.join(observation.text.split()[8:12])}]")
        for _ in range(6):
            actions = [action for action in observation.actions if action != "click[buy now]"]
            start = time.process_time()
            observation = environment.step(rng.choice(actions))
            steps.append(1e3 * (time.process_time() - start))
    result["click_cpu_ms"] = statistics.median(steps)
    start_mib, count = memory_mib(), 1000
    copies = [WebshopEnvironment(folder, products="all") for _ in range(count)]
    for copy in copies:
        copy.reset("0")
    result["memory_per_episode_kib"] = 1024 * (memory_mib() - start_mib) / count
    return result


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data-dir", default=os.environ.get("WEBSHOP_DATA"), help="the small shop's data folder")
    parser.add_argument("--sizes", type=int, nargs="+", default=[1000, 10_000, 100_000], help="products")
    parser.add_argument("--out", type=Path, default=RESULT)
    arguments = parser.parse_args()
    if not arguments.data_dir:
        parser.error("name the small shop's data folder with --data-dir or WEBSHOP_DATA")
    rows = {}
    context = multiprocessing.get_context("spawn")
    print(
        f"{'products':>9} {'goals':>10} {'load s':>8} {'CPU s':>8} {'again s':>8} {'CPU s':>8} {'peak MiB':>9} "
        f"{'again MiB':>9} {'index MiB':>9} {'query ms':>9} {'click ms':>9}"
    )
    for size in arguments.sizes:
        with tempfile.TemporaryDirectory() as folder:
            make_shop(Path(arguments.data_dir), Path(folder), size)
            megabytes = (Path(folder) / PRODUCT_FILES["all"]).stat().st_size / 2**20
            runs = []
            for _ in range(2):
                with context.Pool(1) as pool:
                    runs.append(pool.apply(measure, (folder, 200, 30)))
                    pool.close()
                    pool.join()
            index = sum(file.stat().st_size for file in Path(folder).glob("*.bm25s-*/*")) / 2**20
        row, again = runs
        kept = {
            f"again_{key}": again[key] for key in ("load_s", "load_cpu_s", "peak_mib", "memory_mib", "query_cpu_ms")
        }
        rows[size] = row = {"file_mib": megabytes, "index_mib": index, **row, **kept}
        print(
            f"{size:9,} {row['goals']:10,} {row['load_s']:8.1f} {row['load_cpu_s']:8.1f} {row['again_load_s']:8.1f} "
            f"{row['again_load_cpu_s']:8.1f} {row['peak_mib']:9.0f} {row['again_memory_mib']:9.0f} {index:9.0f} "
            f"{row['query_cpu_ms']:9.2f} {row['click_cpu_ms']:9.3f}",
            flush=True,
        )
    result = {
        "catalogues": "SYNTHETIC, scaled up from the small shop's products",
        "cores": os.cpu_count(),
        "load_average": os.getloadavg(),
        "rows": rows,
    }
    if len(rows) > 1:
        small, large = sorted(rows)[-2:]
        per = {
            key: (rows[large][key] - rows[small][key]) / (large - small)
            for key in ("load_cpu_s", "again_load_cpu_s", "peak_mib", "memory_mib", "again_memory_mib", "index_mib")
        }
        result["extrapolated"] = {key: rows[large][key] + slope * (FULL - large) for key, slope in per.items()} | {
            "products": FULL,
            "how": f"the line through {small} and {large} products",
        }
        print("extrapolated to the full shop:", json.dumps(result["extrapolated"]))
    arguments.out.parent.mkdir(parents=True, exist_ok=True)
    arguments.out.write_text(json.dumps(result, indent=2) + "\n")


if __name__ == "__main__":
    main()
