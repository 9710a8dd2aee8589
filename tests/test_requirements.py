"""uv.lock was made from the requirements files as they are."""

import re
import tomllib

from conftest import ROOT
from packaging.requirements import Requirement


def test_lock_has_the_requirements():
    packages = tomllib.loads((ROOT / "uv.lock").read_text())["package"]
    [project] = [package for package in packages if package["name"] == "train-gpt2"]
    locked = set()
    for required in project["metadata"]["requires-dist"]:
        extra = re.search(r"extra == '(\w+)'", required.get("marker", ""))
        locked.add((extra[1] if extra else None, required["name"], required["specifier"]))
    written = set()
    for extra, file in {None: "requirements.txt", "gpu": "requirements-gpu.txt", "dev": "requirements-dev.txt"}.items():
        for line in (ROOT / file).read_text().splitlines():
            if not line.startswith(("#", "-r")):
                requirement = Requirement(line.partition(" #")[0])
                written.add((extra, requirement.name.lower().replace("_", "-"), str(requirement.specifier)))
    assert locked == written, "uv lock"
