"""Install the built wheel in an environment of its own and use it away from the repository.

Usage: python tests/wheel.py dist/draftsmith-*.whl
"""

import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path


def main(wheel: Path) -> None:
    """Check what the wheel holds, then run it from another folder.

    Dependencies come from the environment that runs this script: only the package itself is
    taken from the wheel.
    """
    names = set(zipfile.ZipFile(wheel).namelist())
    assert "draftsmith/cli.py" in names
    assert "draftsmith/recipes/quickstart.yaml" in names
    assert "draftsmith/data/prompts/quick.jsonl" in names
    stray = [n for n in names if n.startswith(("draftsmith/tests", "draftsmith/benchmarks"))]
    assert not stray, stray
    with tempfile.TemporaryDirectory() as folder:
        place = Path(folder) / "site"
        pip = [sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "--target", place]
        subprocess.run([*pip, wheel], check=True)
        code = (
            "import sys; sys.path.insert(0, sys.argv[1]); import draftsmith; "
            "assert draftsmith.__file__.startswith(sys.argv[1]), draftsmith.__file__; "
            "from draftsmith.recipes.loading import load, shipped; "
            "[load(name) for name in shipped()]; "
            "from draftsmith.checkpoints.families import families; assert families(); "
            "sys.argv = ['draftsmith', 'recipes', 'list']; "
            "from draftsmith.cli import main; main()"
        )
        done = subprocess.run(
            [sys.executable, "-c", code, str(place)], cwd=folder, capture_output=True, text=True
        )
        assert done.returncode == 0, done.stderr
        assert "quickstart" in done.stdout
    print(f"{wheel.name}: {len(names)} files, installs and runs on its own")


if __name__ == "__main__":
    main(Path(sys.argv[1]))
