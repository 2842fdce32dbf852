"""Runs the C++ tests that a test build installs beside the package."""

import subprocess
from pathlib import Path

import pytest

import lily

TESTS = Path(lily.__file__).with_name("lily_tests")


def test_cpp():
    if not TESTS.exists():
        pytest.skip("needs a build with LILY_TESTING=ON")
    done = subprocess.run([TESTS], capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stdout + done.stderr
