"""The requirements files as dependencies and extras, for `uv sync` and `pip install -e .`, which install no modules."""

from pathlib import Path

from setuptools import setup


def requirements(name):
    """The lines of a requirements file; its extra adds them to those of requirements.txt."""
    lines = (Path(__file__).parent / name).read_text().splitlines()
    return [line for line in lines if not line.startswith(("#", "-r"))]


setup(
    install_requires=requirements("requirements.txt"),
    extras_require={name: requirements(f"requirements-{name}.txt") for name in ("gpu", "dev")},
)
