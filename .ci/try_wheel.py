"""A new user's first hour, from the package alone: ``python .ci/try_wheel.py dist/``.

The package is a wheel, or a folder of some, of which pip takes the one that fits best; what else is
installed comes from the index. It uses the Python that runs it; another one, named behind the
package, runs a worker of its server.
In a folder outside the repository it makes an environment, installs the core, and trains over a
server inside the program; then it installs ``[server]`` and has ``aiops`` serve, train, go on after
a kill, export and replay. Its exit status is 0 if all is well.
"""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path

PATIENCE = 120.0  # seconds for one command; compiling kernels for the first time takes a few

CORE = """
import asyncio
import numpy as np
import aiops

async def main():
    async with aiops.serve(port=0, policy="asgd", set={"lr": 0.1}) as server:
        def train():
            with aiops.Worker(server.url, {"w": np.ones(4, np.float32)}) as worker:
                worker.step({"w": np.ones(4, np.float32)})
                return worker.params["w"].tolist()
        assert np.allclose(await asyncio.to_thread(train), 0.9)

asyncio.run(main())
"""

WORKER = """
import itertools
import aiops
from aiops.lab.workloads import MLP, batches, load

data, model = load("digits"), MLP((64, 32, 10))
with aiops.Worker(params=model.init(seed=0)) as worker:
    for x, y in itertools.islice(batches(data, 16, 0), 200):
        worker.step(model.gradients(worker.params, x, y)[1])
    print(worker.version)
"""


FITTING = """
import sys
from pip._vendor.packaging.tags import sys_tags
from pip._vendor.packaging.utils import parse_wheel_filename

fitting = set(sys_tags())
print(any(parse_wheel_filename(name)[3] & fitting for name in sys.argv[1:]))
"""


class User:
    """A user with a folder and an environment of their own."""

    def __init__(self, folder: Path, package: Path, python: str = sys.executable) -> None:
        self.folder, self.package = folder, package
        self.programs = folder / "env" / "bin"
        # Nothing of the machine's own settings, nor of the repository.
        self.environment = {
            name: value
            for name, value in os.environ.items()
            if not name.startswith(("AIOPS_", "PYTHON", "VIRTUAL_ENV"))
        }
        folder.mkdir(exist_ok=True)
        subprocess.run([python, "-m", "venv", folder / "env"], check=True)

    def install(self, extras: str) -> None:
        """Install the package with extras."""
        pip = ("python", "-m", "pip", "install", "--quiet")
        if self.package.is_dir():  # from it alone, whatever the index has
            own = ("--no-index", "--find-links", str(self.package), "--no-deps", "aiops-ps")
            self.run(*pip, *own, seconds=600)
            self.run(*pip, f"aiops-ps{extras}", seconds=600)
        else:
            self.run(*pip, f"{self.package}{extras}", seconds=600)

    def compiled(self) -> bool:
        """Return whether the package has compiled code for this Python and machine."""
        wheels = self.package.glob("*.whl") if self.package.is_dir() else [self.package]
        names = [path.name for path in wheels if not path.name.endswith("-none-any.whl")]
        return self.run("python", "-c", FITTING, *names).strip() == "True"

    def run(self, *words: str, status: int = 0, seconds: float = PATIENCE) -> str:
        """Run a command of the environment; return what it printed."""
        print("$", *(word.strip().partition("\n")[0] for word in words), flush=True)
        begun = time.monotonic()
        done = subprocess.run(
            [self.programs / words[0], *words[1:]],
            cwd=self.folder,
            env=self.environment,
            capture_output=True,
            text=True,
            timeout=seconds,
            check=False,
        )
        text = done.stdout + done.stderr
        if done.returncode != status or "Traceback" in text:
            raise SystemExit(f"{words} ended with {done.returncode}:\n{text}")
        print(f"    {time.monotonic() - begun:.2f} s", flush=True)
        return text

    def serve(self, *flags: str) -> subprocess.Popen[str]:
        """Start a server at a free port; workers and commands find its URL in AIOPS_URL."""
        server = subprocess.Popen(
            [self.programs / "aiops", "serve", "--port", "0", *flags],
            cwd=self.folder,
            env=self.environment,
            stdout=subprocess.PIPE,
            text=True,
        )
        assert server.stdout is not None
        self.environment["AIOPS_URL"] = server.stdout.readline().strip()
        assert self.environment["AIOPS_URL"].startswith("aiops://"), "it has not started"
        return server


def try_core(user: User) -> None:
    """Install two packages, train, and ask for the command line that is not there."""
    user.install("")
    installed = user.run("python", "-m", "pip", "list", "--format=freeze")
    packages = set(re.findall(r"^([\w-]+)==", installed, re.MULTILINE))
    assert packages - {"pip", "setuptools"} == {"aiops-ps", "numpy", "msgpack"}, packages
    user.run("python", "-c", CORE)
    assert "pip install 'aiops-ps[server]'" in user.run("aiops", "serve", status=69)


def try_server(user: User) -> None:
    """Serve, train, kill the server, go on, export and replay."""
    user.install("[server]")
    version = user.run("aiops", "--version")
    assert version.startswith("aiops ")
    said = re.search(r"^compiled exchange: (\w+)", version, re.MULTILINE)
    assert said is not None, version
    assert (said[1] == "yes") == user.compiled(), version
    print(version.strip(), flush=True)
    assert " bench " not in user.run("aiops", "--help")
    user.run("aiops", "policies", "fasgd")
    kept = ("--state", "state", "--keep-journal")
    server = user.serve(*kept)
    assert user.run("python", "-c", WORKER).split() == ["200"]
    url = user.environment["AIOPS_URL"]
    assert "is alive" in user.run("aiops", "ping", url)
    server.kill()
    server.wait(PATIENCE)
    server = user.serve(*kept)
    assert user.run("python", "-c", WORKER).split() == ["400"], "a kill has lost pushes"
    assert "400" in user.run("aiops", "stats", user.environment["AIOPS_URL"])
    server.send_signal(signal.SIGTERM)
    assert server.wait(PATIENCE) == 0
    user.run("aiops", "state", "verify", "state")
    user.run("aiops", "state", "export", "state", "--out", "model.safetensors")
    replayed = user.run("aiops", "replay", "state", "--save", "again.safetensors")
    assert "400" in replayed
    exported, again = (values(user.folder / f"{name}.safetensors") for name in ("model", "again"))
    assert exported == again, "the exported and the replayed model differ"


def try_mixed(user: User, other: User) -> None:
    """Have a worker of another Python, with the core alone, train at this one's server."""
    other.install("")
    server = user.serve()
    other.environment["AIOPS_URL"] = user.environment["AIOPS_URL"]
    assert other.run("python", "-c", WORKER).split() == ["200"]
    server.send_signal(signal.SIGTERM)
    assert server.wait(PATIENCE) == 0


def values(path: Path) -> bytes:
    """Return the bytes of the tensors in a .safetensors file; its header's order is free."""
    data = path.read_bytes()
    return data[8 + int.from_bytes(data[:8], "little") :]


def main() -> None:
    """Try the package that is named on the command line, and another Python, if one is."""
    package, *others = sys.argv[1:]
    with tempfile.TemporaryDirectory() as folder:
        user = User(Path(folder), Path(package).resolve())
        try_core(user)
        try_server(user)
        for number, python in enumerate(others):
            other = Path(folder, f"other-{number}")
            try_mixed(user, User(other, user.package, python))
    print(f"all well, with Python {sys.version.partition(' ')[0]}")


if __name__ == "__main__":
    main()
