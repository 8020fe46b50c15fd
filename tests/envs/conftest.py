"""WebShop's own thousand products, where the benchmark data is there."""

import pytest


@pytest.fixture(scope="session")
def real_shop(benchmark_data, tmp_path_factory):
    """WebShop's small data under the names that its own set-up gives them."""
    source = benchmark_data / "webshop"
    if not source.is_dir():
        pytest.skip(f"no WebShop data at {source}")
    folder = tmp_path_factory.mktemp("webshop")
    names = {
        "items_shuffle_1000.rebuilt.json": "items_shuffle_1000.json",
        "items_ins_v2_1000.json": "items_ins_v2_1000.json",
        "items_human_ins.subset13.json": "items_human_ins.json",
    }
    for name, standard in names.items():
        (folder / standard).symlink_to(source / name)
    return folder
