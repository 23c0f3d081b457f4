"What several test files share."
import subprocess
from pathlib import Path

ROOT = Path(__file__).parents[1]


def project_files(*suffixes: str) -> list[Path]:
    "Files of the project as git sees them, those not yet committed included; suffixes such as `.json`, default all."
    command = ["git", "ls-files", "--cached", "--others", "--exclude-standard"]
    names = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True).stdout.split("\n")
    paths = [ROOT / name for name in names if name]
    return sorted(path for path in paths if path.is_file() and (not suffixes or path.suffix in suffixes))
