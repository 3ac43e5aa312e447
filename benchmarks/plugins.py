"""The peers' environments and processes, seen from run.py."""

from __future__ import annotations

import ast
import contextlib
import json
import os
import select
import signal
import subprocess
import sys
import time
import venv
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

HERE = Path(__file__).parent
ENVS = HERE / ".envs"
# Settings that a user or a machine may have for other purposes; every library decides itself.
UNSET = (
    "OPENBLAS_CORETYPE", "OPENBLAS_L2_SIZE", "OPENBLAS_NUM_THREADS", "OMP_NUM_THREADS",
    "MKL_NUM_THREADS", "SCALEDOT_NUM_THREADS", "SCALEDOT_TARGET", "PYTHONPATH",
)  # fmt: skip


@dataclass(frozen=True)
class Plugin:
    """What is known of a peer without importing it."""

    name: str
    title: str
    env: str
    requirements: tuple[str, ...]
    package: str

    @property
    def python(self) -> Path | None:
        """Interpreter of its environment, None where there is none."""
        if not self.env:
            return Path(sys.executable)
        given = os.environ.get(self.variable)
        path = Path(given) if given else ENVS / self.env / "bin" / "python"
        return path if path.exists() else None

    @property
    def variable(self) -> str:
        """Environment variable that may name the interpreter."""
        return f"SCALEDOT_BENCH_{self.env.upper()}"


def discover(package: str = "peers") -> dict[str, Plugin]:
    """All plug-ins of a folder by name, scaledot first."""
    found = {}
    for path in sorted((HERE / package).glob("[a-z]*.py")):
        tree = ast.parse(path.read_text())
        constants = {
            node.targets[0].id: ast.literal_eval(node.value)
            for node in tree.body
            if isinstance(node, ast.Assign)
            and isinstance(node.targets[0], ast.Name)
            and node.targets[0].id in ("TITLE", "ENV", "REQUIREMENTS")
        }
        found[path.stem] = Plugin(
            path.stem, constants["TITLE"], constants["ENV"], constants["REQUIREMENTS"], package
        )
    first = (
        "scaledot", "scaledot_vjp", "torch", "flex", "zentorch", "onnxruntime", "openvino", "jax",
    )  # fmt: skip
    others = sorted(set(found) - set(first))
    return {name: found[name] for name in (*first, *others) if name in found}


def set_up(plugin: Plugin) -> None:
    """Make the environment of a peer and install what it requires."""
    if not plugin.env:
        return
    folder = ENVS / plugin.env
    print(f"{plugin.name}: {', '.join(plugin.requirements)} in {folder}", flush=True)
    venv.create(folder, with_pip=True, symlinks=True)
    python = folder / "bin" / "python"
    subprocess.run([python, "-m", "pip", "install", "--quiet", *plugin.requirements], check=True)


def environment(scratch: Path, own: bool = False) -> dict[str, str]:
    """Environment variables of a child process; ``own``: one that imports scaledot."""
    variables = {name: x for name, x in os.environ.items() if name not in UNSET}
    variables["TORCHINDUCTOR_CACHE_DIR"] = str(scratch / "inductor")
    if own:
        variables["PYTHONPATH"] = str(HERE.parent / "src")
    return variables


class PeerError(Exception):
    """A peer cannot do what it was told; the message says why."""


@dataclass
class Peer:
    """The process of a peer at a number of threads. It stands still while others are timed."""

    plugin: Plugin
    threads: int
    scratch: Path
    versions: dict[str, str] = field(default_factory=dict)
    _process: subprocess.Popen | None = None

    @property
    def _log(self) -> Path:
        return self.scratch / f"{self.plugin.name}-{self.threads}.log"

    def start(self) -> None:
        """Start the process and learn its versions."""
        python = self.plugin.python
        if python is None:
            raise PeerError(f"not installed: python benchmarks/run.py --setup {self.plugin.name}")
        log = self._log.open("a")
        about = (self.plugin.package, self.plugin.name, str(self.threads))
        command = [python, HERE / "worker.py", *about]
        self._process = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=log,
            env=environment(self.scratch, own=not self.plugin.env),
        )  # fmt: skip
        log.close()
        self.versions = self._answer(120)["versions"]

    def ask(self, timeout: float, **command: Any) -> dict[str, Any]:
        """Wake the process, give it a command, wait for the answer, let it stand still again.

        A process that has died or takes too long is started anew by the next command.
        """
        if self._process is None:
            self.start()
        process = self._process
        process.send_signal(signal.SIGCONT)
        with contextlib.suppress(BrokenPipeError):  # it has died: the answer will say so
            process.stdin.write(json.dumps(command).encode() + b"\n")
            process.stdin.flush()
        return self._answer(timeout)

    def _answer(self, timeout: float) -> dict[str, Any]:
        process, end, line = self._process, time.monotonic() + timeout, b""
        while not line.endswith(b"\n"):
            ready, _, _ = select.select([process.stdout], [], [], max(0, end - time.monotonic()))
            piece = os.read(process.stdout.fileno(), 1 << 20) if ready else b""
            if not piece:
                self.stop()
                words = " ".join(self._log.read_text(errors="replace").split("\n")[-3:])
                died = f"died with status {process.returncode}: {words}"[:200]
                raise PeerError(died if ready else f"took over {timeout:.0f} s")
            line += piece
        process.send_signal(signal.SIGSTOP)
        answer = json.loads(line)
        if "error" in answer:
            raise PeerError(answer["error"])
        return answer

    def stop(self) -> None:
        """End the process."""
        if self._process is not None:
            self._process.kill()
            self._process.wait()
            for pipe in (self._process.stdin, self._process.stdout):
                with contextlib.suppress(BrokenPipeError):
                    pipe.close()
            self._process = None
