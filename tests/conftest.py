import os
from pathlib import Path

import pytest


@pytest.fixture(scope="session")
def robot_logs() -> Path:
    """Folder of real robot logs, named by TARSUS_LOGS or beside the repository."""
    folder = Path(os.environ.get("TARSUS_LOGS", Path(__file__).parents[2] / "shared" / "logs"))
    if not folder.is_dir():
        pytest.skip(f"no real robot logs at {folder}: set TARSUS_LOGS to their folder")
    return folder
