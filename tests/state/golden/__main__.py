"""Write the golden files of the present format."""

from aiops.state.blocks import FORMAT
from docs._tools.state.examples import files
from tests.state.golden import FOLDER, simulations

if __name__ == "__main__":
    folder = FOLDER / f"format-{FORMAT}"
    folder.mkdir(exist_ok=True)
    for name, data in files().items():
        (folder / name).write_bytes(data)
    simulations.write(FOLDER / "simulation" / f"format-{FORMAT}")
