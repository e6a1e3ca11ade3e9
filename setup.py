"""Packaging of `speculative`: dependencies, package data and entry points."""

from pathlib import Path

from setuptools import find_packages, setup

# These are the ranges that the code is written against; constraints.txt pins one known-good set.
CORE = [
    "absl-py>=2.1",
    "flax>=0.11,<0.13",
    "gin-config>=0.5,<0.6",
    "huggingface_hub>=0.30",
    "jax>=0.7,<0.13",
    "jaxtyping>=0.3,<0.4",
    "jinja2>=3.1",  # Runs chat templates.
    "matplotlib>=3.9",
    "numpy>=2.0,<3",
    "optax>=0.2.5,<0.3",
    "orbax-checkpoint>=0.11.20,<0.13",
    "rich>=13.7",
    "rouge-score>=0.1.2,<0.2",
    "sacrebleu>=2.4,<3",
    "safetensors>=0.4.5",
    "scipy>=1.14",
    "sentencepiece>=0.2,<0.3",
    "tensorstore>=0.1.74",
    "tokenizers>=0.20",  # Reads the vocabularies of all models but T5.
]

# seqio requires tensorflow-text, which requires the one TensorFlow release it accepts. Requiring
# tensorflow-cpu as well would install a second TensorFlow over the first. TFDS imports
# importlib_resources to prepare a dataset, but requires it on old Pythons only.
TASKS = ["importlib_resources>=6", "seqio==0.0.20.*"]

DEV = [
    "ipykernel>=6.29",
    "nbclient>=0.10",
    "nbformat>=5.10",
    "pyright[nodejs]>=1.1.400",
    "pytest>=8.3",
    "pytest-timeout>=2.3",
    "pytest-xdist>=3.6",
    "ruff>=0.9",
    "setuptools",  # Builds the package in a test; environments lack it from Python 3.12.
]

# The programs that benchmarks compare with; the package runs without them.
PEERS = ["torch>=2.6", "transformers>=4.50", "ctranslate2>=4.5", "llama-cpp-python>=0.3.10", "gguf"]

setup(
    name="speculative",
    version="0.1.0",
    description="Exact speculative decoding of T5, GPTs, Llamas and Gemmas in JAX and Flax",
    long_description=(Path(__file__).parent / "README.md").read_text(encoding="utf-8"),
    long_description_content_type="text/markdown",
    license="Apache-2.0",
    license_files=["LICENSE"],
    python_requires=">=3.11",
    # The wheel contains the bundled models and configs/, but not scripts/ and benchmarks/.
    packages=[*find_packages(include=["speculative", "speculative.*"]), "speculative.configs"],
    package_dir={"speculative.configs": "configs"},
    package_data={
        "speculative": [
            "assets/**",
            "backends/cpu/*.cc",
            "backends/cpu/*.h",
            "removed.json",
            "reporting/*.html",
        ],
        "speculative.configs": ["**/*.gin"],
    },
    install_requires=CORE,
    extras_require={
        "tasks": TASKS,
        "dev": DEV,
        "peers": PEERS,
        # jax[tpu] pins an older libtpu, which lacks an option that makes drafts faster.
        "tpu": ["libtpu>=0.0.52", "requests"],
        "cuda": ["jax[cuda12]>=0.7,<0.13"],
        "cuda13": ["jax[cuda13]>=0.7,<0.13"],
    },
    entry_points={"console_scripts": ["speculative = speculative.cli:main"]},
)
