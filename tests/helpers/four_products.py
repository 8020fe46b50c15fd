"""WebShop's data files for a shop of four products, one of them invalid and one twice."""

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
