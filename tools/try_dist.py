"""Installs the sdist and the wheel of a folder in fresh environments and runs the command line from each."""

import os
import subprocess
import sys
import tempfile
import venv
from pathlib import Path

CHECK = "import millrace, millrace._core; print(millrace.__version__, millrace._core.Map)"
STORE = """
import millrace as mr
with mr.StoreWriter("store", columns={"x": mr.Column("float32", (2,))}) as writer:
    writer.append({"x": [[1, 2], [3, 4]]})
assert mr.open_store("store").num_rows == 2
"""

dist = Path(sys.argv[1])
packages = [*dist.glob("*.whl"), *dist.glob("*.tar.gz")]
assert len(packages) == 2, packages
assert next(dist.glob("*.whl")).name.split("-")[2:4] == ["cp311", "abi3"], "one wheel must serve every later Python"
for package in packages:
    with tempfile.TemporaryDirectory(prefix="millrace-dist-") as folder:
        venv.create(folder, with_pip=True)
        python = f"{folder}/bin/python"
        subprocess.run([python, "-m", "pip", "install", "--quiet", "-c", "constraints.txt", package], check=True)
        subprocess.run([python, "-c", CHECK], check=True, cwd=folder)
        subprocess.run([python, "-c", STORE], check=True, cwd=folder)
        subprocess.run([f"{folder}/bin/millrace", "verify", "store"], check=True, cwd=folder, stdout=subprocess.DEVNULL)
        demo = subprocess.run([f"{folder}/bin/millrace", "demo"], cwd=folder, capture_output=True, text=True)
        assert (demo.returncode, "pip install 'millrace-data[" in demo.stderr) == (1, True), demo  # it wants the extras
        for preset in ("nano", "gpt-124m", "lstm"):  # they came along: what is missing is torch
            train = subprocess.run(
                [f"{folder}/bin/millrace", "train", preset], cwd=folder, capture_output=True, text=True
            )
            assert (train.returncode, "this needs torch" in train.stderr) == (1, True), train
        print(f"{package.name}: installs and runs")

# Without a compiler the install succeeds, the twins serve, and doctor says so.
with tempfile.TemporaryDirectory(prefix="millrace-dist-") as folder:
    venv.create(folder, with_pip=True)
    source = next(dist.glob("*.tar.gz"))
    install = [f"{folder}/bin/python", "-m", "pip", "install", "--quiet", "-c", "constraints.txt", source]
    subprocess.run(install, check=True, env={**os.environ, "CC": "/bin/false"})
    said = subprocess.run(
        [f"{folder}/bin/millrace", "doctor"], check=True, cwd=folder, capture_output=True, text=True
    ).stdout
    assert "C core      not built" in said, said
    subprocess.run([f"{folder}/bin/python", "-c", STORE], check=True, cwd=folder)
    subprocess.run([f"{folder}/bin/millrace", "verify", "store"], check=True, cwd=folder, stdout=subprocess.DEVNULL)
    print(f"{source.name}: installs and runs without a compiler")
