"""What `import paddle` finds in a process that `polyreme run` started: it makes way for polyreme.

This folder's parent is on PYTHONPATH there, and so in every Python process that the script starts.
"""

import importlib.util
import sys
from pathlib import Path

if importlib.util.find_spec("polyreme") is None:  # run from a checkout that is not installed
    sys.path.append(str(Path(__file__).resolve().parents[4]))

from polyreme.paddle_scripts import as_paddle, hints

as_paddle()
hints.install()
