"""Two shops: one of four products, and WebShop's own thousand where the benchmark data is there."""

import json

import pytest

PRODUCTS = [
    {
        "asin": "B000000001",
        "name": "Running Shoes for Men <Pro>",
        "full_description": "Light shoes & strong soles.",
        "small_description": ["Rubber sole", ""],
        "pricing": "$19.99$27.99",
        "images": [""],
        "customization_options": {
            "Color": [{"value": " Blue "}, {"value": "Red/White"}],
            "Style": [{"value": "blue"}, {"value": "search"}],
            "Empty": None,
        },
        "category": "fashion",
        "query": " Shoes",
        "product_category": "Clothing › Men › Shoes",
    },
    {
        "asin": "B000000002",
        "name": "Walking Shoes for Women",
        "full_description": " ",
        "small_description": "Leather sole",
        "pricing": "$1,045.50",
        "images": [""],
        "customization_options": "",
        "category": "fashion",
        "query": "shoes",
        "product_category": "Clothing › Women › Shoes",
    },
    {
        "asin": "B000000003",
        "name": "Green Tea Powder",
        "full_description": "",
        "small_description": ["Crème of tea"],
        "pricing": "",
        "images": [""],
        "customization_options": {"Flavor": [{"value": "Plain"}, {"value": "Minty"}]},
        "category": "grocery",
        "query": "tea",
        "product_category": "Grocery › Tea",
    },
    {"asin": "nan"},
]
PRODUCTS.append({**PRODUCTS[0], "name": "A second product under the first one's id"})
INSTRUCTIONS = {
    "B000000001": {
        "attributes": ["rubber sole", "quick drying"],
        "instruction": "Find me shoes",
        "instruction_attributes": ["rubber sole"],
    },
    "B000000002": {"attributes": ["leather sole"]},
    "B000000003": {
        "attributes": ["gluten free"],
        "instruction": "Find me tea",
        "instruction_attributes": ["gluten free", "organic"],
    },
}
HUMAN = {
    "B000000003": [
        {
            "instruction": "i want minty tea.",
            "instruction_attributes": ["gluten free"],
            "instruction_options": ["mint"],
        },
        {"instruction": "i want tea", "instruction_attributes": [], "instruction_options": []},
    ]
}


@pytest.fixture(scope="session")
def small_shop(tmp_path_factory):
    folder = tmp_path_factory.mktemp("small_shop")
    (folder / "items_shuffle_1000.json").write_text(json.dumps(PRODUCTS))
    (folder / "items_ins_v2_1000.json").write_text(json.dumps(INSTRUCTIONS))
    (folder / "items_human_ins.json").write_text(json.dumps(HUMAN))
    return folder


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
