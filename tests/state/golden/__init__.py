"""Files of each format of a state and of a simulation, as the release of that format wrote them.

``python -m tests.state.golden`` writes those of the present format; those of older formats are
never written again.
"""

from pathlib import Path

FOLDER = Path(__file__).parent
